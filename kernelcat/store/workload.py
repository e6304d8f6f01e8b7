"""Workloads: the problems that programs called, with counts and times, as JSON Lines.

A file has one line for each problem, GPU and kernel that served the problem. Many processes may add
to one file: whoever adds holds a file lock, reads the file, and replaces it in one step.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kernelcat.catalog.spec import AxisValue, Problem
from kernelcat.errors import StoreError

LOCK_TIMEOUT_S = 10.0
"""Seconds to wait for other processes that add to the same file."""

Basis = Literal["measured", "scaled", "predicted"]
"""What a time rests on: a measurement of the problem; a measurement of another problem, times the
ratio of the cost model's two estimates; or the estimate alone."""


@dataclass(frozen=True)
class Use:
    """How often one kernel served one problem on GPUs of one SKU.

    Attributes
    ----------
    problem : values of the axes
    gpu : SKU
    served, config : the implementation and its configuration
    why : why it served (:class:`kernelcat.call.choice.Decision`)
    us, basis : device time of one call in microseconds, and what it rests on
    calls : number of calls, without those that a CUDA graph captured
    captured : number of calls that CUDA graphs captured; nobody counts how often a graph runs
    """

    entry: str
    problem: Mapping[str, AxisValue]
    gpu: str
    served: str
    config: Mapping[str, AxisValue]
    why: str
    us: float
    basis: Basis
    calls: int = 0
    captured: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the line: all fields but counts and times."""
        return (
            self.gpu,
            self.entry,
            _text(self.problem),
            self.served,
            _text(self.config),
            self.why,
        )

    @property
    def asked(self) -> Problem:
        """The problem; it may be of another version of the specification."""
        return Problem.of(self.entry, **self.problem)

    def cost_us(self, replays: int = 1) -> float:
        """Device time of all calls in microseconds; each captured call counts ``replays`` times."""
        return (self.calls + self.captured * replays) * self.us


def read(path: Path) -> list[Use]:
    """The lines of a file, in order of their cost, the largest first.

    Raises
    ------
    StoreError
        The file cannot be read, or has a line that is no use of a problem.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read the workload {path} ({_reason(error)})") from error
    return merged(_parse(path, number, line) for number, line in enumerate(lines, 1))


def add(path: Path, uses: Iterable[Use]) -> None:
    """Add counts to a file, which is made if it is missing; a newer time replaces an older one.

    Raises
    ------
    StoreError
        The file cannot be read or written, another process keeps it locked, or it is no workload.
    """
    from filelock import FileLock, Timeout  # not on the path of calls

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S):
            _write(path, merged([*(read(path) if path.exists() else ()), *uses]))
    except Timeout as error:
        raise StoreError(f"another process keeps {path}.lock locked") from error
    except OSError as error:
        raise StoreError(f"cannot write the workload {path} ({_reason(error)})") from error


def merged(uses: Iterable[Use]) -> list[Use]:
    """One use for each key with the sum of the counts, in order of cost, the largest first."""
    found: dict[tuple[str, ...], Use] = {}
    for use in uses:
        known = found.get(use.key)
        if known is not None:
            use = replace(
                use, calls=known.calls + use.calls, captured=known.captured + use.captured
            )
        found[use.key] = use
    return sorted(found.values(), key=lambda use: (-use.cost_us(), use.key))


def shares(uses: Iterable[Use]) -> list[float]:
    """For each use, its part of the cost of all uses on the same SKU (0 to 1)."""
    uses, totals = list(uses), defaultdict[str, float](float)
    for use in uses:
        totals[use.gpu] += use.cost_us()
    return [use.cost_us() / totals[use.gpu] if totals[use.gpu] else 0.0 for use in uses]


def _write(path: Path, uses: list[Use]) -> None:
    """Write a file in one step; ``share`` is for people, and not read again."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    rows = ({**asdict(u), "share": round(s, 4)} for u, s in zip(uses, shares(uses), strict=True))
    temporary.write_text("".join(f"{_text(row)}\n" for row in rows), encoding="utf-8")
    temporary.replace(path)


def _parse(path: Path, number: int, line: str) -> Use:
    try:
        fields = json.loads(line)
        fields.pop("share", None)
        use = Use(**fields)
        texts = (use.entry, use.gpu, use.served, use.why, use.basis)
        maps = (use.problem, use.config)
        if not (all(isinstance(t, str) for t in texts) and all(isinstance(m, dict) for m in maps)):
            raise TypeError("a field has another type")
        if not (use.calls >= 0 and use.captured >= 0 and 0 <= use.us < math.inf):
            raise ValueError("a count or a time is out of range")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path}:{number} is no line of a workload: {error}") from error
    return use


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
