"""Models of `kernelcat.moe` on a GPU: kernels against transformers, and steps in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moe_models import NAMES, Case, Sequences, check_16_bits, made, with_fused_tokens

from kernelcat import moe

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("checkpoints")
    made.cache_clear()


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, folder: Path) -> Case:
    return made(request.param, folder)


@pytest.mark.parametrize("fused_tokens", (0, 1000))
def test_logits_of_kernels_equal_those_of_transformers(case: Case, fused_tokens: int) -> None:
    check_16_bits(with_fused_tokens(moe.load(case.path), fused_tokens), case)


def decode_step(sequences: Sequences, text: list[int], at: int, other: list[int]) -> moe.Batch:
    """The batch of token ``at`` of sequence 0 and the last token of sequence 1."""
    last = len(other) - 1
    chunks = [sequences.chunk(0, text, at, at + 1), sequences.chunk(1, other, last, last + 1)]
    return moe.Batch.of(chunks, sequences.model.device, table_width=8)


def test_a_captured_step_serves_other_tokens_lengths_and_pages(case: Case) -> None:
    """One graph decodes token 40, and after other contents are copied in, token 64."""
    model = moe.load(case.path)
    text, other, _ = case.prompts
    eager, graphed = Sequences(model, 2), Sequences(model, 2)
    for sequences in (eager, graphed):
        sequences.run(sequences.chunk(0, text, 0, 64), sequences.chunk(1, other, 0, 32))
    static = decode_step(graphed, text, 40, other)
    model.logits(model(static, graphed.cache))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.logits(model(static, graphed.cache))
    for at in (40, 64):
        batch = decode_step(graphed, text, at, other)
        for name in ("tokens", "positions", "kv_lens", "cu_q", "rows"):
            getattr(static, name).copy_(getattr(batch, name))
        for table, new in zip(static.block_tables, batch.block_tables, strict=True):
            table.copy_(new)
        graph.replay()
        expected = model.logits(model(batch, eager.cache))
        error = (logits - expected).abs().max() / expected.abs().max()
        assert error < 1e-2
