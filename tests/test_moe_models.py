"""Models of `kernelcat.moe` on a CPU, against transformers on small checkpoints.

The oracles compute in float32, and so does transformers: logits differ by rounding alone. Small
models have windows of 24 tokens, and the prompts here have 70, more than `Ops.fused_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelcat import moe

NAMES = ("gpt-oss", "llama", "smollm2", "qwen3-moe", "deepseek-v3")
PAGE = 16
NUM_PAGES = 24
LENGTHS = (70, 33, 5)
"""Tokens of the prompts."""
NUM_DECODED = 6
TOLERANCE = 5e-6
"""Largest difference of logits, as a part of the largest logit: float32 sums in another order."""
PREFILL_16, DECODE_16 = 5e-2, 6e-2
"""The same in bfloat16: what FORMATS allows between a model and transformers."""


@dataclass(frozen=True)
class Case:
    """A small checkpoint, its model, prompts, and what transformers computes for them.

    ``logits`` are those of all tokens of each prompt, ``texts`` the prompts with the tokens that
    transformers appends greedily.
    """

    path: Path
    model: moe.Decoder
    prompts: list[list[int]]
    logits: list[torch.Tensor]
    texts: list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("checkpoints")
    made.cache_clear()


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, folder: Path) -> Case:
    return made(request.param, folder)


@cache
def made(name: str, folder: Path) -> Case:
    path = moe.write_checkpoint(folder / name, f"small-{name}")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(256, (n,), generator=generator).tolist() for n in LENGTHS]
    theirs = transformers_model(path)
    logits, texts = [], []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            logits.append(theirs(ids).logits[0])
            text = theirs.generate(
                ids, max_new_tokens=NUM_DECODED, do_sample=False, eos_token_id=-1
            )
            texts.append(text[0].tolist())
    return Case(path, moe.load(path, "cpu"), prompts, logits, texts)


def transformers_model(path: Path) -> Any:
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if path.name == "gpt-oss":
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


class Sequences:
    """A cache, and sequences that own shuffled pages in each group."""

    def __init__(self, model: moe.Decoder, num_sequences: int) -> None:
        self.model = model
        num_groups = len(moe.windows(model.cache_layers))
        self.cache = moe.KvCache.allocate(
            model.cache_layers, [NUM_PAGES] * num_groups, PAGE, model.dtype, "cpu"
        )
        generator = torch.Generator().manual_seed(7)
        share = NUM_PAGES // num_sequences
        orders = [torch.randperm(NUM_PAGES, generator=generator) for _ in range(num_groups)]
        self.pages = [
            [order[s * share : (s + 1) * share].tolist() for order in orders]
            for s in range(num_sequences)
        ]

    def chunk(self, s: int, text: list[int], start: int, end: int, **more: int) -> moe.Chunk:
        """Tokens ``start`` to ``end - 1`` of sequence s, with logits for all of them."""
        num_rows = more.get("num_rows", end - start)
        used = -(-end // PAGE)
        return moe.Chunk(text[start:end], start, [p[:used] for p in self.pages[s]], num_rows)

    def run(self, *chunks: moe.Chunk) -> list[torch.Tensor]:
        """Logits (num_rows, vocab) of each chunk."""
        batch = moe.Batch.of(chunks, "cpu")
        logits = self.model.logits(self.model(batch, self.cache))
        return list(logits.split([chunk.num_rows for chunk in chunks]))


def with_fused_tokens(model: moe.Decoder, count: int) -> moe.Decoder:
    """``model`` with other limits for fused projections; weights are shared."""
    other = object.__new__(type(model))
    other.__dict__ = {**model.__dict__, "ops": replace(model.ops, fused_tokens=count)}
    return other


def prefilled(model: moe.Decoder, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of all tokens of the prompts, each prompt a chunk of one batch."""
    sequences = Sequences(model, len(prompts))
    chunks = (sequences.chunk(s, text, 0, len(text)) for s, text in enumerate(prompts))
    return sequences.run(*chunks)


def check(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert mine.shape == theirs.shape and mine.dtype == torch.float32
    assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


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
    """A router may choose another expert where two scores nearly tie; few tokens have such a tie.

    So the tolerance holds for 19 tokens in 20, and the best token is among the first five.
    """
    model = moe.load(case.path, "cpu", torch.bfloat16)
    sequences, text = Sequences(model, 1), case.prompts[0]
    (prefill,) = sequences.run(sequences.chunk(0, text, 0, 66))
    decoded = [sequences.run(sequences.chunk(0, text, t, t + 1))[0] for t in range(66, 70)]
    mine, theirs = torch.cat((prefill, *decoded)), case.logits[0]
    error = (mine - theirs).abs().amax(1) / theirs.abs().max()
    allowed = torch.tensor([PREFILL_16] * 66 + [DECODE_16] * 4)
    assert (error <= allowed).float().mean() >= 0.95
    best = theirs.topk(5, 1).indices
    assert (best == mine.argmax(1)[:, None]).any(1).all()


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


def test_best_are_the_largest_logits(case: Case) -> None:
    sequences, text = Sequences(case.model, 1), case.prompts[2]
    batch = moe.Batch.of([sequences.chunk(0, text, 0, len(text))], "cpu")
    values, ids = case.model.best(case.model(batch, sequences.cache), top_k=3)
    expected = case.logits[2].topk(3)
    assert torch.equal(ids.long(), expected.indices)
    assert torch.allclose(values, expected.values, atol=1e-3)
