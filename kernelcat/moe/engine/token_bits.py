"""Sets of tokens as bits, in the layout of the entry `sample`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

WORD = 32


def num_words(vocab_size: int) -> int:
    """Words of a set: bit v % 32 of word v / 32 belongs to token v."""
    return -(-vocab_size // WORD)


class SeenTokens:
    """The tokens that a request has, kept up to date as tokens come.

    Attributes
    ----------
    words : int32 (ceil(vocab / 32),)
    """

    def __init__(self, vocab_size: int) -> None:
        self.words: npt.NDArray[Any] = np.zeros(num_words(vocab_size), np.int32)
        self._num_added = 0

    def update(self, tokens: Sequence[int]) -> None:
        """Adds the tokens that have come since the last call."""
        new = np.asarray(tokens[self._num_added :], np.int64)
        bits = np.left_shift(np.uint32(1), (new % WORD).astype(np.uint32))
        np.bitwise_or.at(self.words.view(np.uint32), new // WORD, bits)
        self._num_added = len(tokens)
