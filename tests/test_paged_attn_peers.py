"""Peers of `paged_attn` get the arguments that mean its problem: results pass the gate, on the CPU.

FlashAttention-4 needs a GPU, so the tests plant a function that does slowly what its documentation
says of each argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from kernelcat import catalog
from kernelcat.catalog.spec import Problem
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.reference.paged_attn import attention
from kernelcat.runtime import gpu
from kernelcat.verify import gate

torch = pytest.importorskip("torch")

ENTRY = catalog.entry("paged_attn")
HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)

DECODE = attention(3, 8, 2, 64, 48, 16)
CHUNK = attention(3, 8, 2, 64, 96, 32, q_len=5)
PREFILL = attention(2, 8, 2, 64, 64, 16, q_len=64)
RAGGED = ENTRY.problem(**{**CHUNK.values, "batch": 4, "pages": 12, "lengths": "ragged"})


def peer(name: str) -> Callable:
    return next(peer for peer in ENTRY.peers if peer.name == name).load()


def with_axes(problem: Problem, **axes: object) -> Problem:
    return ENTRY.problem(**{**problem.values, **axes})


def tensors(arrays: dict) -> dict:
    """The gate's bfloat16, int32 and float32 as torch tensors, without a copy."""
    return {
        name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == np.uint16
        else torch.from_numpy(array)
        for name, array in arrays.items()
    }


def judge(name: str, problem: Problem) -> gate.Verdict:
    make = peer(name)
    prepared = gate.prepare(ENTRY, problem, HOST)
    return prepared.verify(lambda arrays: make(problem, tensors(arrays)), peer=True)


def flash_attention(
    q, k, v, *, out, softmax_scale, causal, window_size_left, softcap, learnable_sink, num_splits,
    cu_seqlens_q=None, max_seqlen_q=None, page_table=None, seqused_k=None,
):  # fmt: skip
    """q, out (tokens, heads, dim) under cu_seqlens_q, else (batch, tokens, heads, dim); k and v
    (pages, page_size, kv_heads, dim) under page_table, else (batch, tokens, kv_heads, dim)."""
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1])
        q, out = q.flatten(0, 1), out.view(-1, *q.shape[2:])
    assert max_seqlen_q is None or cu_seqlens_q.diff().max() <= max_seqlen_q
    heads = q.shape[1]
    for s, (start, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        keys, values = k[s], v[s]
        if page_table is not None:
            count = int(seqused_k[s])
            pages = page_table[s, : -(-count // k.shape[1])].long()
            keys, values = (cache[pages].flatten(0, 1)[:count] for cache in (k, v))
        keys, values = (x.float().repeat_interleave(heads // k.shape[2], 1) for x in (keys, values))
        z = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * softmax_scale
        if softcap:
            z = softcap * torch.tanh(z / softcap)
        behind = torch.arange(end - start)[:, None] + len(keys) - (end - start)
        behind = behind - torch.arange(len(keys))
        if causal:
            z.masked_fill_(behind < 0, float("-inf"))
        if window_size_left is not None:
            z.masked_fill_(behind > window_size_left, float("-inf"))
        sink = torch.full((heads,), float("-inf")) if learnable_sink is None else learnable_sink
        z = torch.cat((z, sink[:, None, None].expand(heads, end - start, 1)), 2)
        p = torch.softmax(z, 2)[..., :-1].nan_to_num(0.0)
        out[start:end] = torch.einsum("hqk,khd->qhd", p, values)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict]]:
    """The arguments of every call of a fake FlashAttention-4 on a fake Hopper GPU."""
    recorded: list[dict] = []

    def record(q, k, v, **options):
        recorded.append({"q": q, "k": k, **options})
        flash_attention(q, k, v, **options)

    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = record
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    yield recorded


@pytest.mark.parametrize("problem", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_torchs_attention_is_right(problem: Problem) -> None:
    verdict = judge("sdpa", problem)
    assert verdict.passed, verdict


@pytest.mark.parametrize("problem", [DECODE, CHUNK, PREFILL, RAGGED])
@pytest.mark.parametrize("extras", [{}, {"window": 9, "softcap": 1.5, "has_sinks": True}])
def test_flash_attention_4_is_right(problem: Problem, extras: dict, calls: list) -> None:
    verdict = judge("flash_attn_4", with_axes(problem, **extras))
    assert verdict.passed and len(calls) == 1, verdict


@pytest.mark.parametrize(
    ("problem", "paged", "q"),
    [(DECODE, True, (3, 1, 8, 64)), (CHUNK, True, (3, 5, 8, 64)), (PREFILL, False, (2, 64, 8, 64)),
     (RAGGED, True, (15, 8, 64))],
)  # fmt: skip
def test_flash_attention_4_is_called_in_its_fastest_form(
    problem: Problem, paged: bool, q: tuple[int, ...], calls: list
) -> None:
    """A batch axis for equal lengths, pages only where some tokens are cached, no copy of out."""
    arrays = tensors(gate.prepare(ENTRY, problem, HOST).arrays)
    run = peer("flash_attn_4")(problem, arrays)
    assert not calls
    run()
    (call,) = calls
    assert call["out"].data_ptr() == arrays["out"].data_ptr()
    assert ("page_table" in call, tuple(call["q"].shape)) == (paged, q)
    assert (call["k"].data_ptr() == arrays["k_cache"].data_ptr()) == paged
    assert call["causal"] == (problem["max_q"] > 1) and call["num_splits"] == 1


def test_flash_attention_4_splits_where_it_can(
    calls: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    peer("flash_attn_4")(DECODE, tensors(gate.prepare(ENTRY, DECODE, HOST).arrays))()
    assert calls[0]["num_splits"] == 0


@pytest.mark.parametrize("extras", [{"kv_dtype": "float8_e4m3fn"}, {"has_scales": True}])
def test_flash_attention_4_is_not_raced_with_scales(extras: dict, calls: list) -> None:
    with pytest.raises(Unsupported, match="without scales, over a cache of q's type"):
        peer("flash_attn_4")(with_axes(DECODE, **extras), {})


@pytest.mark.parametrize(
    ("name", "module"), [("flash_attn_4", "flash_attn"), ("flashinfer", "flashinfer")]
)
def test_the_error_of_a_missing_peer_names_the_command_that_installs_it(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=f"the peer {name} needs: pip install flash"):
        peer(name)


def test_flashinfer_has_one_scratch_memory_for_all_copies_of_a_race() -> None:
    from kernelcat.reference import _flashinfer

    cpu = torch.device("cpu")
    try:
        assert _flashinfer.workspace(cpu) is _flashinfer.workspace(cpu)
        assert _flashinfer.workspace(cpu).nbytes == 256 << 20
    finally:
        _flashinfer.workspace.cache_clear()
