"""Progress of a tune: a bar for each GPU on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from itertools import count
from typing import Any, Protocol, Self

from kernelcat.tune.candidate import Candidate


class Line(Protocol):
    """Receives the progress of one GPU."""

    def problem(self, name: str, candidates: int) -> None:
        """A problem with this number of candidates begins."""
        ...

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None:
        """A candidate was screened; ``best_us`` is the fastest time so far in microseconds."""
        ...

    def phase(self, name: str) -> None:
        """The next step after screening begins."""
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

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None:
        pass

    def phase(self, name: str) -> None:
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

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None:
        self.num_failed += status != "passed"
        self.bar.update(self.task, advance=1,
                        best=f"best {best_us:.2f} us" if best_us else "",
                        phase=f"{self.num_failed} failed" if self.num_failed else "")  # fmt: skip

    def phase(self, name: str) -> None:
        self.bar.update(self.task, phase=name)


def default(entry: str, problems: int) -> Progress:
    """Bars if standard error is a terminal, else nothing."""
    return Bar(entry, problems) if sys.stderr.isatty() else Quiet()
