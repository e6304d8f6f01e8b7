"""Signatures: the problem inferred from arguments, and the message of each refusal."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcat import catalog
from kernelcat.call import signature
from kernelcat.call.arrays import ArrayInfo
from kernelcat.errors import InvalidArgument

GEMM, COPY = catalog.entry("gemm"), catalog.entry("tma_copy")


def array(*shape, strides=None, dtype="bfloat16", device="cuda:0", library="torch", at=0):
    """An ArrayInfo at address ``at``: contiguous, or with ``strides`` in elements."""
    if strides is None:
        strides, step = [], 1
        for extent in reversed(shape):
            strides.insert(0, step)
            step *= max(extent, 1)
    return ArrayInfo(at, shape, tuple(strides), dtype, device, library)


def gemm(**infos: ArrayInfo) -> dict[str, object]:
    return dict(signature.infer(GEMM, infos, {}).values)


def copy(**infos: ArrayInfo) -> dict[str, object]:
    return dict(signature.infer(COPY, infos, {}).values)


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(InvalidArgument) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_shapes_types_and_presence_become_axes() -> None:
    a, b, bias = array(4, 8), array(6, 8), array(6)
    assert gemm(a=a, b=b) == {
        "M": 4, "N": 6, "K": 8, "dtype": "bfloat16", "bias": False, "activation": "none",
        "residual": False,
    }  # fmt: skip
    assert gemm(a=a, b=b, bias=bias)["bias"] is True
    assert gemm(a=a, b=b, d=array(4, 6))["M"] == 4


def test_empty_and_single_row_arrays_may_have_any_strides() -> None:
    assert gemm(a=array(0, 8, strides=(1, 1)), b=array(6, 8))["M"] == 0
    assert gemm(a=array(1, 8, strides=(999, 1)), b=array(6, 8))["M"] == 1


def test_strides_become_axes() -> None:
    src, dst = array(4, 8, strides=(16, 1)), array(4, 8, strides=(32, 1))
    assert copy(src=src, dst=dst) == {
        "rows": 4, "cols": 8, "src_stride": 16, "dst_stride": 32, "dtype": "bfloat16"
    }  # fmt: skip


def test_the_strides_of_an_output_to_be_allocated_are_contiguous() -> None:
    assert copy(src=array(4, 8, strides=(16, 1)))["dst_stride"] == 8


def test_one_row_has_the_stride_of_a_contiguous_array() -> None:
    """Otherwise each view of a row would be a separate problem with equal work."""
    assert copy(src=array(1, 8, strides=(500, 1)))["src_stride"] == 8


@pytest.mark.parametrize(
    ("infos", "line"),
    [
        (
            {"a": array(1, 4, 8), "b": array(6, 8)},
            "gemm: a must have 2 dimensions (M, K), not 3 (its shape is (1, 4, 8))",
        ),
        (
            {"a": array(4, 8), "b": array(6, 9)},
            "gemm: K differs: a.shape[1] is 8, but b.shape[1] is 9",
        ),
        (
            {"a": array(4, 8), "b": array(6, 8), "bias": array(5)},
            "gemm: N differs: b.shape[0] is 6, but bias.shape[0] is 5",
        ),
        (
            {"a": array(4, 8, dtype="float32"), "b": array(6, 8)},
            "gemm: a is float32; use one of: bfloat16, float16",
        ),
        (
            {"a": array(4, 8), "b": array(6, 8, dtype="float16")},
            "gemm: dtype differs: a is bfloat16, but b is float16",
        ),
        (
            {"a": array(4, 8, strides=(1, 4)), "b": array(6, 8)},
            "gemm: a is not contiguous (shape (4, 8), strides (1, 4)); pass a.contiguous()",
        ),
        (
            {"a": array(4, 8, strides=(1, 4), library="cupy"), "b": array(6, 8)},
            "gemm: a is not contiguous (shape (4, 8), strides (1, 4)); "
            "pass cupy.ascontiguousarray(a)",
        ),
        (
            {"a": array(4, 8), "b": array(6, 8), "d": array(4, 7)},
            "gemm: out.shape[1] must be 6 (N or N/2), not 7",
        ),
        (
            {"a": array(4, 8), "b": array(6, 8), "d": array(4, 6, dtype="float16")},
            "gemm: dtype differs: a is bfloat16, but out is float16",
        ),
        (
            {"a": array(4, 8), "b": array(6, 8), "d": array(4, 6, strides=(1, 4))},
            "gemm: out is not contiguous (shape (4, 6), strides (1, 4)); pass a contiguous array",
        ),
    ],
)
def test_gemm_refuses(infos: dict[str, ArrayInfo], line: str) -> None:
    assert refusal(gemm, **infos) == line


@pytest.mark.parametrize(
    ("infos", "line"),
    [
        (
            {"src": array(4, 8, strides=(16, 2))},
            "tma_copy: src must have stride 1 along axis 1, not 2; pass src.contiguous()",
        ),
        (
            {"src": array(4, 8, strides=(0, 1))},
            "tma_copy: src_stride=0 must be at least cols=8",
        ),
        (
            {"src": array(4, 8, strides=(-8, 1), library="cupy")},
            "src_stride=-8 must be a whole number >= 0",
        ),
        (
            {"src": array(4, 8, dtype="float64")},
            "tma_copy: src is float64; use one of: bfloat16, float16, float32, uint8",
        ),
    ],
)
def test_tma_copy_refuses(infos: dict[str, ArrayInfo], line: str) -> None:
    assert refusal(copy, **infos) == line


@pytest.mark.parametrize(
    ("infos", "line"),
    [
        (
            {"a": array(4, 8, device="cpu"), "b": array(6, 8)},
            "gemm: a is on the CPU; move it to a CUDA device, or call the oracle, "
            'kernelcat.reference("gemm")',
        ),
        (
            {"a": array(4, 8), "b": array(6, 8, device="cpu")},
            "gemm: b is on the CPU; move it to a CUDA device, or call the oracle, "
            'kernelcat.reference("gemm")',
        ),
        (
            {"a": array(4, 8), "b": array(6, 8, device="meta")},
            "gemm: b is on 'meta'; move it to a CUDA device",
        ),
        (
            {"a": array(4, 8), "b": array(6, 8, device="cuda:1")},
            "gemm: a is on cuda:0 but b is on cuda:1; move them to one device",
        ),
        (
            {"a": array(4, 8), "b": array(6, 8), "d": array(4, 6, device="cuda:1")},
            "gemm: a is on cuda:0 but out is on cuda:1; move them to one device",
        ),
        (
            {"a": array(4, 8), "b": array(6, 8, library="cupy")},
            "gemm: a is a torch array but b is a cupy array; pass arrays of one library",
        ),
    ],
)
def test_devices_are_refused(infos: dict[str, ArrayInfo], line: str) -> None:
    assert refusal(signature.device_of, GEMM, infos) == line


def test_the_device_is_the_one_all_arrays_share() -> None:
    infos = {name: array(4, 8, device="cuda:3") for name in ("a", "b")}
    assert signature.device_of(GEMM, infos) == 3


def test_arguments_are_placed_by_position_and_by_name() -> None:
    assert signature.arrange(GEMM, ("a", "b"), {}) == (("a", "b", None, None), {})
    assert signature.arrange(GEMM, ("a",), {"bias": "c", "b": "b"}) == (
        ("a", "b", "c", None),
        {},
    )
    assert signature.arrange(GEMM, ("a", "b", None), {}) == (("a", "b", None, None), {})
    assert signature.arrange(GEMM, ("a", "b"), {"M": 4}) == (
        ("a", "b", None, None),
        {"M": 4},
    )


@pytest.mark.parametrize(
    ("args", "named", "line"),
    [
        (("a",), {}, "gemm needs b (arrays)"),
        ((), {}, "gemm needs a and b (arrays)"),
        (("a", None), {}, "gemm needs b (arrays)"),
        (
            ("a", "b", "c", "d", "e"),
            {},
            "gemm takes at most 4 arrays (a, b, bias, residual), not 5; pass the output as out=",
        ),
        (("a", "b"), {"a": "a"}, "gemm: a is given twice, by position and by name"),
        (("a", "b"), {"biass": "c"}, "gemm has no argument 'biass'; did you mean bias?"),
    ],
)
def test_arguments_are_refused(args, named, line: str) -> None:
    assert refusal(signature.arrange, GEMM, args, named) == line


def test_an_axis_passed_by_name_must_agree_with_the_arrays() -> None:
    infos = {"a": array(4, 8), "b": array(6, 8)}
    assert signature.infer(GEMM, infos, {"M": 4})["M"] == 4
    line = refusal(signature.infer, GEMM, infos, {"M": 5})
    assert line == "gemm: M differs: M= is 5, but a.shape[0] is 4"


def test_a_number_is_no_array() -> None:
    line = refusal(signature.describe, GEMM, (np.zeros((4, 8)), 3, None, None), ())
    assert line.startswith("gemm: b must be an array (torch, CuPy,")
    assert line.endswith("not int")


def test_errors_call_the_output_out() -> None:
    line = refusal(signature.describe, GEMM, (np.zeros((4, 8)),) * 2 + (None, None), (7,))
    assert line.startswith("gemm: out must be an array")


def layout(start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> ArrayInfo:
    return ArrayInfo(start, shape, strides, "float16", "cuda:0", "torch")


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (layout(4096, (4, 8), (8, 1)), layout(4096, (4, 8), (8, 1)), True),
        (layout(4096, (4, 8), (8, 1)), layout(4096 + 64, (4, 8), (8, 1)), False),
        (layout(4096, (4, 8), (8, 1)), layout(4096 + 62, (4, 8), (8, 1)), True),
        # two sub-tiles of one matrix: their ranges interleave, their elements do not
        (layout(4096, (4, 8), (16, 1)), layout(4096 + 16, (4, 8), (16, 1)), False),
        (layout(4096, (4, 8), (16, 1)), layout(4096 + 14, (4, 8), (16, 1)), True),
        (layout(4096, (0, 8), (8, 1)), layout(4096, (4, 8), (8, 1)), False),
    ],
)
def test_overlap_is_exact(first: ArrayInfo, second: ArrayInfo, shared: bool) -> None:
    assert signature.overlap(first, second) is shared
    assert signature.overlap(second, first) is shared


def attention(**more: ArrayInfo) -> dict[str, object]:
    """Axes of two sequences in four pages of 16 tokens, with 4 heads, 2 KV heads, head_dim 64."""
    sizes = {"block_table": (2, 2), "kv_lens": (2,), "cu_q": (3,)}
    ints = {name: array(*shape, dtype="int32") for name, shape in sizes.items()}
    infos = {"q": array(2, 4, 64), **ints, **more}
    return dict(signature.infer(catalog.entry("paged_attn"), infos, {}).values)


def test_block_scales_are_required_for_a_packed_cache_and_refused_for_others() -> None:
    packed = array(4, 16, 2, 32, dtype="float4_e2m1fn_x2")
    cache, scale = array(4, 16, 2, 64), array(4, 16, 2, 4, dtype="float8_e4m3fn")
    scales = {"k_block_scale": scale, "v_block_scale": scale}
    axes = attention(k_cache=packed, v_cache=packed, **scales)
    assert (axes["kv_dtype"], axes["head_dim"]) == ("float4_e2m1fn_x2", 64)
    assert attention(k_cache=cache, v_cache=cache)["kv_dtype"] == "bfloat16"
    assert refusal(attention, k_cache=packed, v_cache=packed, k_block_scale=scale) == (
        "paged_attn needs v_block_scale where kv_dtype is float4_e2m1fn_x2"
    )
    assert refusal(attention, k_cache=cache, v_cache=cache, **scales) == (
        "paged_attn takes no k_block_scale where kv_dtype is bfloat16"
    )
    wide = array(4, 16, 2, 64, dtype="float4_e2m1fn_x2")
    assert refusal(attention, k_cache=wide, v_cache=wide, **scales) == (
        "paged_attn: k_cache.shape[3] must be 32 (head_dim or head_dim/2), not 64"
    )


def dequantize(scale: ArrayInfo, q: ArrayInfo | None = None, **more) -> dict[str, object]:
    infos = {"q": q or array(6, 32, dtype="float4_e2m1fn_x2"), "scale": scale}
    infos |= {n: a for n, a in more.items() if isinstance(a, ArrayInfo)}
    axes = {n: a for n, a in more.items() if not isinstance(a, ArrayInfo)}
    return dict(signature.infer(catalog.entry("nvfp4_dequantize"), infos, axes).values)


def test_axes_are_inferred_from_element_types_and_derived_sizes() -> None:
    e4m3, e8m0 = array(6, 4, dtype="float8_e4m3fn"), array(6, 2, dtype="float8_e8m0fnu")
    one = array(1, dtype="float32")
    axes = dequantize(e4m3, global_scale=one)
    assert (axes["M"], axes["K"], axes["format"]) == (6, 64, "nvfp4")
    assert dequantize(e8m0)["format"] == "mxfp4"
    swizzled = array(128, 4, dtype="float8_e4m3fn")
    axes = dequantize(swizzled, global_scale=one, scale_layout="swizzled")
    assert axes["scale_layout"] == "swizzled"
    assert refusal(dequantize, e4m3) == (
        "nvfp4_dequantize needs global_scale where format is nvfp4"
    )
    assert refusal(dequantize, array(6, 4, dtype="uint8")) == (
        "nvfp4_dequantize: scale is uint8; use float8_e4m3fn (nvfp4) or float8_e8m0fnu (mxfp4)"
    )
    assert refusal(dequantize, e8m0, global_scale=one) == (
        "nvfp4_dequantize takes no global_scale where format is mxfp4"
    )
    assert "scale.shape[1] must be 4 (K/16" in refusal(
        dequantize, array(6, 2, dtype="float8_e4m3fn"), global_scale=one
    )
    assert "format differs" in refusal(dequantize, e8m0, format="nvfp4")


def test_an_output_of_the_wrong_element_type_is_refused() -> None:
    quantize, x = catalog.entry("nvfp4_quantize"), array(6, 64)
    infos = {"x": x, "scale": array(6, 4, dtype="float8_e4m3fn")}
    assert refusal(signature.infer, quantize, infos, {"format": "mxfp4"}).startswith(
        "nvfp4_quantize: format differs"
    )
