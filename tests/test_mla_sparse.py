"""`mla.sparse`: lists of slots as arguments of `flashmla`, whose oracle gives the results."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelcat
from kernelcat import catalog
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.layers import mla
from kernelcat.reference import _mla_row, _sequences
from kernelcat.reference.flashmla import SPREAD, latent

ENTRY = catalog.entry("flashmla")
HEADS, PAGES, PAGE_SIZE, SCALE = 5, 12, 16, 0.1
SLOTS = PAGES * PAGE_SIZE


def cached(kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache (PAGES, PAGE_SIZE, row), and its rows in float32, (SLOTS, 576)."""
    torch.manual_seed(0)
    rows = torch.randn(PAGES, PAGE_SIZE, 576).bfloat16()
    if kv_dtype == "bfloat16":
        return rows, rows.float().view(SLOTS, 576)
    packed = _mla_row.pack(rows.float().numpy())
    return torch.from_numpy(packed), torch.from_numpy(_mla_row.unpack(packed)).view(SLOTS, 576)


def lists(tokens: int, topk: int) -> torch.Tensor:
    """Lists (tokens, topk) of random slots mixed with invalid entries; list 1 has no valid one."""
    torch.manual_seed(1)
    indices = torch.rand(tokens, SLOTS).argsort(1)[:, :topk].int()
    indices[torch.rand(tokens, topk) < 0.3] = -1
    indices[0, 3], indices[1] = SLOTS, -1
    return indices


def attended(q: torch.Tensor, kv_cache, block_table, kv_lens, cu_q) -> tuple[torch.Tensor, ...]:
    """out and lse by the oracle, for the problem that a call infers from these arrays."""
    problem = ENTRY.problem(
        batch=len(kv_lens), tokens=len(q), heads=q.shape[1], pages=len(kv_cache),
        table_width=block_table.shape[1], page_size=kv_cache.shape[1], dtype="bfloat16",
        kv_dtype="uint8" if kv_cache.dtype == torch.uint8 else "bfloat16", sm_scale=SCALE,
    )  # fmt: skip
    found = ENTRY.oracle(problem, {
        "q": q.numpy(), "kv_cache": kv_cache.float().numpy(), "block_table": block_table.numpy(),
        "kv_lens": kv_lens.numpy(), "cu_q": cu_q.numpy(),
    })  # fmt: skip
    return torch.from_numpy(found["out"]), torch.from_numpy(found["lse"])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "uint8"])
def test_a_token_attends_to_the_slots_that_it_lists(kv_dtype: str) -> None:
    cache, rows = cached(kv_dtype)
    indices = lists(9, 40)
    q = torch.randn(9, HEADS, 576)
    out, lse = attended(q, *mla.sparse(cache, indices))
    for token, slots in enumerate(indices):
        listed = rows[slots[(slots >= 0) & (slots < SLOTS)].long()]
        z = SCALE * q[token] @ listed.T
        assert torch.allclose(out[token], z.softmax(1) @ listed[:, :512], atol=1e-5)
        assert torch.allclose(lse[token], z.logsumexp(1), atol=1e-5)
    assert (out[1] == 0).all() and (lse[1] == float("-inf")).all()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "uint8"])
def test_lists_of_all_tokens_in_order_equal_dense_decoding(kv_dtype: str) -> None:
    cache, _ = cached(kv_dtype)
    lens = torch.tensor((48, 1, 33), dtype=torch.int32)
    table = torch.randperm(PAGES)[:9].view(3, 3).int()
    slots = table[..., None] * PAGE_SIZE + torch.arange(PAGE_SIZE, dtype=torch.int32)
    indices = slots.flatten(1).masked_fill(torch.arange(48) >= lens[:, None], -1)
    q = torch.randn(3, HEADS, 576)
    dense = attended(q, cache, table, lens, torch.arange(4).int())
    for arguments in (mla.sparse(cache, indices), mla.sparse(cache, indices, lens)):
        assert all(map(torch.equal, attended(q, *arguments), dense))


def test_invalid_entries_are_moved_to_the_end_and_the_others_keep_their_order() -> None:
    indices = torch.tensor([[-1, 7, 3, -1, 0], [2, 1, 4, 9, 8], [10, -5, 11, -1, -1]]).int()
    before = indices.clone()
    table, lens = mla.valid_first(indices, 10)
    assert lens.tolist() == [3, 5, 0] and lens.dtype == table.dtype == torch.int32
    assert table[0, :3].tolist() == [7, 3, 0] and table[1].tolist() == before[1].tolist()
    assert torch.equal(indices, before) and table.is_contiguous()
    table, lens = mla.valid_first(torch.empty(3, 0).int(), 10)
    assert (table.shape, lens.shape) == ((3, 0), (3,))


