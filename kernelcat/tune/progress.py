"""How far a tune is: a bar for each GPU on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from itertools import count
from typing import Any, Protocol, Self

from kernelcat.tune.candidate import Candidate


class Line(Protocol):
    """What the tuner tells of one GPU while it works. Times are microseconds."""

    def problem(self, name: str, candidates: int) -> None: ...

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None: ...

    def phase(self, name: str) -> None: ...


class Progress(Protocol):
    """Where it tells it; GPUs may tell at the same time."""

    def line(self, gpu: str = "") -> Line:
        """One for each GPU, with its name where there are several."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Quiet:
    """Tells nobody."""

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
    """Progress bars: problem, candidates, best so far, failures, time left."""

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
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TextColumn("{task.fields[phase]}"),
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
    """One GPU's bar."""

    def __init__(self, of: Bar, gpu: str) -> None:
        self.of, self.bar, self.failed = of, of.bar, 0
        self.title = f"{gpu} {of.entry}".strip()
        self.task = self.bar.add_task(self.title, total=None, best="", phase="starting")

    def problem(self, name: str, candidates: int) -> None:
        self.failed = 0
        title = f"{self.title} {name} ({next(self.of.started)}/{self.of.problems})"
        self.bar.reset(self.task, total=candidates, description=title, best="", phase="")

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None:
        self.failed += status != "passed"
        self.bar.update(self.task, advance=1,
                        best=f"best {best_us:.2f} us" if best_us else "",
                        phase=f"{self.failed} failed" if self.failed else "")  # fmt: skip

    def phase(self, name: str) -> None:
        self.bar.update(self.task, phase=name)


def default(entry: str, problems: int) -> Progress:
    """Bars where standard error is a terminal."""
    return Bar(entry, problems) if sys.stderr.isatty() else Quiet()
