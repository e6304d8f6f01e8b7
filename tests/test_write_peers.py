"""Peers of `kv_write` and `mla_kv_write` compute their entries: results pass the gate, on the CPU.

FlashInfer needs a GPU, so the tests plant functions that do slowly what its documentation says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from kernelcat import catalog
from kernelcat.catalog.spec import Problem
from kernelcat.errors import Unsupported
from kernelcat.reference import kv_write, mla_kv_write
from kernelcat.reference._kv_cache import FP8
from kernelcat.reference.flashmla import PACKED_TYPE
from kernelcat.runtime import gpu
from kernelcat.verify import gate

torch = pytest.importorskip("torch")

HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
TYPES = {np.dtype("uint16"): (np.int16, torch.bfloat16)}


def peer(problem: Problem, name: str):
    return next(p for p in catalog.entry(problem.entry).peers if p.name == name).load()


def judge(problem: Problem, name: str) -> gate.Verdict:
    entry = catalog.entry(problem.entry)

    def tensors(arrays: dict) -> dict:
        views = {}
        for tensor in entry.present(problem):
            array = arrays[tensor.name]
            plain = array.view(np.int16) if array.dtype == np.uint16 else array
            views[tensor.name] = torch.from_numpy(plain).view(
                getattr(torch, tensor.dtype_of(problem))
            )
        return views

    make = peer(problem, name)
    prepared = gate.prepare(entry, problem, HOST)
    return prepared.verify(lambda arrays: make(problem, tensors(arrays)), peer=True)


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Compiled definitions run as they are written, without a C++ compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


def rotated(x, out, cos_sin, at, interleave: bool) -> None:
    """FlashInfer's RoPE of x (tokens, heads, dim) into ``out``."""
    dim = cos_sin.shape[1]
    out.copy_(x)
    for token, position in enumerate(at.tolist()):
        for pair in range(dim // 2):
            i, j = (2 * pair, 2 * pair + 1) if interleave else (pair, pair + dim // 2)
            cos, sin = cos_sin[position, pair], cos_sin[position, pair + dim // 2]
            first, second = x[token, :, i].float(), x[token, :, j].float()
            out[token, :, i] = first * cos - second * sin
            out[token, :, j] = second * cos + first * sin


def append(rows, caches, sequences, at, indices, indptr) -> None:
    """Put row t of each of ``rows`` into the slot of position at[t] of sequence sequences[t]."""
    for token, (s, position) in enumerate(zip(sequences.tolist(), at.tolist(), strict=True)):
        size = caches[0].shape[1]
        page = indices[indptr[s] + position // size]
        for row, cache in zip(rows, caches, strict=True):
            cache[page, position % size] = row[token]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def rope(q, k, q_out, k_out, cos_sin, at, interleave):
        rotated(q, q_out, cos_sin, at, interleave)
        rotated(k, k_out, cos_sin, at, interleave)

    def append_kv(k, v, sequences, at, caches, indices, indptr, last_page_len):
        append((k, v), caches, sequences, at, indices, indptr)

    def append_mla(c, key, sequences, at, latents, keys, indices, indptr, last_page_len):
        assert c.shape[1] == 512 and key.shape[1] == 64
        append((c, key), (latents, keys), sequences, at, indices, indptr)

    library = SimpleNamespace(
        rope=SimpleNamespace(_apply_rope_pos_ids_cos_sin_cache=rope),
        append_paged_kv_cache=append_kv,
        page=SimpleNamespace(append_paged_mla_kv_cache=append_mla),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)


def few(problem: Problem, **axes: object) -> Problem:
    return catalog.entry(problem.entry).problem(**{**problem.values, **axes})


KV = kv_write.appended(3, 4, 2, 64, 40, 5)
MLA = mla_kv_write.appended(3, 150, 5)
PACKED = few(MLA, kv_dtype=PACKED_TYPE)
PROBLEMS = [KV, few(KV, style="interleaved", rotary_dim=32), few(KV, lengths="ragged"),
            MLA, few(MLA, style="neox"), few(MLA, lengths="ragged")]  # fmt: skip


@pytest.mark.parametrize("problem", [
    *PROBLEMS, PACKED, few(PACKED, lengths="ragged"),
    few(KV, kv_dtype=FP8, has_scales=True), few(KV, has_scales=True, page_scales=True),
], ids=str)  # fmt: skip
def test_the_definition_in_torch_passes_the_gate(problem: Problem) -> None:
    verdict = judge(problem, "torch")
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_flashinfer_gets_the_arguments_that_mean_the_problem(
    problem: Problem, flashinfer: None
) -> None:
    verdict = judge(problem, "flashinfer")
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize("problem", [PACKED, few(KV, kv_dtype=FP8, has_scales=True)], ids=str)
def test_flashinfer_does_not_quantize(problem: Problem, flashinfer: None) -> None:
    with pytest.raises(Unsupported, match="over a cache of"):
        peer(problem, "flashinfer")(problem, {})


@pytest.mark.parametrize("name", ["torch", "flashinfer"])
def test_problems_without_tokens_are_not_raced(name: str, flashinfer: None) -> None:
    with pytest.raises(Unsupported, match="tokens"):
        peer(MLA, name)(few(MLA, tokens=0), {"cu_q": torch.zeros(4)})
