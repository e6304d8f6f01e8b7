"""The choice of a token for each row of a step, by the entries `lm_head` and `sample`.

Greedy rows alone need no logits: `lm_head` finds the largest one while it computes them. Otherwise
`sample` chooses from stored logits. Its random numbers are a function of the request's seed and of
the token's position, so a draw does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from kernelcat.moe.engine.request import Request, describe
from kernelcat.moe.engine.step import Step
from kernelcat.moe.engine.token_bits import WORD, SeenTokens, num_words
from kernelcat.moe.model import Decoder

Words = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one position, of the model's distribution before temperature, penalty
    and filters.

    Attributes
    ----------
    logprob : of the token that was chosen
    top : the most probable tokens with their log-probabilities, the most probable first; as many as
        `SamplingParameters.logprobs`
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class Choices:
    """What the rows of a step ask of the choice.

    Attributes
    ----------
    has_temperature, has_filters : whether a row draws, and whether filters limit a draw
    seen : int32 (rows, words) the tokens that requests have; None where no row has a penalty
    allowed : int32 (rows, words) tokens that may be chosen; None where all rows allow all
    num_logprobs : alternatives of each row, the most that a request asks for; None for no
        log-probabilities
    failed : requests whose constraints have failed, with what went wrong
    """

    has_temperature: bool = False
    has_filters: bool = False
    seen: Words | None = None
    allowed: Words | None = None
    num_logprobs: int | None = None
    failed: tuple[tuple[Request, str], ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit of each row is all that is needed."""
        needs_logits = self.seen is not None or self.allowed is not None
        return not (self.has_temperature or needs_logits or self.num_logprobs is not None)


def every_choice(num_rows: int, vocab_size: int) -> Iterator[Choices]:
    """Choices for ``num_rows`` rows that together run all kernels that may choose tokens."""
    if not num_rows:
        return
    words = np.zeros((num_rows, num_words(vocab_size)), np.int32)
    draws = Choices(has_temperature=True), Choices(has_temperature=True, has_filters=True)
    for choices in (Choices(), *draws, Choices(num_logprobs=20)):
        yield choices
        yield replace(choices, seen=words)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of rows: (rows,) chosen, (rows, n) top values and their tokens."""

    chosen: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Logprobs:
        """The result of ``function`` for each tensor."""
        return Logprobs(*map(function, (self.chosen, self.values, self.ids)))

    def of_rows(self, counts: Sequence[int | None]) -> list[TokenLogprob | None]:
        """A `TokenLogprob` with ``counts[row]`` alternatives for each row; None for None."""
        values, ids = self.values.tolist(), self.ids.tolist()
        return [
            None
            if count is None
            else TokenLogprob(chosen, tuple(zip(ids[i][:count], values[i][:count], strict=True)))
            for i, (chosen, count) in enumerate(zip(self.chosen.tolist(), counts, strict=False))
        ]


@dataclass
class Sampler:
    """Chooses tokens with the head of ``model``."""

    model: Decoder
    _seen: WeakKeyDictionary[Request, SeenTokens] = field(default_factory=WeakKeyDictionary)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def plan(self, step: Step, num_rows: int) -> Choices:
        """What the rows of ``step`` ask for, in arrays of ``num_rows`` rows.

        The requests must not change meanwhile.
        """
        chunks = [chunk for chunk in step.chunks if chunk.num_rows]
        each = [chunk.request.parameters for chunk in chunks]
        draws = [p for p in each if not p.is_greedy]
        penalized = [chunk for chunk in chunks if chunk.request.parameters.has_penalty]
        constrained = [chunk for chunk in chunks if chunk.request.constraint is not None]
        seen = allowed = None
        if penalized:
            seen = np.zeros((num_rows, num_words(self.vocab_size)), np.int32)
            for chunk in penalized:
                seen[chunk.first_row] = self._seen_by(chunk.request)
        failed = []
        if constrained:
            allowed = np.full((num_rows, num_words(self.vocab_size)), -1, np.int32)
            for chunk in constrained:
                assert chunk.request.constraint is not None
                try:
                    chunk.request.constraint.allowed(allowed[chunk.first_row])
                except Exception as error:  # other people's code
                    allowed[chunk.first_row] = -1
                    failed.append((chunk.request, describe(error)))
        counts = [p.logprobs for p in each if p.logprobs is not None]
        return Choices(
            has_temperature=bool(draws),
            has_filters=any(p.has_filters for p in draws),
            seen=seen,
            allowed=allowed,
            num_logprobs=max(counts, default=None),
            failed=tuple(failed),
        )

    def _seen_by(self, request: Request) -> Words:
        tokens = self._seen.get(request)
        if tokens is None:
            tokens = self._seen[request] = SeenTokens(self.vocab_size)
        tokens.update(request.tokens)
        return tokens.words

    def choose(
        self,
        x: torch.Tensor,
        choices: Choices,
        parameter: Callable[[str], torch.Tensor],
        chosen: torch.Tensor,
    ) -> Logprobs | None:
        """Writes the tokens of hidden states x (rows, hidden) to ``chosen`` (rows,) int32.

        ``parameter`` returns a sampling parameter (rows,) on the device by its name.
        """
        if choices.is_greedy:
            chosen.copy_(self.model.best(x)[1][:, 0])
            return None
        logits = self.model.logits(x)
        inputs: dict[str, Any] = {}
        if choices.has_temperature:
            inputs |= {name: parameter(name) for name in ("temperature", "seed", "offset")}
        if choices.has_filters:
            inputs |= {name: parameter(name) for name in ("min_p", "top_k", "top_p")}
        if choices.seen is not None:
            inputs["seen"] = torch.from_numpy(choices.seen).to(x.device)
            inputs["penalty"] = parameter("repetition_penalty")
        allowed = logits
        if choices.allowed is not None:
            words = torch.from_numpy(choices.allowed).to(x.device)
            bits = words[:, :, None] >> torch.arange(WORD, dtype=torch.int32, device=x.device) & 1
            is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
            allowed = logits.masked_fill(~is_allowed, float("-inf"))
        chosen.copy_(self.model.ops.sample(allowed, **inputs, has_logprobs=False)[0])
        if choices.num_logprobs is None:
            return None
        return _logprobs(logits, chosen, choices.num_logprobs)


def _logprobs(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> Logprobs:
    total = logits.logsumexp(1)
    values, ids = logits.topk(min(count, logits.shape[1]), 1)
    own = logits.gather(1, chosen[:, None].long())[:, 0]
    return Logprobs(own - total, values - total[:, None], ids)
