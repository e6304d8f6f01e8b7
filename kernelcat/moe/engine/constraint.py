"""Constraints on what a request writes: which tokens may come next."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt


class Constraint(Protocol):
    """A grammar in the middle of a text. One request owns it.

    An exception of a method ends the request with an error, and no other request.
    """

    def allowed(self, mask: npt.NDArray[Any]) -> None:
        """Writes the tokens that may come next to ``mask``.

        ``mask`` is int32 (ceil(vocab / 32),): bit v % 32 of word v / 32 belongs to token v.
        """

    def append(self, token: int) -> None:
        """Takes the token that was chosen."""
