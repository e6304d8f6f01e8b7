"""Import, export and merge of results as JSON Lines, which are data and are never executed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelcat.errors import StoreError
from kernelcat.store import history as history_of
from kernelcat.store import origin
from kernelcat.store.database import Store
from kernelcat.store.lines import File, Refusals, read_all, write_lines
from kernelcat.store.location import locate
from kernelcat.store.measurement import Measurement
from kernelcat.store.plausibility import check
from kernelcat.store.races import Race, newest_races

_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes
    ----------
    added : number of new rows
    known : number of rows that the database had before
    refused : line number and reason of each refused line
    """

    added: int
    known: int
    refused: Refusals = ()


@dataclass(frozen=True)
class Conflict:
    """Two databases have different winners of one problem. ``str()`` is the line to print.

    Attributes
    ----------
    ours, theirs : the newest race in each database
    kept : the race that decides after the merge: ``ours`` or ``theirs``
    reason : dates and samples of both races
    """

    ours: Race
    theirs: Race
    kept: Race
    reason: str

    def __str__(self) -> str:
        key = self.ours.key
        problem = self.ours.winner.problem_name or key.problem
        return (
            f"{key.entry} {problem} on {key.gpu} ({key.regime}, {key.state}): "
            f"ours {_winner_text(self.ours)}, theirs {_winner_text(self.theirs)}; "
            f"kept {'ours' if self.kept is self.ours else 'theirs'}: {self.reason}"
        )


@dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes
    ----------
    added : number of new rows
    known : number of rows that the database had before
    conflicts : problems whose winners differ
    refused : number and reason of each invalid or doubtful line or row
    """

    added: int
    known: int
    conflicts: tuple[Conflict, ...] = ()
    refused: Refusals = ()


def export(
    store: Store,
    path: str | Path,
    *,
    gpu: str | None = None,
    shipped: bool = True,
    onto: str | Path | None = None,
    history: str | Path | None = None,
) -> int:
    """Write measurements as JSON Lines in a stable order; returns the number of rows.

    ``path`` is replaced and never read.

    Parameters
    ----------
    gpu : only rows of this SKU
    shipped : True for ``tuning_db/``: the best configuration of each variant, and the peers, from
        the newest race of every problem. False for a backup: every row, failures included.
    onto : a file of results that are written too, where they are newer or of another problem
    history : a file that also gets the winners and the fastest peers of races that the races in
        ``path`` replace (:mod:`kernelcat.store.history`); what it has stays

    Raises
    ------
    StoreError
        A file cannot be written, or ``onto`` or ``history`` cannot be read or holds something else
        than results; ``path`` is unchanged.
    """
    if shipped:
        old = read_all(Path(onto)) if onto is not None else []
        if history is not None:
            past = read_all(Path(history)) if Path(history).exists() else []
            past += [*old, *store.best_rows(gpu=gpu)]
        races = store.winners(gpu=gpu, regime=None)
        rows = reduce([*old, *(row for race in races for row in race.measurements)])
        if history is not None:
            replaced = sorted(history_of.replaced(past, rows), key=_sort_key)
            _write(Path(history), write_lines(replaced))
    else:
        rows = store.rows(gpu=gpu)
    _write(Path(path), write_lines(sorted(rows, key=_sort_key)))
    return len(rows)


def reduce(rows: Iterable[Measurement]) -> list[Measurement]:
    """The rows of the newest races; predictions only of problems that were not measured."""
    races = newest_races(rows)
    measured = {(r.key.gpu, r.key.entry, r.key.problem) for r in races if r.key.kind == "measured"}
    return [
        row
        for race in races
        if race.key.kind == "measured" or race.key[:3] not in measured
        for row in race.measurements
    ]


class _NothingAdded(Exception):
    """A file has invalid lines, so the transaction that adds its rows must be undone."""


def import_(store: Store, path: str | Path, *, partial: bool = False) -> ImportReport:
    """Add the rows of a JSON Lines file, which is read line by line.

    A line is invalid too if its row cannot be true (:mod:`kernelcat.store.plausibility`). If a line
    is invalid, nothing is added; with ``partial`` the other lines are. Raises
    ``StoreError`` if the file cannot be read or is a database, or the database cannot be written.
    """
    if _is_sqlite(Path(path)):
        raise StoreError(f"{path} is a database: kernelcat db merge {path} adds its rows")
    file = File(Path(path), origin.of_file(Path(path).absolute()), check)

    def rows() -> Iterator[Measurement]:
        yield from file
        if file.refused and not partial:
            raise _NothingAdded

    try:
        added = store.add(rows())
    except _NothingAdded:
        return ImportReport(0, 0, tuple(file.refused))
    return ImportReport(added, file.num_rows - added, tuple(file.refused))


def merge(store: Store, other: str | Path) -> MergeReport:
    """Add the rows of another database or JSON Lines file, and report where the winners differ.

    The other file is not changed: a private copy of a database is read. Invalid rows and doubtful
    rows (:mod:`kernelcat.store.plausibility`) are refused, and all others are added. Medians of
    different runs are never compared. A race decides before a screening, a race that was measured
    here before an imported race, then the newer run (it has newer kernels and rivals), then the run
    with more samples. :meth:`Store.winners` always chooses in this way; a merge reports it.

    Raises
    ------
    StoreError
        ``other`` cannot be read, or the database cannot be written.
    """
    theirs, refused = _rows_of(other)
    before = {race.key: race for race in store.winners(regime=None)}
    added = store.add(theirs)
    after = {race.key: race for race in store.winners(regime=None)}
    conflicts = [
        _resolve(before[race.key], race, after[race.key].run)
        for race in newest_races(theirs)
        if race.key in before and _name(before[race.key].winner) != _name(race.winner)
    ]
    return MergeReport(added, len(theirs) - added, tuple(conflicts), refused)


def _rows_of(other: str | Path) -> tuple[list[Measurement], Refusals]:
    """The valid rows of a database or file, and the others."""
    text = str(other)
    name = origin.of_file(locate(text))
    if "://" not in text and not _is_sqlite(Path(text)):
        file = File(Path(text), name, check)
        return list(file), tuple(file.refused)
    with Store.open(text, create=False, as_copy=True) as store:
        rows, refused = store.valid_rows(check)
    return [origin.brought(row, name) for row in rows], refused


def _is_sqlite(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise StoreError(f"cannot read {path} ({error.strerror})") from error


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: a reader gets the old file or the new file."""
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


def _sort_key(row: Measurement) -> tuple[str, ...]:
    """Sort key of a line. Times come last, so that a new tune changes lines in place."""
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


def _winner_text(race: Race) -> str:
    row = race.winner
    return f"{row.language}/{row.variant} {row.median_us:.4g} us"


def _resolve(ours: Race, theirs: Race, kept_run: str) -> Conflict:
    kept, other = (theirs, ours) if kept_run == theirs.run else (ours, theirs)
    days = f"{kept.created_at[:16]} against {other.created_at[:16]}"
    samples = f"{kept.winner.samples} against {other.winner.samples} samples"
    here = "" if origin.is_imported(kept.origin) else "measured here, "
    reason = f"{here}{days}, {samples}{_loser_text(kept, other.winner)}"
    return Conflict(ours, theirs, kept, reason)


def _loser_text(race: Race, loser: Measurement) -> str:
    """How much slower the other database's winner was in ``race``; empty if it was not in it."""
    for row in race.rows:
        if _name(row) == _name(loser):
            ratio = (row.median_us or 0) / (race.winner.median_us or 1)
            return f"; in that race the other winner was {ratio:.3f}x slower"
    return ""
