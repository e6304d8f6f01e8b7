"""Keywords that are no arrays: scalars and element types of array libraries, and nonsense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import kernelcat
from kernelcat import Problem, catalog
from kernelcat.errors import InvalidArgument, KernelcatError, UnknownName

SIZES = {"M": 4, "N": 512, "K": 64}
GEMM = catalog.entry("gemm")


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_sizes_may_be_integers_of_numpy(integer: Callable[[int], Any]) -> None:
    problem = GEMM.problem(**{**SIZES, "M": integer(4)}, dtype="bfloat16")
    assert problem == GEMM.problem(**SIZES, dtype="bfloat16")
    assert type(problem["M"]) is int and problem.key


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16, np.str_("bfloat16")],
    ids=str,
)
def test_element_types_may_be_those_of_a_library(dtype: Any) -> None:
    problem = GEMM.problem(**SIZES, dtype=dtype)
    assert problem == GEMM.problem(**SIZES, dtype="bfloat16")
    assert type(problem["dtype"]) is str
    assert GEMM.problem(**SIZES, dtype=np.float16)["dtype"] == "float16"


def test_flags_and_numbers_may_be_those_of_numpy() -> None:
    for true in (np.bool_(True), 1, True):
        assert GEMM.problem(**SIZES, dtype="float16", bias=true)["bias"] is True
    eps = catalog.entry("rms_norm").axis("eps").take(np.float32(0.25))
    assert (eps, type(eps)) == (0.25, float)


def test_a_call_and_an_explanation_take_them_too() -> None:
    x = np.ones((2, 128), np.float32)
    normed = kernelcat.reference("rms_norm")(
        x, np.ones(128, np.float32), eps=np.float32(1e-5), out_format=np.str_("same")
    )
    assert normed is not None
    op = kernelcat.get("gemm")
    plain = op.explain(**SIZES, dtype="bfloat16", gpu="h200")
    assert op.explain(M=np.int64(4), N=512, K=64, dtype=torch.bfloat16, gpu="h200") == plain


def test_choices_that_an_explanation_leaves_out_are_those_of_the_command_line() -> None:
    op = kernelcat.get("gemm")
    found = op.explain(**SIZES, bias=np.bool_(True), gpu="h200").problem
    assert found == GEMM.named("M=4,N=512,K=64,bias=true")
    with pytest.raises(InvalidArgument, match="gemm also needs K"):
        op.explain(M=4, N=512, gpu="h200")


def explained(**more: Any) -> Callable[[], Any]:
    axes = {**SIZES, "dtype": "bfloat16", "gpu": "h200", **more}
    return lambda: kernelcat.get("gemm").explain(**axes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kernelcat.get(None), UnknownName, "unknown entry None; known: all_reduce, "),
        (lambda: kernelcat.get(["gemm"]), UnknownName, "unknown entry ['gemm']; known: "),
        (lambda: kernelcat.reference(None), UnknownName, "unknown entry None; known: "),
        (lambda: kernelcat.get("gemm", language=5), InvalidArgument, "language=5 must be a name"),
        (
            lambda: kernelcat.get("gemm", language="cuda", variant=[1]), InvalidArgument,
            "variant=[1] must be a name",
        ),
        (
            lambda: kernelcat.get("gemm", language="cuda", variant="naive", config=5),
            InvalidArgument, "config=5 must map parameters to values",
        ),
        (
            lambda: kernelcat.get("gemm", language="cuda", variant="naive", config={"a": [1]}),
            InvalidArgument, "config {'a': [1]} has a value that is neither a number nor a name",
        ),
        (explained(gpu=100), UnknownName, "unknown GPU 100; known: "),
        (explained(gpu=["h200"]), UnknownName, "unknown GPU ['h200']; known: "),
        (
            explained(M=10**400), InvalidArgument,
            "M=a number of 1329 bits must be less than 2**31",
        ),
        (explained(M=[1]), InvalidArgument, "M=[1] must be a whole number >= 0"),
        (explained(M=1.5), InvalidArgument, "M=1.5 must be a whole number >= 0"),
        (
            explained(M=np.arange(3)), InvalidArgument,
            "M=array([0, 1, 2]) must be a whole number >= 0",
        ),
        (explained(M=torch.ones(2)), InvalidArgument, "M=tensor([1., 1.]) must be a whole number"),
        (
            explained(dtype=torch.int64), InvalidArgument,
            "dtype='int64' is not supported; use one of: ",
        ),
        (explained(dtype=[1]), InvalidArgument, "dtype=[1] is not supported; use one of: "),
        (
            explained(dtype=np.arange(3)), InvalidArgument,
            "dtype=array([0, 1, 2]) is not supported; use one of: ",
        ),
        (lambda: Problem.of("gemm", M=[1]), InvalidArgument, "M=[1] must be a number or a name"),
        (
            lambda: catalog.entry("rms_norm").axis("eps").take(10**400), InvalidArgument,
            "eps=a number of 1329 bits must be a finite number",
        ),
        (
            lambda: kernelcat.get("gemm").plan(**SIZES, dtype="float16", device="x"),
            InvalidArgument, "device='x' must be the index of a GPU",
        ),
    ],
)  # fmt: skip
def test_nonsense_is_a_one_line_error(
    call: Callable[[], Any], error: type[KernelcatError], message: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_problem_of_scalars_has_canonical_json() -> None:
    problem = Problem.of("gemm", M=np.int64(4), dtype=torch.float16)
    assert problem.key == '{"M":4,"dtype":"float16"}'
