"""Models of `kernelcat.moe` on a CPU, against transformers on small checkpoints.

The oracles compute in float32, and so does transformers: logits differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moe_models import (
    NAMES,
    NUM_DECODED,
    PAGE,
    Case,
    Sequences,
    check,
    check_16_bits,
    made,
    prefilled,
    transformers_model,
    with_fused_tokens,
)

from kernelcat import moe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("checkpoints")
    made.cache_clear()


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, folder: Path) -> Case:
    return made(request.param, folder)


@pytest.mark.parametrize("fused_tokens", (0, 1000))
def test_logits_equal_those_of_transformers(case: Case, fused_tokens: int) -> None:
    model = with_fused_tokens(case.model, fused_tokens)
    for mine, theirs in zip(prefilled(model, case.prompts), case.logits, strict=True):
        check(mine, theirs)
        assert torch.equal(mine.argmax(1), theirs.argmax(1))


def test_greedy_decoding_writes_the_tokens_of_transformers(case: Case) -> None:
    """All sequences are decoded in one batch, whose lengths differ."""
    sequences, texts = Sequences(case.model, len(case.prompts)), [list(p) for p in case.prompts]
    starts = [0] * len(texts)
    for _ in range(NUM_DECODED):
        chunks = [
            sequences.chunk(s, text, start, len(text), num_rows=1)
            for s, (text, start) in enumerate(zip(texts, starts, strict=True))
        ]
        starts = [len(text) for text in texts]
        hidden = case.model(moe.Batch.of(chunks, "cpu"), sequences.cache)
        for text, token in zip(texts, case.model.best(hidden)[1][:, 0].tolist(), strict=True):
            text.append(token)
    assert texts == case.texts


def test_a_chunked_prompt_equals_a_whole_one(case: Case) -> None:
    """Chunks end in, at and behind the end of a page, and other sequences run beside them."""
    sequences = Sequences(case.model, len(case.prompts))
    text, other, short = case.prompts
    first = sequences.run(
        sequences.chunk(0, text, 0, 31), sequences.chunk(1, other, 0, len(other) - 2)
    )
    second = sequences.run(
        sequences.chunk(1, other, len(other) - 2, len(other) - 1),
        sequences.chunk(2, short, 0, len(short)),
        sequences.chunk(0, text, 31, 48),
    )
    third = sequences.run(
        sequences.chunk(0, text, 48, 49), sequences.chunk(1, other, len(other) - 1, len(other))
    )
    last = sequences.run(sequences.chunk(0, text, 49, len(text)))
    check(torch.cat((first[0], second[2], third[0], last[0])), case.logits[0])
    check(torch.cat((first[1], second[0], third[1])), case.logits[1])
    check(second[1], case.logits[2])


def test_decoding_step_by_step_equals_prefill(case: Case) -> None:
    sequences, text = Sequences(case.model, 1), case.prompts[1]
    steps = [sequences.run(sequences.chunk(0, text, t, t + 1))[0] for t in range(len(text))]
    check(torch.cat(steps), case.logits[1])


def test_bfloat16_stays_within_the_tolerances_of_formats(case: Case) -> None:
    check_16_bits(moe.load(case.path, "cpu", torch.bfloat16), case)


def test_pages_before_the_window_need_not_be_kept(folder: Path) -> None:
    """Entries of the windowed group's table name a page of zeros once all queries are past it."""
    case = made("gpt-oss", folder)
    sequences, text = Sequences(case.model, 2), case.prompts[0]
    windows = moe.windows(case.model.cache_layers)
    assert windows == (24, 0)
    sequences.run(sequences.chunk(0, text, 0, 60))
    chunk = sequences.chunk(0, text, 60, 70)
    unused = sequences.pages[1][0][0]
    freed = (60 - 24 + 1) // PAGE  # the query at 60 sees tokens 37 to 60
    pages = [[unused] * freed + list(chunk.pages[0])[freed:], chunk.pages[1]]
    for k_or_v in sequences.cache.layers[0]:
        k_or_v[sequences.pages[0][0][:freed]] = torch.nan
    check(sequences.run(chunk._replace(pages=pages))[0], case.logits[0][60:])


def test_a_sequence_without_new_tokens_changes_nothing(case: Case) -> None:
    sequences, text = Sequences(case.model, 2), case.prompts[2]
    empty = moe.Chunk([], 0, [[] for _ in sequences.pages[1]], 0)
    none, logits = sequences.run(empty, sequences.chunk(0, text, 0, len(text)))
    assert len(none) == 0
    check(logits, case.logits[2])


def test_random_weights_are_those_of_the_checkpoint(case: Case) -> None:
    model = moe.random_model(case.model.config, "cpu")
    check(prefilled(model, case.prompts[2:])[0], case.logits[2])


def test_a_checkpoint_that_transformers_wrote_is_read(folder: Path, tmp_path: Path) -> None:
    """transformers renames fields of `config.json`, and keeps experts side by side in memory."""
    case = made("qwen3-moe", folder)
    transformers_model(case.path).save_pretrained(tmp_path)
    check(prefilled(moe.load(tmp_path, "cpu"), case.prompts[2:])[0], case.logits[2])


@pytest.mark.parametrize("name", ("qwen3-moe", "deepseek-v3"))
def test_experts_in_float8_have_the_quantized_weights(name: str, folder: Path) -> None:
    """A model of the dequantized weights gives the same logits, the original one others."""
    case = made(name, folder)
    quantized, plain = (moe.load(case.path, "cpu", fp8_experts=fp8) for fp8 in (True, False))
    (mine,) = prefilled(quantized, case.prompts[2:])
    assert (mine - case.logits[2]).abs().max() > 1e-3
    for layer, other in zip(plain.layers, quantized.layers, strict=True):
        for w in ("w1", "w2") if other.experts else ():
            assert other.experts[w].dtype == torch.float8_e4m3fn
            scale = other.experts[f"{w}_scale"]
            scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            rows, cols = other.experts[w].shape[1:]
            layer.experts[w] = other.experts[w].float() * scale[:, :rows, :cols]
    check(mine, prefilled(plain, case.prompts[2:])[0])


def test_best_are_the_largest_logits(case: Case) -> None:
    sequences, text = Sequences(case.model, 1), case.prompts[2]
    batch = moe.Batch.of([sequences.chunk(0, text, 0, len(text))], "cpu")
    values, ids = case.model.best(case.model(batch, sequences.cache), top_k=3)
    expected = case.logits[2].topk(3)
    assert torch.equal(ids.long(), expected.indices)
    assert torch.allclose(values, expected.values, atol=1e-3)
