"""What an export made: files by their path, and what it left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Export:
    """Files that another project reads.

    Attributes
    ----------
    files : path below the folder -> content
    left_out : entry and problem that the other format cannot hold -> why
    """

    files: dict[str, str] = field(default_factory=dict)
    left_out: dict[tuple[str, str], str] = field(default_factory=dict)

    def reasons(self) -> list[str]:
        """A line for each entry and reason: how many problems are left out, and one of them."""
        groups: dict[tuple[str, str], list[str]] = {}
        for (entry, problem), why in self.left_out.items():
            groups.setdefault((entry, why), []).append(problem)
        return [f"{entry}: {_some(names)}: {why}" for (entry, why), names in groups.items()]

    def write(self, folder: Path) -> list[Path]:
        """Write the files below ``folder``, which is made; raises ``OSError``."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        return [folder / name for name in self.files]


def _some(problems: Sequence[str]) -> str:
    first, count = problems[0], len(problems)
    return first if count == 1 else f"{count} problems, such as {first}"


def as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def as_lines(values: Iterable[Mapping[str, Any]]) -> str:
    """A line of JSON for each value."""
    return "".join(json.dumps(value) + "\n" for value in values)
