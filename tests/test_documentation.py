"""Signatures, docstrings and stubs of operators: made from the specification, and true."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import kernelcat
from kernelcat import catalog
from kernelcat.call import documentation, operator, signature
from kernelcat.call.arrays import ArrayInfo
from kernelcat.errors import InvalidArgument

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kernelcat"
EMPTY = inspect.Parameter.empty


def test_the_stubs_are_what_the_generator_writes() -> None:
    written = (PACKAGE / "call" / "typed.pyi").read_text(encoding="utf-8")
    assert documentation.stub() + "\n" == written, "run make readme"
    assert (PACKAGE / "py.typed").exists()


def test_the_signature_of_an_operator_is_that_of_its_entry() -> None:
    parameters = inspect.signature(kernelcat.get("gemm")).parameters
    assert list(parameters) == ["a", "b", "bias", "residual", "activation", "out"]
    assert parameters["a"].default is EMPTY and parameters["bias"].default is None
    assert parameters["activation"].default == "none"
    updating = inspect.signature(kernelcat.get("kv_write")).parameters
    assert updating["out"].default is EMPTY  # the caches must be passed


def test_the_class_keeps_its_own_signature_and_docstring() -> None:
    assert next(iter(inspect.signature(operator.Op).parameters)) == "entry"
    assert "An entry of the catalog as a function" in str(operator.Op.__doc__)


def test_help_shows_call_shapes_types_keywords_and_errors() -> None:
    text = pydoc.plain(pydoc.render_doc(kernelcat.get("paged_attn")))
    flat = " ".join(text.split())
    for part in (
        "paged_attn(q, k_cache, v_cache, block_table, kv_lens, cu_q, sinks=None",
        "block_table : (batch, table_width) int32",
        "sinks : (heads,) float32, optional",
        "k_block_scale : (pages, page_size, kv_heads, head_dim/16) float8_e4m3fn, for kv_dtype",
        "window : int, 0 by default",
        "softcap : float, 0.0 by default",
        "lse : (tokens, heads) float32",
        "InvalidArgument",
        "page_size: 1, 16, 32, 64, 128",
        "Values of cu_q, kv_lens, block_table, but under kernelcat.debug()",
    ):
        assert part in flat, part
    assert max(map(len, text.splitlines())) < 110


@pytest.mark.parametrize("name", catalog.names())
def test_arrays_and_the_keywords_of_the_signature_determine_every_named_problem(name: str) -> None:
    """What has no default must be given, and nothing but what the signature has."""
    entry = catalog.entry(name)
    parameters = documentation.signature(entry).parameters
    keywords = {axis.name for axis in documentation.keywords(entry)}
    drawn = {axis.name: axis.default for axis in entry.axes if axis.drawn}
    for problem in entry.problems.values():
        infos = {
            tensor.name: ArrayInfo(
                0, tensor.shape_of(problem), tensor.strides_of(problem),
                tensor.dtype_of(problem), "cuda:0", "torch",
            )
            for tensor in entry.present(problem)
            if tensor in entry.drawn or tensor.strides is not None
        }  # fmt: skip
        given = {axis: problem[axis] for axis in keywords}
        inferred = signature.infer(entry, infos, given)
        assert {**inferred.values, **drawn} == {**problem.values, **drawn}
        for keyword in keywords:
            if parameters[keyword].default is EMPTY:
                less = {axis: value for axis, value in given.items() if axis != keyword}
                with pytest.raises(InvalidArgument, match=keyword):
                    signature.infer(entry, infos, less)


def test_a_type_checker_knows_the_call_of_each_entry(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np\nimport kernelcat\n"
        "x = np.ones((4, 64), np.float32)\n"
        "gemm = kernelcat.get('gemm')\n"
        "reveal_type(gemm)\n"
        "gemm(x, x, activation='silu')\n"
        "reveal_type(kernelcat.get('paged_attn').bind(x, x, x, x, x, x, window=128))\n"
        "reveal_type(kernelcat.get(input()))\n"
        "gemm(x, x, activation='sulu')\n"
        "gemm(x, 'y')\n"
        "gemm(x)\n"
    )
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--no-incremental",
               "--follow-imports=silent", "--config-file=", str(program)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line.partition("program.py:")[2] for line in done.stdout.splitlines()]
    notes = [line for line in lines if "note: Revealed" in line]
    assert [note.partition(" is ")[2].strip('"') for note in notes] == [
        "kernelcat.call.typed.Gemm", "kernelcat.call.fast_path.Bound", "kernelcat.call.operator.Op"
    ], done.stdout + done.stderr  # fmt: skip
    errors = [line.partition(":")[0] for line in lines if "error:" in line]
    assert errors == ["9", "10", "11"], done.stdout