def test_neither_the_cache_nor_lists_with_lengths_are_copied() -> None:
    cache, indices = cached("uint8")[0], lists(6, 8).clamp(0).view(2, 3, 8)
    arguments = mla.sparse(cache, indices, torch.full((2, 3), 8, dtype=torch.int32))
    assert arguments.kv_cache.shape == (SLOTS, 1, 656) and arguments.block_table.shape == (6, 8)
    assert arguments.kv_cache.data_ptr() == cache.data_ptr()
    assert arguments.block_table.data_ptr() == indices.data_ptr()
    assert arguments.kv_lens.tolist() == [8] * 6 and arguments.cu_q.tolist() == [*range(7)]


def test_nothing_is_read_on_the_host() -> None:
    """Reading a value of a fake tensor raises, as it does while a CUDA graph is captured."""
    with FakeTensorMode():
        cache = torch.empty(4, 64, 576, dtype=torch.bfloat16)
        arguments = mla.sparse(cache, torch.empty(2, 3, 8, dtype=torch.int32))
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            arguments.kv_lens.tolist()
    assert [tuple(x.shape) for x in arguments] == [(256, 1, 576), (6, 8), (6,), (7,)]
    assert {x.dtype for x in arguments[1:]} == {torch.int32}


INDICES = torch.zeros(2, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("shape", "indices", "lens", "reason"),
    [
        ((4, 64, 1, 576), INDICES, None, "must be contiguous, .pages, page_size, row"),
        ((4, 64, 576), INDICES.long(), None, "indices must be int32"),
        ((4, 64, 576), INDICES[0], None, r"\(tokens, topk\) or \(batch, q_len, topk\)"),
        ((4, 64, 576), INDICES, INDICES[0], r"lens must be int32, \(2,\)"),
        ((4, 64, 576), INDICES, torch.ones(2), r"lens must be int32, \(2,\)"),
    ],
)
def test_invalid_arguments_are_refused(shape, indices, lens, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        mla.sparse(torch.zeros(shape), indices, lens)
    with pytest.raises(ValueError, match="must be contiguous"):
        mla.sparse(torch.zeros(4, 576, 64).mT, INDICES)


def test_lists_of_sparse_problems_are_spread_over_the_cache() -> None:
    names = [name for name in ENTRY.problems if name.startswith("sparse-")]
    assert {"sparse-128x1-128-2048", "sparse-128x1-64-2048-fp8"} <= {*names}
    for name in names:
        problem = ENTRY.problems[name]
        assert problem["page_size"] == problem["max_q"] == 1
        assert problem["pages"] == SPREAD * problem["tokens"] * problem["table_width"]
    problem = latent(3, 1, 16, 50, 1, pages=600)
    table = np.array(_sequences.tables(problem)[0])
    assert len({*table.flat}) == table.size and abs(np.diff(table)).mean() > 100


KERNELS = [
    pytest.param(i.language, i.variant, id=i.name) for i in catalog.implementations(ENTRY.name)
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:there is no tuning database")
@pytest.mark.filterwarnings("ignore:.* is unverified")
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "uint8"])
@pytest.mark.parametrize(("language", "variant"), KERNELS)
def test_a_captured_graph_serves_other_lists(language: str, variant: str, kv_dtype: str) -> None:
    """The graph has the kernels of `mla.sparse` too."""
    cache, tokens, topk = cached(kv_dtype)[0], 9, 150
    batches = [
        lists(tokens, topk),
        torch.full((tokens, topk), -1).int(),
        lists(tokens, topk).flip(0),
    ]
    q = (torch.randn(tokens, 16, 576) / 4).bfloat16()
    gpu_q, indices, gpu_cache = q.cuda(), batches[0].cuda(), cache.cuda()
    arguments = mla.sparse(gpu_cache, indices)
    try:
        attend = kernelcat.get(ENTRY.name, language=language, variant=variant)
        run = attend.bind(gpu_q, *arguments, sm_scale=SCALE)
    except (MissingDependency, Unsupported) as error:
        pytest.skip(str(error))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for bound, new in zip(arguments, mla.sparse(gpu_cache, indices), strict=True):
            if bound is not arguments.kv_cache:
                bound.copy_(new)
        run()
    for batch in [*batches, batches[0]]:
        indices.copy_(batch)
        for out in run.out:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = attended(q.float(), *mla.sparse(cache, batch))
        for tensor, out, right in zip(ENTRY.outputs, run.out, expected, strict=True):
            limits = tensor.tolerance or ENTRY.tolerance["bfloat16"]
            assert torch.allclose(out.float().cpu(), right, limits.relative, limits.absolute)
