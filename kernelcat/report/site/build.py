"""Makes the site: an overview, pages of entries, SKUs, techniques, and how numbers are made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kernelcat import catalog
from kernelcat.report import predictions
from kernelcat.report.board import board, in_catalog, published
from kernelcat.report.site import audits, engine, techniques
from kernelcat.report.site.entry import entry_page
from kernelcat.report.site.markup import filename
from kernelcat.report.site.numbers import numbers_page
from kernelcat.report.site.overview import gpu_page, lines, overview_page
from kernelcat.store import Measurement
from kernelcat.store.audits import Audit
from kernelcat.store.history import past_races
from kernelcat.store.model_results import ModelResult
from kernelcat.store.random_races import RandomRaces
from kernelcat.verify import code_record
from kernelcat.verify.profiles import Profile


def pages(
    measurements: Sequence[Measurement],
    profiles: Sequence[Profile] = (),
    compiled: Iterable[tuple[str, str]] = (),
    checked: Iterable[tuple[str, str]] = (),
    random: Sequence[RandomRaces] = (),
    history: Iterable[Measurement] = (),
    engines: Sequence[ModelResult] = (),
    predicted: Sequence[predictions.Audit] = (),
    tunes: Sequence[Audit] = (),
    is_current: Callable[[Measurement], bool] = code_record.is_current,
    doubt: Callable[[Measurement], str | None] = lambda row: None,
) -> dict[str, str]:
    """File name -> content of every page.

    Parameters
    ----------
    measurements : rows of all races; the newest race of each problem is shown
    compiled : entry and SKU of recorded machine code
    checked : entry and SKU of receipts that hold
    random : races on random problems
    history : winners and peers of earlier races
    engines : results of models
    predicted : cost models judged by races
    tunes : audits of tunes
    is_current : whether a row timed the code that runs today
    doubt : why a row cannot be true, or None; such a row is left out
    """
    rows = published(board(measurements, regime=None, is_current=is_current, doubt=doubt))
    by_entry, raced, by_gpu = defaultdict(list), defaultdict(list), defaultdict(list)
    for row in rows:
        by_entry[row.entry].append(row)
    for measurement in measurements:
        if doubt(measurement) is None:
            raced[measurement.entry].append(measurement)
            by_gpu[measurement.gpu].append(measurement)
    past = defaultdict(list)
    sound = (row for row in (*history, *measurements) if doubt(row) is None)
    for race in past_races(sound):
        if in_catalog(race):
            past[race.winner.entry].append(race)
    listed = lines(rows, compiled, checked)
    made = {
        "index.html": overview_page(listed, engine.FILE if engines else None),
        "numbers.html": numbers_page(audits.overview_part(predicted, tunes)),
        techniques.FILE: techniques.techniques_page(),
    }
    gpus = sorted({line.gpu for line in listed})
    if engines:
        made[engine.FILE] = engine.engine_page(engines, gpus)
    for gpu in gpus:
        mine = [line for line in listed if line.gpu == gpu]
        made[filename("gpu", gpu)] = gpu_page(gpu, mine, by_gpu[gpu])
    for name in sorted(set(catalog.names())):
        counted = [profile for profile in profiles if profile.entry == name]
        drawn = [races for races in random if races.entry == name]
        judged = audits.entry_part(
            [each for each in predicted if each.entry == name],
            [each for each in tunes if each.entry == name],
        )
        made[filename("entry", name)] = entry_page(
            name, by_entry[name], raced[name], counted, drawn, past[name], judged, is_current
        )
    return made


def write(folder: Path, made: Mapping[str, str]) -> list[Path]:
    """Write pages into ``folder``, which is made where its parent is there.

    Raises
    ------
    OSError
        The folder or a file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    for file, content in made.items():
        (folder / file).write_text(content, encoding="utf-8")
    return [folder / file for file in made]
