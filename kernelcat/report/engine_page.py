"""The page ``docs/results/engine.md``: tables of the engine, from results of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kernelcat.report.engine_sheets import fetch_sheet, interference_sheet
from kernelcat.report.render import NOTHING
from kernelcat.report.sheet import Sheet, markdown_cell
from kernelcat.runtime import gpu as gpus
from kernelcat.store.model_results import ModelResult

FILE = "engine.md"
_LEAD = (
    "What `kernelcat moe bench` measured of the engine beside other ways to serve the same "
    "requests, made of `tuning_db/engine/` by `make readme`. README has what it writes, and "
    "[measuring models](../measuring-models.md) says how to measure."
)


def markdown(results: Iterable[ModelResult]) -> str:
    """A section for each sort of table, and in it a table for each run, the newest first."""
    ordered = sorted(results, key=lambda each: each.created_at, reverse=True)
    ordered.sort(key=lambda each: (each.model, each.gpu))
    sections = [_section(ordered, *each) for each in _SECTIONS]
    parts = [f"# Results of the engine\n\n{_LEAD}\n", *filter(None, sections)]
    return "\n".join(parts if len(parts) > 1 else [*parts, f"{NOTHING}.\n"])


def _section(
    results: Sequence[ModelResult], title: str, part: str, sheet: Callable[[str, Any], Sheet]
) -> str:
    """The tables of a ``part`` of results; nothing where no result has it."""
    tables = []
    for each in results:
        if each.measured.get(part):
            name = f"{each.model} on {gpus.find(each.gpu).name}"
            weights = "random" if each.measured.get("has_random_weights") else "published"
            commit = f", commit {each.commit}" if each.commit else ""
            tables.append(
                f"### {markdown_cell(name)}\n\n{each.created_at}{commit}, {weights} weights.\n\n"
                + sheet(name, each.measured[part]).markdown(each.command)
            )
    return "\n".join([f"## {title}\n", *tables]) if tables else ""


_SECTIONS: tuple[tuple[str, str, Callable[[str, Any], Sheet]], ...] = (
    ("A prefix from host memory", "fetch", fetch_sheet),
    ("Prompts and decoding on a GPU each", "interference", interference_sheet),
)
"""Title of a section, the part of results that it shows, and its table."""
