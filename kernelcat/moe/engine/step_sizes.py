"""Sizes to which steps are padded.

A model's kernels are chosen and compiled for the sizes of their arrays. With few sizes everything
is compiled before the first request, and a step without prompts can be a CUDA graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.step import Step


class Size(NamedTuple):
    """Sizes of a step's arrays.

    Attributes
    ----------
    batch : sequences
    tokens : new tokens
    rows : new tokens after which a token is chosen
    max_q : upper bound of the new tokens of a sequence
    """

    batch: int
    tokens: int
    rows: int
    max_q: int

    @staticmethod
    def of(step: Step) -> Size:
        """The size of ``step`` without padding."""
        return Size(len(step.chunks), step.num_tokens, step.num_rows, step.max_q)

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one new token and one row."""
        return self.max_q == 1 and self.batch == self.tokens == self.rows

    @staticmethod
    def largest(sizes: Iterable[Size]) -> Size:
        """The largest of each number."""
        return Size(*map(max, zip(*sizes, strict=True)))


class StepSizes:
    """The sizes that steps of an engine may have.

    A step of decoding is padded to one of ``batches``. So is a step that verifies drafts and has no
    prompt: each request then has room for all its drafts, and as many sequences again have the
    tokens that are added. Every other step is padded to one of ``mixed_batches`` and one of
    ``tokens``; ``spare`` more sequences have the tokens that are added. Without ``batches`` nothing
    is padded.

    Ranks in lockstep run steps of one size, so that of a rank without requests may consist of added
    tokens alone. Without ``batches`` they take the least size that serves all of them.

    Parameters
    ----------
    limits : of steps
    num_drafts : draft tokens of a request in a step, at most
    batches : sequences, ascending; `Limits.max_running` replaces those beyond it
    is_lockstep : whether ranks run steps of one size together

    Attributes
    ----------
    mixed_batches : every other one of ``batches``: attention skips a sequence without new tokens
    context : tokens of a sequence, at most
    tokens : ascending numbers of new tokens; the last one is the most that a step can have
    spare : sequences with room for all tokens that may have to be added
    heaviest : the step that needs most memory
    largest : the size that buffers need
    """

    def __init__(
        self, limits: Limits, num_drafts: int, batches: Sequence[int], is_lockstep: bool = False
    ) -> None:
        most = limits.max_running
        self.num_drafts, self.context = num_drafts, limits.context
        self.batches = [*(size for size in batches if size < most), most] if batches else []
        self.mixed_batches = sorted({*self.batches[::2], *self.batches[-1:]})
        last = min(limits.step_tokens, most * limits.context)  # a request has no more tokens
        self.tokens = _token_sizes(last, limits.context) if batches else []
        rows = min(last, most * (1 + num_drafts))
        self._is_lockstep = is_lockstep
        self.spare = -(-last // limits.context) if is_lockstep else int(bool(batches))
        self.heaviest = Size(most + self.spare, last, rows, last)
        batch = max(size.batch for size in (self.heaviest, *self.verify()))
        self.largest = self.heaviest._replace(batch=batch)

    def of(self, step: Step) -> Size:
        """The size to which ``step`` is padded."""
        return self.padded(Size.of(step))

    def padded(self, size: Size) -> Size:
        """The size to which steps are padded of which ``size`` is the largest of each number."""
        if not self.batches:
            if size.is_decode or not self._is_lockstep:
                return size
            return Size(size.batch + self.spare, size.tokens, size.rows, size.tokens)
        if size.is_decode:
            batch = _next(self.batches, size.batch)
            return Size(batch, batch, batch, 1)
        if size.tokens == size.rows and size.max_q <= 1 + self.num_drafts:
            for padded in self.verify():
                if 2 * size.batch <= padded.batch:
                    return padded
        batch = _next(self.mixed_batches, size.batch)
        rows = next(rows for rows in self._rows(batch) if rows >= size.rows)
        tokens = _next(self.tokens, size.tokens)
        return Size(batch + self.spare, tokens, rows, tokens)

    def _rows(self, batch: int) -> list[int]:
        """Ascending numbers of rows of a step with ``batch`` requests that does not only decode."""
        counts = {0, batch, batch * (1 + self.num_drafts)}
        return sorted({min(rows, self.heaviest.rows) for rows in counts})

    def decode(self) -> list[Size]:
        """All sizes of steps that only decode."""
        return [Size(batch, batch, batch, 1) for batch in self.batches]

    def verify(self) -> list[Size]:
        """All sizes of steps that verify drafts and have no prompt, if steps may be so large.

        Half of the sequences are requests, which have a token at least. The others have room for
        the tokens that are added, however few tokens the requests have.
        """
        each = 1 + self.num_drafts
        if each == 1 or each > self.context:
            return []
        batches = (batch for batch in self.batches if batch * each <= self.heaviest.tokens)
        return [Size(2 * batch, batch * each, batch * each, each) for batch in batches]

    def mixed(self) -> Iterator[Size]:
        """Sizes of other steps: all pairs of batch and tokens, and all numbers of rows."""
        for batch in self.mixed_batches:
            for before, tokens in pairwise([0, *self.tokens]):
                if before < batch * self.context:  # what requests can fill
                    yield Size(batch + self.spare, tokens, 0, tokens)
            for rows in self._rows(batch):
                yield Size(batch + self.spare, self.tokens[0], rows, self.tokens[0])

    def every(self) -> Iterator[Size]:
        """All sizes to which steps are padded."""
        yield from (*self.decode(), *self.verify(), *self.mixed())


def _token_sizes(last: int, max_gap: int) -> list[int]:
    """Ascending sizes up to ``last``: by 16, later by a quarter of a power of two."""
    sizes, size = list[int](), min(16, max_gap)
    while size < last:
        sizes.append(size)
        size += min(max_gap, max(16, 1 << size.bit_length() - 3))
    return [*sizes, last]


def _next(sizes: Sequence[int], size: int) -> int:
    """The first of ``sizes`` that is at least ``size``."""
    return sizes[bisect_left(sizes, size)]
