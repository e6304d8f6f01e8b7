"""Tables between markers in a Markdown file, made from the results in ``tuning_db/``.

A block stands between ``<!-- KIND:... -->`` and ``<!-- /KIND -->``. These are the opening markers:

- ``leaderboard:ENTRY:GPU``, optionally followed by ``:REGIME`` (default ``graph``), then ``:STATE``
  (default: the state that decides calls), then ``:PATTERN`` for the names of problems;
- ``ladder:ENTRY:GPU:PROBLEM``;
- ``profile:ENTRY:GPU``, optionally followed by ``:PROBLEM``;
- ``results:ENTRY``, everything that was measured of an entry: a section for each GPU, regime and
  thermal state, ladders, and the bytes that the hardware counted;
- ``summary:GPU``, one line for each entry;
- ``engine:GPU:MODEL``, how fast the engine runs a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from pathlib import Path

from kernelcat.errors import InvalidArgument
from kernelcat.report import engine, missing_peers, summary, traffic
from kernelcat.report.board import board, published
from kernelcat.report.ladder import ladders, sheet
from kernelcat.report.render import NOTHING, to_markdown
from kernelcat.runtime.gpu import SKUS
from kernelcat.store import Measurement, model_results, shipped
from kernelcat.store.measurement import REGIMES
from kernelcat.verify import profiles

_BLOCK = re.compile(
    r"(?P<open><!-- (?P<kind>leaderboard|ladder|profile|results|summary|engine):"
    r"(?P<words>[^\s>]+) -->)"
    r".*?(?P<close><!-- /(?P=kind) -->)",
    re.DOTALL,
)


def render_readme(text: str, measurements: Iterable[Measurement]) -> str:
    """``text`` with every block replaced by its current table.

    Raises
    ------
    InvalidArgument
        A marker has too few or too many words.
    """
    rows = list(measurements)

    def fill(block: re.Match[str]) -> str:
        filler = _FILLERS[block["kind"]]
        try:
            bound = signature(filler).bind(rows, *block["words"].split(":"))
        except TypeError as error:
            raise InvalidArgument(f"{block['open']} is no marker: see {__name__}") from error
        return f"{block['open']}\n{filler(*bound.args)}{block['close']}"

    return _BLOCK.sub(fill, text)


def update_readme(path: str | Path, measurements: Iterable[Measurement] | None = None) -> bool:
    """Replace the blocks of a file by tables; returns whether the file changed.

    ``measurements`` are those in ``tuning_db/`` by default.

    Raises
    ------
    InvalidArgument
        The file has no block, or a marker has too few or too many words.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    if not _BLOCK.search(text):
        raise InvalidArgument(
            f"{path} has no leaderboard: add <!-- leaderboard:ENTRY:GPU --> and "
            "<!-- /leaderboard --> where it belongs"
        )
    new = render_readme(text, shipped() if measurements is None else measurements)
    if new != text:
        path.write_text(new, encoding="utf-8")
    return new != text


def _leaderboard(
    rows: Sequence[Measurement],
    entry: str,
    gpu: str,
    regime: str = "graph",
    state: str | None = None,
    problem: str = "*",
) -> str:
    selected = board(rows, gpu, entry, regime, state, problem)
    return to_markdown(selected, "" if problem == "*" else f" --problem '{problem}'")


def _ladder(rows: Sequence[Measurement], entry: str, gpu: str, problem: str) -> str:
    selected = ladders(rows, entry, gpu, problem)
    return (
        "\n".join(sheet(each, code="`").markdown(each.command) for each in selected)
        or f"{NOTHING}.\n"
    )


def _profile(_: Sequence[Measurement], entry: str, gpu: str, problem: str | None = None) -> str:
    selected = [
        profile
        for profile in profiles.read(profiles.shipped_folder())
        if (profile.entry, profile.gpu) == (entry, gpu) and problem in (None, profile.problem_name)
    ]
    command = f"kernelcat profile {entry}" + (f" --problem {problem}" if problem else "")
    return traffic.sheet(selected).markdown(command) if selected else f"{NOTHING}.\n"


def _results(rows: Sequence[Measurement], entry: str) -> str:
    mine = [row for row in rows if row.entry == entry]
    sections = []
    for gpu in sorted({row.gpu for row in mine}):
        name = SKUS[gpu].name if gpu in SKUS else gpu
        for (regime, state), title in _SECTIONS.items():
            raced = published(board(mine, gpu, entry, regime, state))
            selected = [row for row in raced if row.kind == "measured"]
            if selected:
                sections.append(f"## {name}, {title}\n\n{to_markdown(selected)}")
        for each in ladders(mine, entry, gpu):
            title = f"## {name}, the ladder of {each.problem_name or each.problem}"
            sections.append(
                f"{title}\n\n{sheet(each, code='`').markdown(each.command + ' --measure')}"
            )
        counted = _profile(mine, entry, gpu)
        if not counted.startswith(NOTHING):
            sections.append(f"## {name}, bytes that the hardware counted\n\n{counted}")
    lines = missing_peers.markdown(mine)
    if lines:
        sections.append(f"## Without a peer\n\n{lines}")
    return "\n".join(sections) or f"{NOTHING}.\n"


def _summary(rows: Sequence[Measurement], gpu: str) -> str:
    return summary.markdown(rows, gpu)


def _engine(_: Sequence[Measurement], gpu: str, model: str) -> str:
    return engine.markdown(model_results.read(model_results.shipped_folder()), gpu, model)


_SECTIONS = {
    (REGIMES[0], "sustained"): "a warm chip (sustained)",
    (REGIMES[0], "burst"): "a cool chip (burst)",
    (REGIMES[1], "sustained"): "a warm chip, host time included (eager)",
    (REGIMES[1], "burst"): "a cool chip, host time included (eager)",
}
"""Regime and thermal state -> the heading of their table."""

_FILLERS: dict[str, Callable[..., str]] = {
    "leaderboard": _leaderboard,
    "ladder": _ladder,
    "profile": _profile,
    "results": _results,
    "summary": _summary,
    "engine": _engine,
}
