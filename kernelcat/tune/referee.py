"""The referee of a race: changes memory between timed blocks, and judges what the blocks wrote.

Before a block one copy, drawn at random, gets new inputs and poison of a changing pattern in its
outputs and guard bands. After the block the copy is judged. A kernel that remembers results by
address, skips runs, or writes out of bounds leaves the copy wrong. After the race all copies get
inputs that no run has read before, and runs with device times show how long a kernel works on
them: a single pass of launches from the host takes twice its usual time on a busy host. The start
of a still GPU takes up to LAUNCH_US: a kernel that remembers results by content and is faster than
that is found only by its time below the roofline.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from kernelcat.bench.timer import Timed
from kernelcat.tune.candidate import Candidate
from kernelcat.verify.gate import PATTERNS, Prepared, Verdict
from kernelcat.verify.seeds import MAX_PASSES

MAX_SLOWDOWN = 2.0
"""A run on new inputs takes at most this factor times the median of the timed blocks."""
LAUNCH_US = 50.0
"""Microseconds that a run or a pass may take longer, for the launch on a still GPU."""


class Referee:
    """Judges the contestants of one race.

    Parameters
    ----------
    copies : the memory that the contestants are bound to
    draws : the inputs and oracles that take turns in this memory; ``copies`` hold the first
    seed : seed of the random choices
    """

    def __init__(self, copies: Sequence[Prepared], draws: Sequence[Prepared], seed: int) -> None:
        self.copies, self.draws = copies, draws
        self.random = random.Random(seed)
        self.judged, self.number = copies[0], 0
        self.failed: dict[Candidate, Verdict] = {}

    def before(self, candidate: Candidate, block: int) -> None:
        """Changes one copy. All contestants get the same draw in the same block.

        A peer may have read its inputs when it was bound: its inputs keep their values.
        """
        draw = 0 if candidate.is_peer else block % len(self.draws)
        self.number = self.random.randrange(len(self.copies))
        self.judged = self.draws[draw].on(self.copies[self.number])
        self.judged.reset(self.random.choice(PATTERNS))
        self.judged.device.synchronize()

    def after(self, candidate: Candidate, one_pass: Callable[[], float]) -> bool:
        """Judges the changed copy, after all work of the device; False ends the race for this
        contestant. The copy gets the inputs of the first draw again.

        Where a block's runs have added to an output again and again, no oracle knows the sum: the
        copy is written anew, and ``one_pass`` is judged instead of the block.
        """
        self.judged.device.synchronize()
        if self.judged.accumulates:
            self.judged.reset(self.random.choice(PATTERNS))
            self.judged.device.synchronize()
            one_pass()
            self.judged.device.synchronize()
        verdict = self._judge(candidate, [(self.number, self.judged)])
        if not verdict.passed:
            self.failed[candidate] = verdict
        self.draws[0].on(self.judged).reset()
        return verdict.passed

    def judge_new_inputs(
        self,
        candidate: Candidate,
        samples: Sequence[float],
        timed: Timed,
        draw: Callable[[int], Prepared],
    ) -> Verdict:
        """A timed run on the first copy, then one on each copy, all with new inputs and judged.

        Parameters
        ----------
        candidate : the contestant
        samples : microseconds of one run, from the blocks of the race
        timed : its runs, with device times where the timer has them
        draw : ``draw(n)`` returns inputs that no run of this contestant has read before trial
            ``n``. Later trials run only if the first is slow.
        """
        timed_us = median(samples)
        for number in range(MAX_PASSES):
            new = self.draws[0] if candidate.is_peer else draw(number)
            first_us = self._run_on(self.copies[:1], new, timed.first_run)
            verdict = self._judge_changed(candidate)
            if verdict.passed and len(self.copies) > 1:
                pass_us = self._run_on(self.copies, new, timed.one_pass)
                verdict = self._judge_changed(candidate)
            else:
                pass_us = first_us
            limit_us = MAX_SLOWDOWN * timed_us
            is_fast = (first_us <= limit_us + LAUNCH_US
                       and pass_us <= limit_us + LAUNCH_US / len(self.copies))  # fmt: skip
            if not verdict.passed or is_fast:
                return verdict
        detail = (f"skips work: {timed_us:.3f} us a run, {first_us:.3f} us the first run on new "
                  f"inputs, {pass_us:.3f} us a run on all copies")  # fmt: skip
        return Verdict(False, verdict.max_error, detail)

    def _run_on(self, copies: Sequence[Prepared], new: Prepared, run: Callable[[], float]) -> float:
        """Writes the inputs of ``new`` to ``copies``, and returns what ``run`` takes."""
        self.changed = [new.on(copy) for copy in copies]
        poison = self.random.choice(PATTERNS)
        for copy in self.changed:
            copy.reset(poison)
        new.device.synchronize()
        run_us = run()
        new.device.synchronize()
        return run_us

    def _judge_changed(self, candidate: Candidate) -> Verdict:
        """The verdict on the copies that were just written: the first, and those unlike it."""
        first, *others = self.changed
        verdict = self._judge(candidate, [(0, first)])
        if not verdict.passed:
            return verdict
        unlike = [(number + 1, others[number]) for number in first.unlike(others)]
        rest = self._judge(candidate, unlike)
        return verdict.with_another(rest) if rest.passed else rest

    def _judge(self, candidate: Candidate, copies: Sequence[tuple[int, Prepared]]) -> Verdict:
        worst = Verdict(True, 0.0)
        for number, copy in copies:
            verdict = copy.judge(peer=candidate.is_peer)
            if not verdict.passed:
                place = f"copy {number + 1}: " if number else ""
                return replace(verdict, detail=place + verdict.detail)
            worst = worst.with_another(verdict)
        return worst
