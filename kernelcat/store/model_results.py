"""Results of models: what `kernelcat moe bench` measured, one line a run.

``tuning_db/engine/nvidia-SKU.jsonl`` holds those that come with the package; README's sentence of
the engine, ``docs/results/engine.md`` and the site's page of the engine are made from them.
`kernelcat moe results` adds a file that `moe bench --out` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from kernelcat.errors import InvalidArgument
from kernelcat.runtime.gpu import SKUS
from kernelcat.store import ledger

_FETCH = (
    "num_tokens", "recomputed_ms", "shared_ms", "fetched_ms", "speedup", "num_bytes", "bandwidth",
)  # fmt: skip
_TRAFFIC = ("batch", "context", "num_tokens", "prompt_tokens", "rate")
_ENGINES = ("colocated", "disaggregated")
"""What ``--disaggregate`` measures under each traffic."""


@dataclass(frozen=True)
class ModelResult:
    """One run of `kernelcat moe bench`.

    Attributes
    ----------
    gpu : SKU, or GPUs together (``h200x2-nvlink``)
    model : its name
    command : the command line
    created_at : ISO 8601, UTC: a time, or the day alone
    is_served : whether loads came by HTTP
    measured : what ``--out`` wrote, without the server's address and the places of traces: the
        part ``interference`` by ``--disaggregate``, else ``decoding``, ``prefill``, ``fetch``,
        ``loads`` and others
    commit : of kernelcat's sources; "" where unknown
    versions : package -> version, as far as known
    """

    gpu: str
    model: str
    command: str
    created_at: str
    is_served: bool
    measured: Mapping[str, Any]
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        gpu: str, command: str, created_at: str, out: Mapping[str, Any], commit: str = "",
        versions: Mapping[str, str] | None = None,
    ) -> ModelResult:  # fmt: skip
        """The result in the content of a file of ``--out``.

        Raises
        ------
        InvalidArgument
            ``out`` is not what `moe bench` writes, or lacks an engine that should stand beside
            another one, or ``gpu`` is one GPU where two were measured.
        """
        if not isinstance(out, Mapping) or not any(
            {"model", *parts} <= out.keys() for parts in (("decoding", "loads"), ("interference",))
        ):
            raise InvalidArgument("this is no file that kernelcat moe bench --out has written")
        if "interference" in out:
            _check_interference(out["interference"])
            if gpu in SKUS:
                raise InvalidArgument(
                    f"{gpu} is one GPU, and --disaggregate takes two: {gpu}x2-nvlink"
                )
        if out.get("fetch") is not None and not _has_numbers(out["fetch"], _FETCH):
            raise InvalidArgument(f"fetch must have the numbers {', '.join(_FETCH)}")
        measured = {key: value for key, value in out.items() if key not in ("model", "url")}
        if "profiles" in out:
            measured["profiles"] = [
                {key: value for key, value in profile.items() if key != "trace"}
                for profile in out["profiles"]
            ]
        return ModelResult(
            gpu, out["model"], command, created_at, "url" in out, measured, commit, versions or {}
        )

    @staticmethod
    def from_json(line: str) -> ModelResult:
        return ModelResult(**json.loads(line))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def key(self) -> tuple[str, ...]:
        """A newer result of a command replaces the older one."""
        return self.gpu, self.model, self.command


def shipped_folder() -> Path:
    """Folder of the results that come with the package."""
    return ledger.shipped_folder("engine")


def read(folder: Path) -> list[ModelResult]:
    """Every result in a folder, in file and line order."""
    return ledger.read(folder, ModelResult.from_json)


def write(folder: Path, results: Iterable[ModelResult]) -> None:
    """Merge ``results`` into the folder's files."""
    ledger.merge(folder, results, ModelResult.from_json)


def _check_interference(runs: Any) -> None:
    """Raises ``InvalidArgument`` unless both engines were measured under each traffic."""
    if not isinstance(runs, list) or not runs or not all(map(_is_interference, runs)):
        raise InvalidArgument("interference must have the times of engines, and has not")
    found = [(run["engine"], run["traffic"]) for run in runs]
    for _, traffic in found:
        if missing := [name for name in _ENGINES if (name, traffic) not in found]:
            raise InvalidArgument(
                f"batch {traffic['batch']} has no times of {missing[0]}: the run has ended early"
            )


def _is_interference(run: Any) -> bool:
    """Whether ``run`` has what tables show of an engine beside which prompts arrive."""
    return (
        _has_numbers(run, ("ratio",))
        and run.get("engine") in _ENGINES
        and _has_numbers(run.get("traffic"), _TRAFFIC)
        and all(_has_numbers(run.get(name), ("p50", "p99")) for name in ("idle_ms", "loaded_ms"))
        and (run.get("prompt_ms") is None or _has_numbers(run["prompt_ms"], ("p50",)))
    )


def _has_numbers(part: Any, names: Iterable[str]) -> bool:
    return isinstance(part, Mapping) and all(
        isinstance(part.get(name), int | float) and isfinite(part[name]) for name in names
    )
