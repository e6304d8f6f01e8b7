"""How far a tune is: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from typing import Any, Protocol, Self

from kernelcat.tune.candidate import Candidate


class Progress(Protocol):
    """What the tuner tells while it works. Times are microseconds."""

    def problem(self, name: str, candidates: int) -> None: ...

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None: ...

    def phase(self, name: str) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Quiet:
    """Tells nobody."""

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
    """A progress bar: problem, candidates, best so far, failures, time left."""

    def __init__(self, entry: str, problems: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.entry, self.problems, self.number, self.failed = entry, problems, 0, 0
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
        self.task = self.bar.add_task(entry, total=None, best="", phase="starting")

    def problem(self, name: str, candidates: int) -> None:
        self.number += 1
        self.failed = 0
        title = f"{self.entry} {name} ({self.number}/{self.problems})"
        self.bar.reset(self.task, total=candidates, description=title, best="", phase="")

    def tried(self, candidate: Candidate, status: str, best_us: float | None) -> None:
        self.failed += status != "passed"
        self.bar.update(self.task, advance=1,
                        best=f"best {best_us:.2f} us" if best_us else "",
                        phase=f"{self.failed} failed" if self.failed else "")  # fmt: skip

    def phase(self, name: str) -> None:
        self.bar.update(self.task, phase=name)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def default(entry: str, problems: int) -> Progress:
    """A bar where standard error is a terminal."""
    return Bar(entry, problems) if sys.stderr.isatty() else Quiet()
