"""The options of a tune."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernelcat.bench.states import TUNED
from kernelcat.bench.timer import REGIMES
from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.runtime.devices import Devices
from kernelcat.store.races import LADDER
from kernelcat.tune import backend as backends
from kernelcat.tune.progress import Progress
from kernelcat.tune.supervisor import Limits

if TYPE_CHECKING:
    from kernelcat.store import Store

LOCAL = "local"


@dataclass(frozen=True)
class Options:
    """How to tune. Every field is an argument of :func:`kernelcat.tune.tune`."""

    gpu: str | None = None
    devices: Devices | None = None
    problems: Sequence[str | Problem] | None = None
    languages: Sequence[str] | None = None
    variants: Sequence[str] | None = None
    budget_s: float | None = None
    strategy: str = "auto"
    trials: int | None = None
    regimes: Sequence[str] = REGIMES
    states: Sequence[str] = TUNED
    peers: bool = True
    fresh: bool = False
    store: Store | None = None
    progress: Progress | None = None
    backend: str = backends.CUDA
    limits: Limits = field(default_factory=Limits)
    processes: int | None = None
    executor: str = LOCAL
    address: str | None = None

    def covers(self, implementation: Implementation) -> bool:
        """Whether the tune is for this implementation's language and variant."""
        return (self.languages is None or implementation.language in self.languages) and (
            self.variants is None or implementation.variant in self.variants
        )

    def command(self, *words: str) -> str:
        """The command line that continues an interrupted ``kernelcat`` with ``words``."""
        line = ["kernelcat", *words]
        line += [f"--executor {self.executor}"] if self.executor != LOCAL else []
        line += [f"--address {self.address}"] if self.address else []
        line += [f"--gpu {self.gpu}"] if self.gpu else []
        if self.devices == "all":
            line.append("--device all")
        elif self.devices is not None:
            line += [f"--device {number}" for number in self.devices]
        for problem in self.problems or ():
            line += [f"--problem {problem}"] if isinstance(problem, str) else []
        if words[0] == "tune":
            line += [f"--strategy {self.strategy}"] if self.strategy != "auto" else []
            line += [f"--trials {self.trials}"] if self.trials else []
        flags = {"--language": self.languages, "--variant": self.variants}
        if LADDER not in self.states:
            flags |= {"--regime": self.regimes} if self.regimes != REGIMES else {}
            flags |= {"--state": self.states} if self.states != TUNED else {}
        for flag, values in flags.items():
            line += [f"{flag} {value}" for value in values or ()]
        return " ".join(line)
