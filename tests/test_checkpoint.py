"""4-bit weights from small safetensors files in the layouts of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kernelcat.errors import InvalidArgument, UnknownName
from kernelcat.layers.checkpoint import INDEX, Checkpoint
from kernelcat.reference import _fp4

N, K = 32, 64
RANDOM = np.random.default_rng(0)
TENSORS = {"U8": np.uint8, "F8_E4M3": np.uint8, "F32": np.float32, "BF16": np.uint16}


def save(path: Path, **tensors: tuple[str, np.ndarray]) -> Path:
    """Write a safetensors file byte by byte; ``__`` in a name stands for a dot."""
    header: dict = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in tensors.items():
        assert array.dtype == TENSORS[dtype]
        offsets = [len(data), len(data) + array.nbytes]
        header[name.replace("__", ".")] = {
            "dtype": dtype, "shape": list(array.shape), "data_offsets": offsets,
        }  # fmt: skip
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def nvfp4():
    """Random weights (N, K), their codes (N, K / 2) and scales (N, K / 16), and global scale."""
    w = RANDOM.standard_normal((N, K))
    g = np.float32(_fp4.global_scale_of(float(abs(w).max())))
    codes, scales = _fp4.quantize(w.astype("float32").astype("float64"), "nvfp4", np.float32([g]))
    return w, codes, scales, g


def dequantized(weight, expert=...):
    """Float32 values (N, K) of an ``Fp4Weight``."""
    g = None if weight.global_scale is None else np.float32(weight.global_scale)
    return _fp4.dequantize(weight.w[expert], weight.scale[expert], weight.format, g)


def test_the_global_scale_of_modelopt_multiplies(tmp_path: Path) -> None:
    w, codes, scales, g = nvfp4()
    file = save(
        tmp_path / "model.safetensors",
        layer__weight=("U8", codes),
        layer__weight_scale=("F8_E4M3", scales),
        layer__weight_scale_2=("F32", np.array(g)),
        layer__input_scale=("F32", np.array(np.float32(0.25))),
        norm__weight=("BF16", np.zeros(K, np.uint16)),
    )
    checkpoint = Checkpoint(file)
    assert checkpoint.fp4_names() == ["layer"]
    weight = checkpoint.fp4("layer")
    assert weight.format == "nvfp4" and weight.input_scale == 0.25 and weight.global_scale == g
    assert np.abs(dequantized(weight) - w).max() < 0.5


def test_the_global_scale_of_compressed_tensors_divides(tmp_path: Path) -> None:
    w, codes, scales, g = nvfp4()
    inverse = np.float32([1]) / g
    save(
        tmp_path / "model.safetensors",
        layer__weight_packed=("U8", codes),
        layer__weight_scale=("F8_E4M3", scales),
        layer__weight_global_scale=("F32", inverse),
        layer__input_global_scale=("F32", np.float32([8])),
    )
    weight = Checkpoint(tmp_path).fp4("layer")
    assert np.allclose(weight.global_scale, g) and weight.input_scale == 0.125
    assert np.abs(dequantized(weight) - w).max() < 0.5


def test_the_blocks_of_gpt_oss_experts_are_joined(tmp_path: Path) -> None:
    w = RANDOM.standard_normal((3 * N, K)).astype("float32")
    codes, scales = _fp4.quantize(w.astype("float64"), "mxfp4")
    name = "model__layers__0__mlp__experts__down_proj"
    blocks = {
        f"{name}_blocks": ("U8", codes.reshape(3, N, K // 32, 16)),
        f"{name}_scales": ("U8", scales.reshape(3, N, K // 32)),
    }
    save(tmp_path / "a.safetensors", **{f"{name}_bias": ("BF16", np.zeros((3, N), np.uint16))})
    save(tmp_path / "b.safetensors", **blocks)
    names = {f"{name.replace('__', '.')}_{part}": f"{f}.safetensors"
             for f, part in (("a", "bias"), ("b", "blocks"), ("b", "scales"))}  # fmt: skip
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    checkpoint = Checkpoint(tmp_path)
    (fp4_name,) = checkpoint.fp4_names()
    weight = checkpoint.fp4(fp4_name)
    assert weight.w.shape == (3, N, K // 2) and weight.global_scale is None
    assert np.abs(dequantized(weight, 1) - w[N : 2 * N]).max() < 1.0
    assert (dequantized(weight, 1) == _fp4.dequantize(codes, scales, "mxfp4")[N : 2 * N]).all()


def test_weights_become_arguments_of_the_entry_in_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    _, codes, scales, g = nvfp4()
    save(
        tmp_path / "model.safetensors",
        layer__weight=("U8", codes),
        layer__weight_scale=("F8_E4M3", scales),
        layer__weight_scale_2=("F32", np.array(g)),
        experts_blocks=("U8", codes.reshape(2, N // 2, K // 32, 16)),
        experts_scales=("U8", np.full((2, N // 2, K // 32), 127, np.uint8)),
    )
    checkpoint = Checkpoint(tmp_path)
    arguments = checkpoint.fp4("layer").torch("cpu")
    assert {name: (x.dtype, tuple(x.shape)) for name, x in arguments.items()} == {
        "w": (torch.float4_e2m1fn_x2, (N, K // 2)),
        "scale": (torch.float8_e4m3fn, (N, K // 16)),
        "global_scale": (torch.float32, (1,)),
    }
    expert = checkpoint.fp4("experts").torch("cpu", expert=1)
    assert expert["scale"].dtype == torch.float8_e8m0fnu and "global_scale" not in expert
    assert (expert["w"].view(torch.uint8).numpy() == codes[N // 2 :]).all()


BROKEN = [
    ({"layer__weight_scale_2": None}, "has no tensor layer.weight_scale_2"),
    ({"layer__weight_scale_2": ("F32", np.float32([0]))}, "must be positive and finite"),
    ({"layer__weight_scale": ("U8", np.zeros((N, K // 16), np.uint8))}, "must be float8_e4m3fn"),
    (
        {"layer__weight_scale": ("F8_E4M3", np.zeros((N, K // 32), np.uint8))},
        r"need scales of shape \(32, 4\), not \(32, 2\)",
    ),
    ({"layer__weight": ("BF16", np.zeros((N, K), np.uint16))}, "it must be uint8"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_tensors_that_do_not_fit_together_are_refused(tmp_path: Path, change, words: str) -> None:
    _, codes, scales, g = nvfp4()
    tensors = {
        "layer__weight": ("U8", codes),
        "layer__weight_scale": ("F8_E4M3", scales),
        "layer__weight_scale_2": ("F32", np.array(g)),
    } | change
    file = save(tmp_path / "x.safetensors", **{n: t for n, t in tensors.items() if t})
    with pytest.raises(InvalidArgument, match=words):
        Checkpoint(file).fp4("layer")


def test_unknown_names_and_invalid_files_are_refused(tmp_path: Path) -> None:
    _, codes, scales, _ = nvfp4()
    file = save(tmp_path / "x.safetensors", experts_blocks=("U8", codes.reshape(N, K // 32, 16)),
                experts_scales=("U8", scales[:, :2].copy()))  # fmt: skip
    with pytest.raises(UnknownName, match="did you mean experts"):
        Checkpoint(file).fp4("expert")
    with pytest.raises(InvalidArgument, match="neither a safetensors file nor a folder"):
        _ = Checkpoint(tmp_path / "nowhere").tensors
    short = tmp_path / "short.safetensors"
    short.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InvalidArgument, match=r"experts_scales is at \d+ to \d+, the data at"):
        _ = Checkpoint(short).tensors
    short.write_bytes(b"not a checkpoint at all")
    with pytest.raises(InvalidArgument, match="first 8 bytes are no header length"):
        _ = Checkpoint(short).tensors
