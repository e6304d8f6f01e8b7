"""CUDA graphs of `paged_attn` on changing lengths and tables, and its halves in `attn_merge`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest

import kernelcat
from kernelcat import catalog
from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.reference._sequences import GARBAGE
from kernelcat.reference.paged_attn import attention

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:there is no tuning database"),
    pytest.mark.filterwarnings("ignore:.* is unverified"),
]

ENTRY = catalog.entry("paged_attn")
KERNELS = [pytest.param(i, id=i.name) for i in catalog.implementations(ENTRY.name)]

DECODE = attention(6, 8, 2, 128, 640, 16)
VERIFY = attention(6, 8, 2, 64, 640, 64, q_len=4)
LENGTHS = {
    "decode": (
        DECODE,
        [
            ((1, 1, 1, 1, 0, 1), (640, 1, 16, 17, 0, 333)),
            ((0, 1, 1, 1, 1, 1), (0, 15, 512, 511, 513, 640)),
            ((1, 1, 0, 1, 1, 1), (1, 1, 77, 1, 1, 1)),
            ((1, 0, 1, 1, 1, 1), (640, 640, 640, 640, 640, 640)),
        ],
    ),
    "verify": (
        VERIFY,
        [
            ((4, 1, 0, 3, 2, 0), (640, 1, 0, 65, 63, 64)),
            ((0, 0, 4, 1, 1, 4), (0, 640, 4, 64, 128, 129)),
            ((2, 2, 2, 2, 2, 0), (2, 127, 192, 193, 640, 0)),
        ],
    ),
}
"""A problem, and (q_lens, kv_lens) of successive batches with an equal number of query tokens."""


def draw(problem: Problem, q_lens: Sequence[int], kv_lens: Sequence[int], seed: int) -> dict:
    """Inputs on the CPU: pages in random order, garbage and NaN in all invisible slots."""
    torch.manual_seed(seed)
    size, sizes = problem["page_size"], (problem["kv_heads"], problem["head_dim"])
    table = torch.full((len(kv_lens), problem["table_width"]), GARBAGE, dtype=torch.int32)
    caches = torch.full((2, problem["pages"], size, *sizes), float("nan"), dtype=torch.bfloat16)
    pages = torch.randperm(problem["pages"])
    for s, kv_len in enumerate(kv_lens):
        sequence_pages, pages = pages.tensor_split([-(-kv_len // size)])
        table[s, : len(sequence_pages)] = sequence_pages
        rows = torch.randn(2, len(sequence_pages) * size, *sizes)
        rows[:, kv_len:] = float("nan")
        caches[:, sequence_pages] = rows.bfloat16().view(2, len(sequence_pages), size, *sizes)
    inputs = {
        "q": 2.5 * torch.randn(sum(q_lens), problem["heads"], problem["head_dim"]),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_table": table,
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32),
        "cu_q": torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32),
    }
    if problem["has_sinks"]:
        inputs["sinks"] = torch.randn(problem["heads"])
    return inputs | {"q": inputs["q"].bfloat16()}


def capture(implementation: Implementation, inputs: dict, **axes: object) -> tuple:
    """A graph of one call, and the bound call, which owns the workspaces that the graph uses."""
    language, variant = implementation.language, implementation.variant
    try:
        run = kernelcat.get(ENTRY.name, language=language, variant=variant).bind(**inputs, **axes)
    except Unsupported as error:
        pytest.skip(str(error))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph, run


def assert_right(problem: Problem, inputs: dict, outputs: Sequence[torch.Tensor]) -> None:
    values = {
        name: array.numpy() if array.dtype == torch.int32 else array.float().numpy()
        for name, array in inputs.items()
    }
    expected = ENTRY.oracle(problem, values)
    for tensor, array in zip(ENTRY.outputs, outputs, strict=True):
        limits = tensor.tolerance or ENTRY.tolerance_of(problem)
        np.testing.assert_allclose(
            array.float().cpu().numpy(), expected[tensor.name], limits.relative, limits.absolute,
            err_msg=tensor.name,
        )  # fmt: skip


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("extras", [{}, {"window": 70, "softcap": 5.0, "has_sinks": True}])
def test_a_captured_graph_follows_changed_lengths_and_tables(implementation, kind, extras) -> None:
    even, batches = LENGTHS[kind]
    tokens = sum(batches[0][0])
    problem = ENTRY.problem(**{**even.values, "tokens": tokens, **extras})
    drawn = [draw(problem, *lengths, seed) for seed, lengths in enumerate(batches)]
    on_gpu = {name: array.cuda() for name, array in drawn[0].items()}
    axes = {axis: problem[axis] for axis in ("max_q", "window", "softcap")}
    graph, call = capture(implementation, on_gpu, **axes)
    outputs = call.out
    for inputs in [*drawn, drawn[0]]:
        for name, array in inputs.items():
            on_gpu[name].copy_(array)
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(problem, inputs, outputs)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("batch", [0, 3])
def test_a_batch_without_queries_is_captured(implementation, batch: int) -> None:
    inputs = draw(DECODE, (0,) * batch, (5,) * batch, 0)
    graph, call = capture(implementation, {name: x.cuda() for name, x in inputs.items()})
    graph.replay()
    torch.cuda.synchronize()
    assert [tuple(output.shape) for output in call.out] == [(0, 8, 128), (0, 8)]


@pytest.mark.parametrize("language", catalog.languages(ENTRY.name))
def test_halves_of_the_context_merge_into_the_whole(language: str) -> None:
    """Some sequences end in the first half; one is empty, so its query has no visible keys."""
    kv_lens = (640, 320, 319, 321, 1, 0)
    inputs = draw(DECODE, (1,) * 6, kv_lens, 7)
    try:
        attend = kernelcat.get(ENTRY.name, language=language)
        merge = kernelcat.get("attn_merge", language=language)
    except MissingDependency as error:
        pytest.skip(str(error))
    on_gpu = {name: array.cuda() for name, array in inputs.items()}
    outs = torch.full((2, *inputs["q"].shape), float("nan"), dtype=torch.bfloat16, device="cuda")
    lses = torch.full(outs.shape[:-1], float("nan"), device="cuda")
    half_pages = DECODE["table_width"] // 2
    half_tokens = half_pages * DECODE["page_size"]
    for part, table in enumerate(on_gpu["block_table"].split(half_pages, 1)):
        lens = (on_gpu["kv_lens"] - part * half_tokens).clamp(0, half_tokens)
        halves = {**on_gpu, "block_table": table.contiguous(), "kv_lens": lens}
        attend(**halves, out=(outs[part], lses[part]))
    assert (lses[1] == float("-inf")).all(1).tolist() == [
        kv_len <= half_tokens for kv_len in kv_lens
    ]
    assert_right(DECODE, inputs, merge(outs, lses))
    assert_right(DECODE, inputs, attend(**on_gpu))
