"""Exchanges of the CPU: what they compute is what the entries define, with the same bits on all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from host_build import COMPILER
from ranks_threads import together

from kernelcat.errors import RankFailed
from kernelcat.moe.parallel import host_exchange
from kernelcat.moe.parallel.exchange import Dispatched, Exchange

TOKENS, HIDDEN, EXPERTS, TOP_K = 5, 256, 6, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_has_the_same_bits_on_all_ranks(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype) * 4**r for r in range(3)]
    residual, weight = x[1] + 1, x[0][0]

    def sums(exchange: Exchange) -> tuple[Any, ...]:
        own = x[exchange.rank]
        return exchange.all_reduce(own), *exchange.all_reduce_norm(own, residual, weight, 1e-6)

    first, *others = together(tmp_path, [sums] * 3)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    exact = sum(part.double() for part in x)
    step = 2**-23 if dtype == torch.float32 else 2**-8
    assert ((first[0].double() - exact).abs() <= step * 64).all()
    assert ((first[1].double() - exact - residual.double()).abs() <= step * 64).all()
    mean = first[1].double().square().mean(1, keepdim=True)
    normed = first[1].double() * (mean + 1e-6).rsqrt() * weight.double()
    assert ((first[2].double() - normed).abs() <= step * 64).all()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("act_dtype", [None, torch.float8_e4m3fn])
def test_experts_on_several_ranks_are_experts_on_one(
    tmp_path: Path, ranks: int, act_dtype: torch.dtype | None
) -> None:
    """An expert is a factor: dispatch, multiply, combine is a weighted sum of factors."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-8, 9, (ranks, TOKENS, HIDDEN), generator=generator).bfloat16()
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(ranks * TOKENS)]
    ).view(ranks, TOKENS, TOP_K)
    ids = ids.int()
    ids[1, 3:] = -1  # these tokens come to no rank
    weights = torch.randint(1, 3, ids.shape, generator=generator).float()
    local = EXPERTS // ranks

    def rank_of(exchange: Exchange) -> torch.Tensor:
        r = exchange.rank
        d = exchange.dispatch(x[r], ids[r], weights[r], local, act_dtype)
        sums = torch.zeros(d.rows.shape, dtype=torch.bfloat16)
        for e in range(local):
            for i in d.order[d.offsets[e] : d.offsets[e + 1]].tolist():
                row, slot = divmod(i, TOP_K)
                sums[row] += _values(d, row) * (r * local + e) * d.gates[row, slot]
        return exchange.combine(sums, d.row_of, ids[r], local, residual=x[r])

    results = together(tmp_path, [rank_of] * ranks)
    factors = (ids.clamp(min=0) * weights).sum(2, keepdim=True)
    assert torch.equal(torch.stack(results), (x * (1 + factors)).bfloat16())


def _values(d: Dispatched, row: int) -> torch.Tensor:
    values = d.rows[row].float()
    if d.scale is not None:
        values *= d.scale[:, row].repeat_interleave(128)
    return values.round()


def test_hosts_agree(tmp_path: Path) -> None:
    def talk(exchange: Exchange) -> Any:
        return exchange.gather([exchange.rank]), exchange.broadcast({"is": exchange.rank})

    assert together(tmp_path, [talk] * 2) == [([[0], [1]], {"is": 0})] * 2


def test_ranks_that_call_other_things_are_told_so(tmp_path: Path) -> None:
    def wrong(exchange: Exchange) -> Any:
        return exchange.all_reduce(torch.zeros(1 + exchange.rank, 8))

    first, last = together(tmp_path, [wrong] * 2)
    assert first == last and first.startswith("rank 1 runs all_reduce ['float32 (2, 8)'")


def test_a_rank_that_ends_or_hangs_fails_all_others_and_later_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_exchange, "ANSWER_S", 0.2)
    x = torch.zeros(1, 8)

    def stays(exchange: Exchange) -> list[str]:
        texts = []
        for _ in range(2):
            with pytest.raises(RankFailed) as raised:
                exchange.all_reduce(x)
            texts.append(str(raised.value))
        return texts

    for fault, says in (("ends", "rank 1 has ended"), ("hangs", "rank 1 did not answer in time")):
        (tmp_path / fault).mkdir()
        seconds = 1.0 if fault == "hangs" else 0.0
        results = together(tmp_path / fault, [stays, lambda e, s=seconds: time.sleep(s), stays])
        assert results[0] == results[2] == [says] * 2


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
def test_kernels_exchange_what_oracles_do(tmp_path: Path) -> None:
    """The exchange of GPUs, whose kernels run on the CPU, in a process for each rank."""
    script = Path(__file__).parent / "ranks_exchange.py"
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), "2", tmp_path],
                         stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    first, other = (json.loads(process.communicate(timeout=300)[0]) for process in ranks)
    assert first["wrong"] == other["wrong"] == []
    assert first["kernels"] == other["kernels"] and len(first["kernels"]) == 12
    assert {name.split("/")[0] for name in first["kernels"]} == {
        "all_reduce", "moe_dispatch", "moe_combine"
    }  # fmt: skip
