"""Small models of `kernelcat.moe` with what transformers computes for them, for several tests.

Small models have windows of 24 tokens, and the longest prompt has 70 tokens, more than
`Ops.fused_tokens` and fewer than `Ops.projected_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernelcat import moe

NAMES = ("gpt-oss", "llama", "smollm2", "qwen3-moe", "deepseek-v3", "mixtral")
PAGE = 16
NUM_PAGES = 24
LENGTHS = (70, 33, 5)
"""Tokens of the prompts."""
NUM_DECODED = 6
TOLERANCE = 5e-6
"""Largest difference of logits, as a part of the largest logit: float32 sums in another order."""
PREFILL_16, DECODE_16 = 5e-2, 6e-2
"""Largest differences in bfloat16, as parts of the largest logit, as FORMATS allows them."""


@dataclass(frozen=True)
class Case:
    """A small checkpoint, its model, prompts, and what transformers computes for them.

    ``theirs`` is transformers' model, ``logits`` are those of all tokens of each prompt, ``texts``
    the prompts with the tokens that transformers appends greedily.
    """

    path: Path
    model: moe.Decoder
    theirs: Any
    prompts: list[list[int]]
    logits: list[torch.Tensor]
    texts: list[list[int]]


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
    return Case(path, moe.load(path, "cpu"), theirs, prompts, logits, texts)


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
            model.cache_layers, [NUM_PAGES] * num_groups, PAGE, model.dtype, model.device
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
        batch = moe.Batch.of(chunks, self.model.device)
        logits = self.model.logits(self.model(batch, self.cache))
        return list(logits.split([chunk.num_rows for chunk in chunks]))


def prefilled(model: moe.Decoder, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of all tokens of the prompts, each prompt a chunk of one batch."""
    sequences = Sequences(model, len(prompts))
    chunks = (sequences.chunk(s, text, 0, len(text)) for s, text in enumerate(prompts))
    return sequences.run(*chunks)


def check(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert mine.shape == theirs.shape and mine.dtype == torch.float32
    assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


def check_16_bits(model: moe.Decoder, case: Case) -> None:
    """Prefills and decodes the longest prompt with ``model``, and checks the logits.

    A router may choose another expert where two scores nearly tie; few tokens have such a tie. So
    the tolerance holds for 19 tokens in 20, and the best token is among the first five.
    """
    sequences, text = Sequences(model, 1), case.prompts[0]
    prefill = sequences.run(sequences.chunk(0, text, 0, 66))
    decoded = [sequences.run(sequences.chunk(0, text, t, t + 1))[0] for t in range(66, 70)]
    mine, theirs = torch.cat((*prefill, *decoded)).cpu(), case.logits[0]
    error = (mine - theirs).abs().amax(1) / theirs.abs().max()
    allowed = torch.tensor([PREFILL_16] * 66 + [DECODE_16] * 4)
    assert (error <= allowed).float().mean() >= 0.95
    best = theirs.topk(5, 1).indices
    assert (best == mine.argmax(1)[:, None]).any(1).all()


def with_fused_tokens(model: moe.Decoder, count: int) -> moe.Decoder:
    """``model`` with another limit for fused projections; weights are shared."""
    other = object.__new__(type(model))
    limits = {"fused_tokens": count, "projected_tokens": count}
    other.__dict__ = {**model.__dict__, "ops": replace(model.ops, **limits)}
    return other
