"""What a tune found: plain data for the command line and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kernelcat.store.measurement import Measurement
from kernelcat.tune.candidate import Candidate


@dataclass
class Winner:
    """Who won one problem in one regime and state, and what it was compared with.

    ``vs_peer``: the fastest peer's time over the winner's, paired (above 1: the winner is
    faster), with its interval; None without a peer.
    """

    candidate: Candidate
    median_us: float
    ci_us: tuple[float, float] | None
    reason: str
    tied: int = 1
    peer: str | None = None
    vs_peer: tuple[float, float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        own = self.candidate
        return {**vars(self), "candidate": {"language": own.language, "variant": own.variant,
                                            "config": dict(own.config)}}  # fmt: skip


@dataclass
class ProblemReport:
    """One problem: what was tried, who won, who was left out and why.

    ``winners`` are by regime and thermal state, (``graph``, ``burst``).
    """

    name: str
    tried: Counter[str] = field(default_factory=Counter)
    known: int = 0
    winners: dict[tuple[str, str], Winner] = field(default_factory=dict)
    skipped_peers: dict[str, str] = field(default_factory=dict)
    skipped: str | None = None
    cut_short: bool = False

    def to_json(self) -> dict[str, Any]:
        winners = {" ".join(race): winner.to_json() for race, winner in self.winners.items()}
        return {**vars(self), "tried": dict(self.tried), "winners": winners}


@dataclass
class TuneReport:
    """A whole tune. ``kind`` is ``predicted`` where nothing ran; ``notes`` are for people."""

    entry: str
    gpu: str
    kind: str
    run: str
    problems: list[ProblemReport] = field(default_factory=list)
    rows: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    restarts: int = 0
    duration_s: float = 0.0

    @property
    def skipped(self) -> dict[str, str]:
        """Problems that could not be tuned, with the reason."""
        return {p.name: p.skipped for p in self.problems if p.skipped}

    def note(self, text: str) -> None:
        """Tell the user, once."""
        if text not in self.notes:
            self.notes.append(text)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "problems": [p.to_json() for p in self.problems],
                "rows": [row.to_json() for row in self.rows]}  # fmt: skip

    def lines(self) -> list[str]:
        """One line for each race, then the notes."""
        text = []
        for problem in self.problems:
            if problem.skipped:
                text.append(f"{problem.name}: skipped, {problem.skipped}")
            for (regime, state), won in problem.winners.items():
                rival = ""
                if won.vs_peer:
                    ratio, low, high = won.vs_peer
                    rival = f", {ratio:.3f}x of {won.peer} [{low:.3f}, {high:.3f}]"
                text.append(f"{problem.name} {regime} {state}: {won.candidate} "
                            f"{won.median_us:.2f} us{rival} ({won.reason})")  # fmt: skip
        return [*text, *self.notes]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a tune: everything measured so far is kept. ``report`` holds it."""

    def __init__(self, report: TuneReport, resume: str) -> None:
        super().__init__(f"interrupted: {len(report.rows)} measurements are kept; go on with: "
                         f"{resume}")  # fmt: skip
        self.report = report
