"""Speeds of the engine that come with the package: ``tuning_db/engine/``, a line for each run.

A line has ``decoding`` as ``kernelcat moe bench --json`` prints it, and what that leaves out: the
model, the SKU, the day, and a note on weights and settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcat import paths
from kernelcat.errors import InvalidArgument


@dataclass(frozen=True)
class EngineRun:
    """One run of ``moe bench``.

    Attributes
    ----------
    gpu : SKU
    created_at : the day
    note : weights and settings, in words
    decoding : for each batch ``engine`` (kernelcat or a peer), ``batch``, ``context``,
        ``tokens_per_second`` and ``step_ms`` (milliseconds a step)
    """

    model: str
    gpu: str
    created_at: str
    note: str
    decoding: Sequence[Mapping[str, Any]]


def read(path: Path) -> list[EngineRun]:
    """The runs in a file; raises ``InvalidArgument`` for a file of another form."""
    try:
        return [EngineRun(**json.loads(line)) for line in path.read_text().splitlines()]
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{path} has no runs of the engine: {error}") from error


def shipped() -> list[EngineRun]:
    """The runs that come with the package, by model, then from old to new."""
    files = sorted((paths.data("tuning_db") / "engine").glob("*.jsonl"))
    runs = (run for file in files for run in read(file))
    return sorted(runs, key=lambda run: (run.model, run.gpu, run.created_at))
