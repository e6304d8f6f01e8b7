"""How far a model's next tokens are from another one's: the mean Kullback-Leibler divergence.

    KL(p || q) = sum over tokens of p (log p - log q),  p of the reference, q of the other model

Prompts are random and fixed by a seed. Each one is computed as an engine computes it: the prompt in
one step, then tokens one by one, with keys and values in a paged cache. The divergence is that of
all these next-token distributions, so it includes rounding in the cache, and both the kernels for
many tokens and those for few.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernelcat.moe.batch import Batch, Chunk
from kernelcat.moe.cache import KvCache, windows
from kernelcat.moe.model import Decoder

PAGE_SIZE = 64


@dataclass(frozen=True)
class Prompts:
    """What is computed: ``count`` prompts of ``length`` tokens, and ``steps`` tokens after each."""

    count: int = 16
    length: int = 64
    steps: int = 8
    seed: int = 0

    def tokens(self, vocab_size: int) -> list[list[int]]:
        """The prompts with the tokens after them."""
        random = np.random.default_rng(self.seed)
        size = (self.count, self.length + self.steps)
        found: list[list[int]] = random.integers(vocab_size, size=size).tolist()
        return found


def next_tokens(model: Decoder, cache_dtype: torch.dtype, prompts: Prompts) -> torch.Tensor:
    """Log-probabilities (rows, vocab) float32 on the CPU: one row a prompt, then one a step."""
    texts = prompts.tokens(model.config.vocab_size)
    length = prompts.length
    width = -(-(length + prompts.steps) // PAGE_SIZE)
    groups = len(windows(model.cache_layers))
    cache = KvCache.allocate(
        model.cache_layers, [len(texts) * width] * groups, PAGE_SIZE, cache_dtype, model.device
    )

    def run(start: int, end: int) -> torch.Tensor:
        chunks = [
            Chunk(text[start:end], start, [range(s * width, (s + 1) * width)] * groups)
            for s, text in enumerate(texts)
        ]
        x = model(Batch.of(chunks, model.device), cache)
        return model.logits(x).log_softmax(1).cpu()

    steps = range(length, length + prompts.steps)
    return torch.cat([run(0, length), *(run(step, step + 1) for step in steps)])


def mean_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(reference || other) in nats of log-probabilities (rows, vocab).

    Summed as p (log p - log q) - p + q, which is never negative for any token, so that sums of
    probabilities that are not quite 1 do no harm.
    """
    p, q = (x.double() for x in (reference, other))
    return float((p.exp() * (p - q) - p.exp() + q.exp()).sum(1).mean())
