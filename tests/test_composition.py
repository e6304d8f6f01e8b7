"""Programs of other entries, renamed and one after the other."""

from __future__ import annotations

import pytest

from kernelcat.catalog.composition import composed, renamed
from kernelcat.catalog.implementation import Int32, Pointer, Program, Step, TensorMap
from kernelcat.jit.cuda import CudaSource

SOURCE = CudaSource("gemm/naive.cu", "kernel")
MAP = TensorMap("a", "bfloat16", (64, 64), (128,), (64, 64), 128)
PROGRAM = Program(
    (Step(SOURCE, (1, 1, 1), (MAP, Pointer("b"), Pointer("sums"), Int32(3)), 32),), {"sums": 64}
)


def test_tensors_and_workspaces_get_other_names() -> None:
    program = renamed(PROGRAM, {"a": "x", "sums": "first_sums"})
    (step,) = program.steps
    assert [getattr(param, "tensor", None) for param in step.params] == [
        "x", "b", "first_sums", None,
    ]  # fmt: skip
    assert program.workspaces == {"first_sums": 64}
    assert step.params[0].box == MAP.box and step.source is SOURCE


def test_launches_follow_each_other() -> None:
    second = renamed(PROGRAM, {"sums": "second_sums"})
    program = composed(PROGRAM, Program(()), second, workspaces={"b": 16})
    assert program.steps == PROGRAM.steps + second.steps
    assert program.workspaces == {"b": 16, "sums": 64, "second_sums": 64}


def test_two_programs_share_no_workspace() -> None:
    with pytest.raises(ValueError, match="workspace sums: rename"):
        composed(PROGRAM, PROGRAM, workspaces={})
