"""Profiles: the bytes that one cold call of an implementation moved, as the hardware counted.

``tuning_db/profiles/nvidia-SKU.jsonl`` holds one line for every implementation and problem, in the
best configuration, and one more line for each configuration that a user asked for. Like a receipt,
a profile names the digest of the sources that ran. What a user profiles goes to a local file of the
same form. :mod:`kernelcat.verify.profiler` makes profiles.
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
    """What Nsight Compute counted, summed over the launches of one call; None where not counted.

    Attributes
    ----------
    launches : number of kernels
    duration_us : time of the kernels under the profiler, which runs one at a time: no benchmark
    dram_read_bytes, dram_write_bytes : bytes between L2 and device memory
    l2_bytes : bytes of all requests to L2, traffic between the partitions of L2 included
    l2_read_bytes : bytes that the SMs read from L2; a multicast load counts once
    sm_read_bytes : bytes that arrived in the SMs from L2; a multicast load counts in each SM
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
    source : digest of the implementation that ran
    gpu : SKU
    problem, config : values of the axes, and of the tuning parameters
    environment : the machine and its compilers (:class:`kernelcat.runtime.environment.Environment`)
    profiler : version of Nsight Compute
    created_at : ISO 8601, UTC
    asked : whether the user asked for this configuration; else it was the best known one
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
        """A newer profile replaces the one with the same key."""
        problem = Problem.of(self.entry, **self.problem).key
        config = Config(self.config).key if self.asked else ""
        return self.gpu, self.entry, problem, self.language, self.variant, config

    @property
    def stale(self) -> bool:
        """Whether the implementation runs other code today."""
        case = Case(Problem.of(self.entry, **self.problem), Config(self.config))
        name = f"{self.entry}/{self.language}/{self.variant}"
        return not is_todays(name, self.gpu, self.source, case)

    @property
    def overhead(self) -> float:
        """Bytes between L2 and device memory, over the bytes that any kernel must move."""
        entry = catalog.entry(self.entry)
        min_bytes = entry.bytes_moved(Problem.of(self.entry, **self.problem))
        return (self.counts.dram_read_bytes + self.counts.dram_write_bytes) / min_bytes


def shipped_folder() -> Path:
    """Folder of the profiles that come with the package."""
    return ledger.shipped_folder("profiles")


def local_folder() -> Path:
    """Folder of this user's profiles: ``$KERNELCAT_PROFILES``, else the user's data folder."""
    return ledger.local_folder("profiles")


def read(folder: Path) -> list[Profile]:
    """Every profile in a folder, in file and line order."""
    return ledger.read(folder, Profile.from_json)


def write(folder: Path, profiles: Iterable[Profile]) -> None:
    """Merge ``profiles`` into the folder's files; the last profile of each key stays."""
    ledger.merge(folder, profiles, Profile.from_json)
