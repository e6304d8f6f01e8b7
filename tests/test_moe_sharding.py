"""Models on several ranks of the CPU compute what one rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moe_models import LENGTHS, check, prefilled
from ranks_threads import together

from kernelcat import moe
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.layers.checkpoint import Checkpoint, Stored
from kernelcat.moe.engine.ahead import called
from kernelcat.moe.engine.step_sizes import Size
from kernelcat.moe.parallel.exchange import Exchange
from kernelcat.moe.parallel.sharding import part_of

CASES = (
    ("gpt-oss", 2), ("gpt-oss", 4), ("qwen3-moe", 2), ("deepseek-v3", 2), ("llama", 2),
    ("smollm2", 4), ("mixtral", 2),
)  # fmt: skip
TOLERANCE = 1e-5
"""As a part of the largest logit: float32 sums in another order, over layers."""


@pytest.mark.parametrize(("name", "ranks"), CASES)
@pytest.mark.parametrize("is_stored", [False, True])
def test_logits_are_those_of_one_rank(
    tmp_path: Path, name: str, ranks: int, is_stored: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(256, (n,), generator=generator).tolist() for n in LENGTHS[1:]]
    size = f"small-{name}"
    path = moe.write_checkpoint(tmp_path / name, size) if is_stored else None

    def model(exchange: Exchange | None = None) -> moe.Decoder:
        if path:
            return moe.load(path, "cpu", exchange=exchange)
        return moe.random_model(size, "cpu", exchange=exchange)

    def logits(exchange: Exchange) -> tuple[torch.Tensor, ...]:
        part = model(exchange)
        found = torch.cat(prefilled(part, prompts))
        return found, *part.best(torch.linspace(-1, 1, 6 * part.config.hidden_size).view(6, -1))

    one = model()
    expected = torch.cat(prefilled(one, prompts))
    x = torch.linspace(-1, 1, 6 * one.config.hidden_size).view(6, -1)
    values, ids = one.best(x)
    results = together(tmp_path, [logits] * ranks)
    assert all(torch.equal(mine, results[0][0]) for mine, _, _ in results)
    check(results[0][0], expected, TOLERANCE)
    assert all(torch.equal(ids, found) for _, _, found in results)
    assert all(torch.allclose(values, found) for _, found, _ in results)


def test_parts_of_published_models() -> None:
    """Heads, keys and values, and columns of a rank; MXFP4 has 32 columns to a scale."""
    sizes = moe.SIZES

    def part(name: str, ranks: int, **options: bool) -> tuple[int, ...]:
        config = part_of(sizes[name], ranks, **options)
        names = ("num_attention_heads", "num_key_value_heads", "intermediate_size",
                 "moe_intermediate_size")  # fmt: skip
        return tuple(getattr(config, each) for each in names if hasattr(config, each))

    assert part("gpt-oss-20b", 2) == (32, 4, 1440)
    assert part("gpt-oss-20b", 4) == (16, 2, 736)  # the last rank has 672 columns, and zeros
    assert part("gpt-oss-120b", 8) == (8, 1, 384)
    assert part("qwen3-30b-a3b", 8) == (4, 1, 96)  # 4 heads of keys and values, twice each
    assert part("qwen3-30b-a3b", 2, has_fp8_experts=True) == (16, 2, 384)
    assert part("deepseek-v3", 8) == (16, 16, 2304, 256)


@pytest.mark.parametrize(("name", "ranks"), [("smollm2-135m", 2), ("qwen3-30b-a3b", 3)])
def test_heads_that_cannot_be_divided_are_told(name: str, ranks: int) -> None:
    with pytest.raises(InvalidArgument, match=f"cannot be divided among {ranks} ranks"):
        part_of(moe.SIZES[name], ranks)


def test_a_rank_reads_only_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks share is read by each of them, everything else once."""
    path = moe.write_checkpoint(tmp_path / "model", "small-gpt-oss")
    read: list[int] = []
    torch_of = Stored.torch

    def counted(stored: Stored, part: tuple[slice, ...] = ()) -> torch.Tensor:
        tensor: torch.Tensor = torch_of(stored, part)
        read.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(Stored, "torch", counted)
    together(tmp_path, [lambda exchange: moe.load(path, "cpu", exchange=exchange)] * 2)
    tensors = Checkpoint(path).tensors
    shared = ("norm", "embed", "lm_head", "router", "o_proj.bias", "down_proj_bias")
    sizes = {name: record.end - record.begin for name, record in tensors.items()}
    twice = sum(size for name, size in sizes.items() if any(word in name for word in shared))
    assert sum(read) == sum(sizes.values()) + twice


def test_steps_of_a_rank_are_listed_without_the_others(tmp_path: Path) -> None:
    """What is compiled ahead: calls on tensors without memory exchange nothing."""

    def problems(exchange: Exchange) -> list[Problem]:
        model = moe.random_model("small-gpt-oss", "cpu", torch.bfloat16, exchange=exchange)
        pages = [2] * len(moe.windows(model.cache_layers))
        cache = moe.KvCache.allocate(model.cache_layers, pages, 16, model.dtype, "cpu")
        return called(model, cache, [Size(2, 2, 2, 1)], 4)

    found, other = together(tmp_path, [problems] * 2)
    assert found == other
    assert {problem.entry for problem in found} >= {"gemm", "moe_mlp", "paged_attn", "lm_head"}
    experts = {problem["inter"] for problem in found if problem.entry == "moe_mlp"}
    heads = {problem["vocab"] for problem in found if problem.entry == "lm_head"}
    assert experts == {32} and heads == {128, 256}  # half of the head for the best token
