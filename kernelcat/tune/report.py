"""Results of a tune as plain data, for the command line and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kernelcat.store.measurement import Measurement
from kernelcat.tune.candidate import Candidate


@dataclass
class Winner:
    """The winner for one problem in one regime and state.

    Attributes
    ----------
    candidate : the winner
    median_us, ci_us : microseconds of one run, and the 95 % interval
    reason : why this candidate won
    tied : number of contestants that tie with the fastest, the fastest included
    peer : name of the fastest peer; None without a peer
    vs_peer : time of the fastest peer over time of the winner, paired block by block (above 1 the
        winner is faster), with the bounds of its interval; None without a peer
    """

    candidate: Candidate
    median_us: float
    ci_us: tuple[float, float] | None
    reason: str
    tied: int = 1
    peer: str | None = None
    vs_peer: tuple[float, float, float] | None = None

    def summary(self) -> str:
        """The winner, its time and the ratio to the fastest peer, if there is one."""
        peer = ""
        if self.vs_peer:
            ratio, low, high = self.vs_peer
            peer = f", {ratio:.3f}x of {self.peer} [{low:.3f}, {high:.3f}]"
        return f"{self.candidate} {self.median_us:.2f} us{peer}"

    def to_json(self) -> dict[str, Any]:
        candidate = {
            "language": self.candidate.language,
            "variant": self.candidate.variant,
            "config": dict(self.candidate.config),
        }
        return {**vars(self), "candidate": candidate}


@dataclass
class ProblemReport:
    """The result for one problem.

    Attributes
    ----------
    num_candidates : candidates among which the tune searched
    tried : status -> number of candidates that got this status in this tune
    known : number of candidates whose time or failure was known when the tune of the problem began
    winners : (regime, thermal state) -> winner
    skipped_peers : name of a peer -> why the peer did not race
    skipped : why the problem could not be tuned; else None
    cut_short : whether the budget ended before all candidates were tried
    not_tried : number of candidates that were not tried because the budget ended
    """

    name: str
    num_candidates: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    known: int = 0
    winners: dict[tuple[str, str], Winner] = field(default_factory=dict)
    skipped_peers: dict[str, str] = field(default_factory=dict)
    skipped: str | None = None
    cut_short: bool = False
    not_tried: int = 0

    def to_json(self) -> dict[str, Any]:
        winners = {" ".join(race): winner.to_json() for race, winner in self.winners.items()}
        return {**vars(self), "tried": dict(self.tried), "winners": winners}


@dataclass
class TuneReport:
    """The result of a tune.

    Attributes
    ----------
    gpu : SKU
    kind : ``measured``, or ``predicted`` where nothing ran
    run : identifier of the run in the database
    rows : every row that was written
    notes : sentences for the user
    restarts : how often a measuring process died or hung and was started again
    """

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

    def begun(self, problem: ProblemReport) -> ProblemReport:
        """The report of that problem in this tune: ``problem``, which is added, or an earlier one.

        There is an earlier one if the machine that tuned the problem was lost.
        """
        earlier = next((each for each in self.problems if each.name == problem.name), None)
        if earlier is None:
            self.problems.append(problem)
        return earlier or problem

    def note(self, text: str) -> None:
        """Adds a note, unless there is the same note already."""
        if text not in self.notes:
            self.notes.append(text)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "problems": [p.to_json() for p in self.problems],
                "rows": [row.to_json() for row in self.rows]}  # fmt: skip

    def lines(self) -> list[str]:
        """The report as text: one line for each race, then the notes."""
        text = []
        for problem in self.problems:
            if problem.skipped:
                text.append(f"{problem.name}: skipped, {problem.skipped}")
            for (regime, state), winner in problem.winners.items():
                text.append(
                    f"{problem.name} {regime} {state}: {winner.summary()} ({winner.reason})"
                )
            if problem.not_tried:
                text.append(f"{problem.name}: the budget ended before {problem.not_tried} "
                            "candidates were tried")  # fmt: skip
        return [*text, *self.notes]


@dataclass
class WorkloadReport:
    """The result of a tune of a workload.

    Attributes
    ----------
    gpu, kind : as in :class:`TuneReport`
    tunes : the report of each problem that was tuned
    known : number of problems that needed no tune
    refused : problem that could not be tuned -> why
    waiting : problems that the budget did not reach
    """

    gpu: str
    kind: str
    tunes: list[TuneReport] = field(default_factory=list)
    known: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[Measurement]:
        """Every row that was written."""
        return [row for tune in self.tunes for row in tune.rows]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tunes": [tune.to_json() for tune in self.tunes]}

    def lines(self) -> list[str]:
        """What remains to be said after the reports of the tunes."""
        text = [f"{name}: skipped, {why}" for name, why in self.refused.items()]
        counts = f"{len(self.tunes)} problems were tuned, {self.known} were {self.kind} before"
        if not self.waiting:
            return [*text, counts]
        return [*text, f"{counts}, {len(self.waiting)} are left: run the command again"]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a tune. ``report`` has all results so far; they are in the database too.

    ``resume`` is the command that continues the tune.
    """

    def __init__(self, report: TuneReport | WorkloadReport, resume: str) -> None:
        what = "measurements" if report.kind == "measured" else "predictions"
        super().__init__(f"interrupted: {len(report.rows)} {what} are kept; go on with: {resume}")
        self.report = report
