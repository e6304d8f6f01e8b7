"""Files of JSON Lines: first what all records share, then a line for each record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write(path: Path, shared: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file in one step, in a new folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text("".join(map(_line, (shared, *records))))
    temporary.replace(path)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all records share, and the records; ``ValueError`` for a file of another form."""
    shared, *records = map(json.loads, path.read_text().splitlines())
    return shared, records


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":")) + "\n"
