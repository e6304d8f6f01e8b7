"""Progress of a tune: a bar for each GPU on a terminal, lines on standard error elsewhere."""

from __future__ import annotations

import sys
import time
from itertools import count
from typing import Any, Protocol, Self

from kernelcat.report.printable import printable
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.report import ProblemReport

QUIET_S = 60.0
"""Seconds after which a problem that still runs gets another line."""


class Line(Protocol):
    """Receives the progress of one GPU."""

    def problem(self, name: str, candidates: int) -> None:
        """A problem with this number of candidates begins."""
        ...

    def problems(self, count: int, candidates: int) -> None:
        """``count`` problems begin together, with this number of candidates."""
        ...

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None:
        """A candidate was screened; ``best_us`` is the fastest time so far in microseconds."""
        ...

    def phase(self, name: str) -> None:
        """The next step after screening begins."""
        ...

    def finished(self, report: ProblemReport) -> None:
        """The problem that began last has ended with this result."""
        ...


class Progress(Protocol):
    """Receives the progress of a tune. GPUs may report at the same time, from several threads."""

    def line(self, gpu: str = "") -> Line:
        """A receiver for one GPU; ``gpu`` is its title, empty if there is only one GPU."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Quiet:
    """Shows nothing."""

    def line(self, gpu: str = "") -> Self:
        return self

    def problem(self, name: str, candidates: int) -> None:
        pass

    def problems(self, count: int, candidates: int) -> None:
        pass

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def finished(self, report: ProblemReport) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Bar:
    """Progress bars: problem, candidates, best time so far, failures, remaining time."""

    def __init__(self, entry: str, problems: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.entry, self.problems, self.started = entry, problems, count(1)
        self.bar: Any = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}", markup=False),
            TextColumn("{task.fields[phase]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def line(self, gpu: str = "") -> BarLine:
        return BarLine(self, gpu)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


class BarLine:
    """The bar of one GPU."""

    def __init__(self, bars: Bar, gpu: str) -> None:
        self.bars, self.bar, self.num_failed = bars, bars.bar, 0
        self.title = f"{gpu} {bars.entry}".strip()
        self.task = self.bar.add_task(self.title, total=None, best="", phase="starting")

    def problem(self, name: str, candidates: int) -> None:
        self.num_failed = 0
        title = f"{self.title} {name} ({next(self.bars.started)}/{self.bars.problems})"
        self.bar.reset(self.task, total=candidates, description=title, best="", phase="")

    def problems(self, count: int, candidates: int) -> None:
        title = f"{self.title} {_problems(count)}"
        self.bar.reset(self.task, total=candidates, description=title, best="", phase="")

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None:
        self.num_failed += status != "passed"
        self.bar.update(self.task, advance=1,
                        best=f"best {best_us:.2f} us" if best_us else "",
                        phase=f"{self.num_failed} failed" if self.num_failed else "")  # fmt: skip

    def phase(self, name: str) -> None:
        self.bar.update(self.task, phase=name)

    def finished(self, report: ProblemReport) -> None:
        pass


class Lines:
    """Lines on standard error, written at once: when a problem begins and when it has ended.

    A problem that takes long gets a line in between about every :data:`QUIET_S` seconds.
    """

    def __init__(self, entry: str, problems: int) -> None:
        self.entry, self.problems, self.started = entry, problems, count(1)

    def line(self, gpu: str = "") -> LinesOfGpu:
        return LinesOfGpu(self, gpu)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LinesOfGpu:
    """The lines of one GPU, each with its title and the problem in front."""

    def __init__(self, lines: Lines, gpu: str) -> None:
        self.lines, self.title = lines, f"{gpu} {lines.entry}".strip()
        self.name, self.best = "", ""
        self.num_candidates = self.num_tried = self.num_failed = 0
        self.start = self.last = time.monotonic()

    def problem(self, name: str, candidates: int) -> None:
        self.name, self.num_candidates, self.best = name, candidates, ""
        self.num_tried = self.num_failed = 0
        self.start = time.monotonic()
        number = f"{next(self.lines.started)} of {self.lines.problems}"
        self._write(f"problem {number}, {candidates} candidates")

    def problems(self, count: int, candidates: int) -> None:
        self.name, self.num_candidates, self.best = _problems(count), candidates, ""
        self._write(f"{candidates} candidates")

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None:
        self.num_tried += 1
        self.num_failed += status != "passed"
        self.best = f", best {best_us:.2f} us" if best_us else ""
        self._write_rarely("screening")

    def phase(self, name: str) -> None:
        self._write_rarely(name)

    def finished(self, report: ProblemReport) -> None:
        self.name = report.name
        results = [f"skipped, {report.skipped}"] if report.skipped else []
        results += [
            f"{' '.join(race)} {winner.summary()}" for race, winner in report.winners.items()
        ]
        self._write(f"{'; '.join(results)}; took {time.monotonic() - self.start:.1f} s")

    def _write_rarely(self, phase: str) -> None:
        """Write how far the problem is, unless there was a line a short time ago."""
        if time.monotonic() - self.last < QUIET_S:
            return
        if not self.num_candidates:  # no problem has begun
            self._write(phase)
        else:
            self._write(f"{phase}, {self.num_tried} of {self.num_candidates} candidates tried, "
                        f"{self.num_failed} failed{self.best}")  # fmt: skip

    def _write(self, text: str) -> None:
        self.last = time.monotonic()
        title = f"{self.title} {self.name}".strip()
        # One write a line: GPUs report at the same time.
        print(printable(f"{title}: {text}") + "\n", end="", file=sys.stderr, flush=True)


def _problems(count: int) -> str:
    return "1 problem" if count == 1 else f"{count} problems"


def default(entry: str, problems: int) -> Progress:
    """Bars if standard error is a terminal, else lines."""
    return Bar(entry, problems) if sys.stderr.isatty() else Lines(entry, problems)
