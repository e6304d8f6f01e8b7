"""Results of models: what `kernelcat moe bench` measured, one line a run.

``tuning_db/engine/nvidia-SKU.jsonl`` holds those that come with the package; README's sentence of
the engine is made from them. `kernelcat moe results` adds a file that `moe bench --out` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernelcat.errors import InvalidArgument
from kernelcat.store import ledger


@dataclass(frozen=True)
class ModelResult:
    """One run of `kernelcat moe bench`.

    Attributes
    ----------
    gpu : SKU
    model : its name
    command : the command line
    created_at : ISO 8601, UTC: a time, or the day alone
    is_served : whether loads came by HTTP
    measured : what ``--out`` wrote, without the server's address and the places of traces
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
            ``out`` is not what `moe bench` writes.
        """
        if not isinstance(out, Mapping) or not {"model", "decoding", "loads"} <= out.keys():
            raise InvalidArgument("this is no file that kernelcat moe bench --out has written")
        measured = {key: value for key, value in out.items() if key not in ("model", "url")}
        measured["profiles"] = [
            {key: value for key, value in profile.items() if key != "trace"}
            for profile in out.get("profiles", ())
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
