"""Profiles: the bytes that one cold launch of an implementation moved, as the hardware counted.

``tuning_db/profiles/nvidia-SKU.jsonl`` holds one line for every implementation and problem, under
the digest of the sources that ran, as receipts are; and one more for each configuration that was
asked for, where others are of the best. What a user profiles goes to a local file of the same
form. ``kernelcat.verify.profiler`` makes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.store import ledger
from kernelcat.verify.code_record import Case, is_todays


@dataclass(frozen=True)
class Counts:
    """What Nsight Compute counted, summed over the launches of one call. None: not counted here.

    Attributes
    ----------
    launches : kernels
    duration_us : their time under the profiler, which runs them one by one: no benchmark
    dram_read_bytes, dram_write_bytes : between L2 and device memory
    l2_bytes : everything L2 was asked for, between its own partitions too
    l2_read_bytes : what the SMs read from L2; a multicast load counts once
    sm_read_bytes : what arrived in the SMs from L2; a multicast load counts in each
    """

    launches: int
    duration_us: float
    dram_read_bytes: int
    dram_write_bytes: int
    l2_bytes: int | None = None
    l2_read_bytes: int | None = None
    sm_read_bytes: int | None = None


@dataclass(frozen=True)
class Profile:
    """One implementation's counts for one problem.

    Attributes
    ----------
    source : its digest when it ran
    problem, config : axis and tuning values
    asked : whether the configuration was asked for; else it was the best one known
    profiler : version of Nsight Compute
    created_at : ISO 8601, UTC
    """

    entry: str
    language: str
    variant: str
    source: str
    gpu: str
    problem: Mapping[str, Any]
    problem_name: str | None
    config: Mapping[str, Any]
    counts: Counts
    environment: Mapping[str, Any]
    profiler: str
    created_at: str
    asked: bool = False

    @staticmethod
    def from_json(line: str) -> Profile:
        values = json.loads(line)
        return Profile(**{**values, "counts": Counts(**values["counts"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def key(self) -> tuple[str, ...]:
        """What a newer profile replaces."""
        problem = Problem.of(self.entry, **self.problem).key
        asked = Config(self.config).key if self.asked else ""
        return self.gpu, self.entry, problem, self.language, self.variant, asked

    @property
    def stale(self) -> bool:
        """Whether the kernel runs other code today."""
        case = Case(Problem.of(self.entry, **self.problem), Config(self.config))
        name = f"{self.entry}/{self.language}/{self.variant}"
        return not is_todays(name, self.gpu, self.source, case)

    @property
    def overhead(self) -> float:
        """Bytes between L2 and device memory over the fewest that any kernel must move."""
        entry = catalog.entry(self.entry)
        least = entry.bytes_moved(Problem.of(self.entry, **self.problem))
        return (self.counts.dram_read_bytes + self.counts.dram_write_bytes) / least


def shipped_folder() -> Path:
    """Where the profiles that come with the package lie."""
    return ledger.shipped_folder("profiles")


def local_folder() -> Path:
    """Where this user's own lie: ``$KERNELCAT_PROFILES``, else the user's data folder."""
    return ledger.local_folder("profiles")


def read(folder: Path) -> list[Profile]:
    """Every profile in a folder, in file and line order."""
    return [Profile.from_json(line) for line in ledger.lines(folder)]


def write(folder: Path, profiles: Iterable[Profile]) -> None:
    """Merge ``profiles`` into the folder's files, the newest of each :attr:`Profile.key`."""
    ledger.write(folder, [*read(folder), *profiles])
