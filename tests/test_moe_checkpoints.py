"""Configurations and weights of `kernelcat.moe`: what is read, and how the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kernelcat import fp4, moe
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument, KernelcatError, UnknownName
from kernelcat.moe.rope import Rope
from kernelcat.moe.weights import FP8_BLOCK

SMALL = tuple(name for name in moe.SIZES if name.startswith("small-"))

GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
"""`config.json` as published."""

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1,
    "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "vocab_size": 49152,
}  # fmt: skip


def test_published_configurations_are_read() -> None:
    assert moe.config_of(GPT_OSS_20B) == moe.SIZES["gpt-oss-20b"]
    assert moe.config_of(SMOLLM2_135M) == moe.SIZES["smollm2-135m"]


@pytest.mark.parametrize("name", moe.SIZES)
def test_a_configuration_that_is_written_is_read_again(name: str) -> None:
    written = json.dumps(moe.SIZES[name].published())
    assert moe.config_of(json.loads(written)) == moe.SIZES[name]


@pytest.mark.parametrize("name", SMALL)
def test_a_configuration_that_transformers_wrote_is_read(name: str, tmp_path: Path) -> None:
    """Its RoPE has the newer form, in one field."""
    import transformers

    (tmp_path / "config.json").write_text(json.dumps(moe.SIZES[name].published()))
    content = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert "rope_parameters" in content
    content["architectures"] = [moe.SIZES[name].architecture]
    assert moe.config_of(content) == moe.SIZES[name]


def changed(content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """``content`` with other fields; None removes one."""
    return {name: value for name, value in {**content, **fields}.items() if value is not None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BertModel"]}, r"BertModel is not supported; known: DeepseekV3"),
        ({"architectures": None}, r"architectures=None must be a list of one name"),
        ({"hidden_size": None, "head_dim": None}, r"GptOssForCausalLM lacks hidden_size, head_dim"),
        ({"hidden_size": "2880"}, r"hidden_size='2880' must be of type int"),
        ({"num_local_experts": True}, r"num_local_experts=True must be of type int"),
        ({"swiglu_limit": 8.0}, r"swiglu_limit and swiglu_alpha must be 7.0 and 1.702"),
        ({"layer_types": ["full_attention"]}, r"1 layer_types for 24 layers"),
        ({"layer_types": ["chunked_attention"] * 24}, r"not \['chunked_attention'\]"),
        ({"quantization_config": None}, r"quant_method=None must be mxfp4"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, r"rope_type='dynamic' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, r"needs original_max_position_embeddings"),
        ({"rope_scaling": 32}, r"RoPE's parameters 32 must be an object"),
        ({"rope_theta": "big"}, r"rope_theta='big' must be of type float"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers=-1 must not be negative"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' must be silu"),
    ],
)
def test_what_a_configuration_lacks_is_told_in_one_line(fields: dict, message: str) -> None:
    with pytest.raises(KernelcatError, match=message) as error:
        moe.config_of(changed(GPT_OSS_20B, **fields))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("small-qwen3-moe", {"mlp_only_layers": [0]}, r"every layer must have experts"),
        ("small-qwen3-moe", {"use_sliding_window": True}, r"use_sliding_window must be false"),
        ("small-deepseek-v3", {"kv_lora_rank": 256}, r"must be 512 and 64: flashmla"),
        ("small-deepseek-v3", {"scoring_func": "softmax"}, r"'softmax' must be sigmoid"),
        ("small-llama", {"mlp_bias": True}, r"mlp_bias must be false"),
    ],
)
def test_what_a_model_does_not_compute_is_refused(name: str, fields: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        moe.config_of(changed(moe.SIZES[name].published(), **fields))


def test_yarn_has_the_angles_of_gpt_oss() -> None:
    """FORMATS gives the first and the last pair that are interpolated in part: 8.093 and 17.398."""
    rope = moe.SIZES["gpt-oss-20b"].rope
    pair = torch.arange(32)
    plain = 150000.0 ** (-pair / 32)
    ramp = ((pair - 8.093) / (17.398 - 8.093)).clamp(0, 1)
    expected = ramp * plain / 32 + (1 - ramp) * plain
    assert torch.allclose(rope.frequencies(64), expected, rtol=1e-3)
    table = rope.table(64, 10)
    assert torch.allclose(table[0], torch.tensor([1.34657] * 32 + [0.0] * 32), atol=1e-5)
    assert torch.allclose(table[9, 32], 1.34657 * torch.tensor(9.0).sin(), atol=1e-4)


@pytest.mark.parametrize("rope_type", ("default", "linear", "llama3", "yarn"))
def test_frequencies_are_those_of_transformers(rope_type: str) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = Rope(
        rope_theta=5e5, rope_type=rope_type, factor=1.0 if rope_type == "default" else 8.0,
        original_max_position_embeddings=1024,
    )  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=1, max_position_embeddings=8192,
        rope_parameters={"rope_theta": 5e5, **(rope.published()["rope_scaling"] or {})},
    )  # fmt: skip
    if rope_type == "default":
        expected, magnitude = 5e5 ** (-torch.arange(64) / 64), 1.0
    else:
        expected, magnitude = ROPE_INIT_FUNCTIONS[rope_type](config)
    assert torch.allclose(rope.frequencies(128), expected, rtol=1e-5)
    assert abs(float(rope.table(128, 1)[0, 0]) - magnitude) < 1e-6


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Applies ``change`` to the tensors of a checkpoint of one file."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


ROUTER = "model.layers.1.mlp.router.weight"
BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(ROUTER), rf"has no tensor {ROUTER}"),
        (lambda t: t.update({ROUTER: t[ROUTER][:4].clone()}), r"is \(4, 96\); .* \(8, 96\)"),
        (lambda t: t.update({ROUTER: t[ROUTER].int()}), rf"{ROUTER} is int32"),
        (lambda t: t.update({BLOCKS: t[BLOCKS].bfloat16()}), r"is bfloat16; it must be uint8"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, change: Callable[[dict], object], message: str
) -> None:
    path = rewritten(moe.write_checkpoint(tmp_path, "small-gpt-oss"), change)
    with pytest.raises(InvalidArgument, match=message):
        moe.load(path, "cpu")


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("small-llama", r"model.embed_tokens.weight is \(256, 96\); config.json needs \(256, 64\)"),
        ("small-smollm2", r"model.embed_tokens.weight is \(256, 96\)"),
        ("gpt-oss-20b", r"config.json needs \(201088, 2880\)"),
    ],
)
def test_a_checkpoint_with_the_label_of_another_model_is_refused(
    tmp_path: Path, label: str, message: str
) -> None:
    path = moe.write_checkpoint(tmp_path, "small-gpt-oss")
    (path / "config.json").write_text(json.dumps(moe.SIZES[label].published()))
    with pytest.raises(InvalidArgument, match=message):
        moe.load(path, "cpu")
    done = CliRunner().invoke(main, ["moe", "generate", str(path), "a", "--device", "cpu"])
    assert done.exit_code == 1 and done.output.count("\n") <= 2


def test_a_truncated_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    file = moe.write_checkpoint(tmp_path, "small-llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidArgument, match="invalid header"):
        moe.load(tmp_path, "cpu")
    file.unlink()
    with pytest.raises(InvalidArgument, match="neither a safetensors file nor a folder"):
        moe.load(tmp_path, "cpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match="is no JSON"):
        moe.load(tmp_path, "cpu")
    with pytest.raises(InvalidArgument, match="does not exist"):
        moe.load(tmp_path / "elsewhere", "cpu")


def test_experts_stay_in_4_bits(tmp_path: Path) -> None:
    """They are packed in tiles, whose inverse gives back the published blocks."""
    from kernelcat.reference._fp4_tiles import unpack_codes, unpack_scales

    path = moe.write_checkpoint(tmp_path, "small-gpt-oss")
    model = moe.load(path, "cpu")
    stored = load_file(path / "model.safetensors")
    w, scale = (model.layers[0].experts[name] for name in ("w1", "w1_scale"))
    assert w.dtype == torch.float4_e2m1fn_x2 and scale.dtype == torch.float8_e8m0fnu
    published = "model.layers.0.mlp.experts.gate_up_proj"
    for expert in (0, 7):
        codes = unpack_codes(w[expert].view(torch.uint8).numpy(), 128, 96)
        assert (codes == stored[f"{published}_blocks"][expert].flatten(1).numpy()).all()
        scales = unpack_scales(scale[expert].view(torch.uint8).numpy(), "mxfp4", 128, 96)
        assert (scales == stored[f"{published}_scales"][expert].numpy()).all()
    assert fp4.BLOCKS["mxfp4"] == 32


def test_float8_weights_of_deepseek_are_converted(tmp_path: Path) -> None:
    """Each 128 x 128 elements have a scale that multiplies; blocks at the border are smaller."""
    path = moe.write_checkpoint(tmp_path, "small-deepseek-v3")
    name, expected = "model.layers.1.self_attn.kv_b_proj.weight", {}

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        w = tensors[name].float()
        blocks = [-(-size // FP8_BLOCK) for size in w.shape]
        scale = torch.rand(blocks, generator=torch.Generator().manual_seed(0)) + 0.1
        q = torch.empty_like(w, dtype=torch.float8_e4m3fn)
        expected[name] = torch.empty_like(w)
        for i in range(blocks[0]):
            for j in range(blocks[1]):
                block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                q[block] = (w[block] / scale[i, j]).to(q.dtype)
                expected[name][block] = q[block].float() * scale[i, j]
        tensors |= {name: q, f"{name}_scale_inv": scale}

    rewritten(path, quantize)
    weights = moe.CheckpointWeights(path, "cpu", torch.float32)
    assert torch.equal(weights(name, 128, 512), expected[name])
    latent = moe.load(path, "cpu").layers[1].latent
    w = expected[name].view(2, 64, 512)
    assert torch.equal(latent.w_uk, w[:, :32]) and torch.equal(latent.w_uv, w[:, 32:])


def test_random_weights_depend_on_name_and_seed_alone() -> None:
    first, second = (moe.RandomWeights("cpu", torch.float32, seed) for seed in (0, 1))
    a = first("a.weight", 16, 64)
    assert torch.equal(a, first("a.weight", 16, 64))
    assert not torch.equal(a, first("b.weight", 16, 64))
    assert not torch.equal(a, second("a.weight", 16, 64))
    assert (a.norm(dim=1) - 1).abs().max() < 0.4
    w, scale = first.mxfp4("experts", 2, 32, 256)
    codes, scales = (x.view(torch.uint8).numpy() for x in (w[0], scale[0]))
    from kernelcat.reference import _fp4
    from kernelcat.reference._fp4_tiles import unpack_codes, unpack_scales

    rows = _fp4.dequantize(
        unpack_codes(codes, 32, 256), unpack_scales(scales, "mxfp4", 32, 256), "mxfp4", None
    )
    norms = torch.from_numpy(rows).norm(dim=1)
    assert 0.5 < norms.mean() < 2


def test_devices_and_names_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="device meta is not supported; use cuda or cpu"):
        moe.on("meta")
    with pytest.raises(UnknownName, match="did you mean gpt-oss-20b"):
        moe.random_model("gpt-oss-2b", "cpu")
    with pytest.raises(InvalidArgument, match="max_positions=1000 exceeds the model's 512"):
        moe.random_model("small-llama", "cpu", max_positions=1000)


def test_a_gpu_gets_kernels_and_a_cpu_gets_oracles() -> None:
    import kernelcat

    assert moe.on("cuda:0").gemm is kernelcat.get("gemm")
    assert type(moe.on("cpu").gemm) is type(kernelcat.reference("gemm"))


def test_a_cache_has_a_group_for_each_window() -> None:
    model = moe.random_model("small-gpt-oss", "cpu", max_positions=64)
    assert moe.windows(model.cache_layers) == (24, 0)
    cache = moe.KvCache.allocate(model.cache_layers, [2, 3], 16, torch.bfloat16, "cpu")
    assert cache.groups == (0, 1)
    assert [kv[0].shape for kv in cache.layers] == [(2, 16, 2, 64), (3, 16, 2, 64)]
    assert moe.page_bytes(model.cache_layers, 16, torch.bfloat16) == [16 * 2 * 2 * 64 * 2] * 2
    with pytest.raises(InvalidArgument, match="2 groups of layers, not 1"):
        moe.KvCache.allocate(model.cache_layers, [2], 16, torch.bfloat16, "cpu")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.uint8))
def test_latent_rows_in_float8_have_656_bytes(dtype: torch.dtype) -> None:
    model = moe.random_model("small-deepseek-v3", "cpu", torch.bfloat16, max_positions=64)
    cache = moe.KvCache.allocate(model.cache_layers, [4], 16, dtype, "cpu")
    width = 656 if dtype == torch.uint8 else 576
    assert {kv[0].shape for kv in cache.layers} == {(4, 16, width)}
    batch = moe.Batch.of([moe.Chunk([3, 1, 4], 0, [[2]])], "cpu")
    assert model(batch, cache).shape == (1, 64)
    assert cache.layers[2][0][2, :3].any() and not cache.layers[2][0][2, 3:].any()
