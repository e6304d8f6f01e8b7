"""Results in and out of a database: JSON Lines, reviewed like code, and never code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kernelcat.errors import StoreError
from kernelcat.store.database import Store
from kernelcat.store.lines import Refusals, read_all, read_lines, write_lines
from kernelcat.store.measurement import Measurement
from kernelcat.store.races import Race, newest_races

_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True)
class ImportReport:
    """What an import did: rows added, rows that were known, and ``(line, reason)`` refusals."""

    added: int
    known: int
    refused: Refusals = ()


@dataclass(frozen=True)
class Conflict:
    """Two databases disagree about the winner of one problem. ``str()`` is the line to print."""

    ours: Race
    theirs: Race
    kept: Race
    reason: str

    def __str__(self) -> str:
        key = self.ours.key
        problem = self.ours.winner.problem_name or key.problem
        return (
            f"{key.entry} {problem} on {key.gpu} ({key.regime}, {key.state}): "
            f"ours {_shown(self.ours)}, theirs {_shown(self.theirs)}; "
            f"kept {'ours' if self.kept is self.ours else 'theirs'}: {self.reason}"
        )


@dataclass(frozen=True)
class MergeReport:
    """Rows added and known, and the conflicts with how each was resolved."""

    added: int
    known: int
    conflicts: tuple[Conflict, ...] = field(default=())


def export(store: Store, path: str | Path, *, gpu: str | None = None, shipped: bool = True) -> int:
    """Write measurements as JSON Lines in a stable order; how many.

    Parameters
    ----------
    gpu : only rows of this SKU
    shipped : for ``tuning_db/``: of every problem's newest race, the best configuration of each
        language and variant, and the peers. What ``path`` already holds is kept where it is
        newer or about something else. Otherwise every row, failures included: a backup.

    Raises
    ------
    StoreError
        ``path`` cannot be written, or holds something else; it is then as before.
    """
    path = Path(path)
    if shipped:
        held = read_all(path) if path.exists() else []
        found = store.winners(gpu=gpu, regime=None)
        rows = reduce([*held, *(row for race in found for row in race.measurements)])
    else:
        rows = store.rows(gpu=gpu)
    _write(path, write_lines(sorted(rows, key=_place)))
    return len(rows)


def reduce(rows: Iterable[Measurement]) -> list[Measurement]:
    """The rows worth shipping: newest races; predictions only where nothing was measured."""
    found = newest_races(rows)
    measured = {(r.key.gpu, r.key.entry, r.key.problem) for r in found if r.key.kind == "measured"}
    return [
        row
        for race in found
        if race.key.kind == "measured" or race.key[:3] not in measured
        for row in race.measurements
    ]


def import_(store: Store, path: str | Path, *, partial: bool = False) -> ImportReport:
    """Add the rows of a JSON Lines file. All or nothing, unless ``partial`` skips bad lines."""
    rows, refused = read_lines(Path(path))
    if refused and not partial:
        return ImportReport(0, 0, refused)
    added = store.add(rows)
    return ImportReport(added, len(rows) - added, refused)


def merge(store: Store, other: str | Path) -> MergeReport:
    """Add the rows of another database or JSON Lines file, and tell where winners differed.

    Medians of different runs are never compared. A race is better evidence than a screening, then
    the newer run, which saw newer kernels and rivals, then the one with more samples. This is how
    :meth:`Store.winners` chooses at all times; a merge prints it.
    """
    theirs = _rows_of(other)
    before = {race.key: race for race in store.winners(regime=None)}
    added = store.add(theirs)
    after = {race.key: race for race in store.winners(regime=None)}
    conflicts = [
        _resolve(before[race.key], race, after[race.key].run)
        for race in newest_races(theirs)
        if race.key in before and _name(before[race.key].winner) != _name(race.winner)
    ]
    return MergeReport(added, len(theirs) - added, tuple(conflicts))


def _rows_of(other: str | Path) -> list[Measurement]:
    text = str(other)
    if "://" not in text and not _is_sqlite(Path(text)):
        return read_all(Path(text))
    with Store.open(text, create=False) as store:
        return store.rows()


def _is_sqlite(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise StoreError(f"cannot read {path} ({error.strerror})") from error


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old one or the new one."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="ascii",
                                         prefix=f".{path.name}.") as file:  # fmt: skip
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary:
            temporary.unlink(missing_ok=True)
        raise StoreError(
            f"cannot write {path} ({error.strerror}): free some space or export to another folder"
        ) from error


def _place(row: Measurement) -> tuple[str, ...]:
    """The order of lines. It has no times in it, so that a new tune changes lines in place."""
    return (
        row.gpu,
        row.entry,
        row.problem_key,
        row.kind,
        row.regime,
        row.state,
        "1" if row.is_peer else "0",
        row.language,
        row.variant,
        row.config_key,
        row.created_at,
        row.digest,
    )


def _name(row: Measurement) -> tuple[str, str, str]:
    return row.language, row.variant, row.config_key


def _shown(race: Race) -> str:
    row = race.winner
    return f"{row.language}/{row.variant} {row.median_us:.4g} us"


def _resolve(ours: Race, theirs: Race, kept_run: str) -> Conflict:
    kept, other = (theirs, ours) if kept_run == theirs.run else (ours, theirs)
    days = f"{kept.created_at[:16]} against {other.created_at[:16]}"
    samples = f"{kept.winner.samples} against {other.winner.samples} samples"
    return Conflict(ours, theirs, kept, f"{days}, {samples}{_rematch(kept, other.winner)}")


def _rematch(race: Race, loser: Measurement) -> str:
    """How the other side's winner did in this very race, where it took part."""
    for row in race.rows:
        if _name(row) == _name(loser):
            ratio = (row.median_us or 0) / (race.winner.median_us or 1)
            return f", which the other lost {ratio:.3f}x slower"
    return ""
