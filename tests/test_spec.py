"""Axes, problems and tensors."""

from __future__ import annotations

import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Axis, Derived, ElementType, Problem, Tensor, power_of_two
from kernelcat.errors import InvalidArgument, UnknownName

GEMM = {"M": 3, "N": 5, "K": 7, "dtype": "float16", "bias": False}


def test_a_problem_does_not_depend_on_the_order_of_its_axes() -> None:
    one, other = Problem.of("gemm", M=1, N=2), Problem.of("gemm", N=2, M=1)
    assert one == other and hash(one) == hash(other) and one.key == '{"M":1,"N":2}'


def test_a_config_equals_another_with_its_values_only() -> None:
    config = Config(stages=3, block_m=64)
    assert config == Config({"block_m": 64, "stages": 3}) != Config(stages=4, block_m=64)
    assert config.key == '{"block_m":64,"stages":3}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "bfloat16, float16"),
        ({"M": -1}, "whole number"),
        ({"M": True}, "whole number"),
        ({"Q": 1}, "no axis 'Q'"),
    ],
)
def test_an_illegal_problem_says_why(change: dict, message: str) -> None:
    with pytest.raises((InvalidArgument, UnknownName), match=message):
        catalog.entry("gemm").problem(**{**GEMM, **change})


def test_a_missing_axis_is_named() -> None:
    with pytest.raises(InvalidArgument, match="also needs K"):
        catalog.entry("gemm").problem(**{k: v for k, v in GEMM.items() if k != "K"})


def test_a_constraint_between_axes_is_checked() -> None:
    with pytest.raises(InvalidArgument, match="src_stride=4 must be at least cols=8"):
        catalog.entry("tma_copy").problem(rows=2, cols=8, src_stride=4, dst_stride=8, dtype="uint8")


def test_buckets_round_sizes_up_and_keep_major_choices() -> None:
    entry = catalog.entry("gemm")
    bucket = entry.bucket(entry.problem(M=100, N=128, K=129, dtype="bfloat16", bias=True))
    assert bucket.values == {"M": 128, "N": 128, "K": 256}
    assert [power_of_two(n) for n in (0, 1, 2, 3, 1024, 1025)] == [0, 1, 2, 4, 1024, 2048]


def test_spans_count_the_gaps_between_strided_rows_but_not_after_the_last() -> None:
    entry = catalog.entry("tma_copy")
    problem = entry.problem(rows=3, cols=5, src_stride=8, dst_stride=5, dtype="uint8")
    src, dst = entry.tensors
    assert src.span_of(problem) == 2 * 8 + 5 and dst.span_of(problem) == 15


@pytest.mark.parametrize("name", catalog.names())
def test_every_named_problem_is_legal_and_costs_something(name: str) -> None:
    entry = catalog.entry(name)
    for problem in entry.problems.values():
        assert entry.problem(**problem.values) == problem
        assert entry.bytes_moved(problem) > 0 and entry.flops(problem) >= 0


def test_a_derived_size_follows_from_the_axes() -> None:
    blocks = Derived("K/128", lambda axes: -(-axes["K"] // 128))
    tensor = Tensor("scale", (blocks, "M", 4), "float32")
    assert tensor.shape_of(Problem.of("any", M=3, K=129)) == (2, 3, 4)
    assert str(blocks) == "K/128"


def test_an_axis_that_is_left_out_takes_its_default() -> None:
    problem = catalog.entry("gemm").problem(M=1, N=2, K=3, dtype="float16")
    assert (problem["activation"], problem["bias"]) == ("none", False)


def test_a_size_may_have_a_step() -> None:
    axis = Axis.size("K", "columns", 0, 100, step=16)
    axis.check(32)
    with pytest.raises(InvalidArgument, match="K=40 must be a multiple of 16"):
        axis.check(40)


def test_an_element_type_follows_from_a_choice_and_implies_it() -> None:
    scale = ElementType.of("format", nvfp4="float8_e4m3fn", mxfp4="float8_e8m0fnu")
    tensor = Tensor("scale", (1,), scale)
    assert tensor.dtype_of(Problem.of("any", format="mxfp4")) == "float8_e8m0fnu"
    assert scale.is_invertible and scale.value_of("float8_e4m3fn") == "nvfp4"
    assert scale.value_of("float32") is None
    out = ElementType.of("dtype", bfloat16="bfloat16", float16="float16", float8="bfloat16")
    assert out.value_of("bfloat16") is None and out.value_of("float16") == "float16"
    assert not out.is_invertible
