"""Choices that problems share: sizes that vary from call to call are rounded up.

To choose takes milliseconds, and a program calls one layer with hundreds of batch sizes. So the
choice is made for a problem's *representative* (:meth:`Entry.rounded`), and serves all
problems with this representative. A problem that somebody measured, or found a kernel wrong for,
has a choice of its own, and so has a problem that the shared configuration cannot serve.

What serves a problem does not depend on which problem was called first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kernelcat.bounded import Bounded
from kernelcat.call import choice
from kernelcat.call.choice import Attempt, Decision, Pin
from kernelcat.call.locking import NO_RULING, Ruling
from kernelcat.catalog.spec import AxisValue, Entry, Problem
from kernelcat.errors import Unsupported
from kernelcat.runtime.gpu import Gpu

if TYPE_CHECKING:
    from kernelcat.store import Choice, Measurement


class Choices:
    """The choices of one operator, remembered by representative.

    ``rows`` and ``refuted`` are rows of the database, as :func:`choice.choose` takes them.
    ``served`` has the names of implementations that were built.
    """

    MAX_REMEMBERED = 4096

    def __init__(
        self,
        entry: Entry,
        pin: Pin,
        rows: Sequence[Choice] = (),
        refuted: Sequence[Measurement] = (),
    ) -> None:
        self.entry, self.pin, self.rows, self.refuted = entry, pin, rows, refuted
        self.served: set[str] = set()
        self._own = {row.problem for row in rows}
        self._refuted = {row.problem_key for row in refuted}
        # (values of a representative, SKU) -> what serves it
        self._shared = Bounded[tuple[tuple[AxisValue, ...], str], Decision](self.MAX_REMEMBERED)

    def choose(
        self,
        problem: Problem,
        gpu: Gpu,
        missing: Mapping[str, str] | None = None,
        failed: Mapping[Attempt, str] | None = None,
        ruling: Ruling = NO_RULING,
    ) -> Decision:
        """What serves ``problem`` on ``gpu``; arguments and errors are those of `choice.choose`."""
        if ruling.locked is None and not self._has_own(problem):
            shared = self._share(problem, gpu, missing, failed)
            if shared and shared.implementation.illegal(shared.config, problem, gpu) is None:
                return replace(shared, ruling=ruling) if ruling.unlocked else shared
        return choice.choose(
            self.entry, problem, gpu, self.rows, self.pin, missing, failed, self.refuted, ruling
        )

    def _has_own(self, problem: Problem) -> bool:
        """Whether somebody measured this very problem, or found a kernel wrong for it."""
        return problem in self._own or (bool(self._refuted) and problem.key in self._refuted)

    def _share(
        self,
        problem: Problem,
        gpu: Gpu,
        missing: Mapping[str, str] | None,
        failed: Mapping[Attempt, str] | None,
    ) -> Decision | None:
        """What serves the problems with the representative of ``problem``.

        None where the representative is no problem of the entry, or nothing serves it.
        """
        values = self.entry.rounded_values(problem)
        key = tuple(values.values()), gpu.sku
        shared = None if missing or failed else self._shared.get(key)
        if shared is None:
            representative = Problem.with_values(self.entry.name, values)
            if self.entry.why_not(representative):
                return None
            try:
                shared = choice.choose(self.entry, representative, gpu, self.rows, self.pin,
                                       missing, failed, self.refuted)  # fmt: skip
            except Unsupported:
                return None
            if shared.why == "exact":  # measured, but for the representative
                shared = replace(shared, why="bucket")
            self._shared[key] = shared
        return shared
