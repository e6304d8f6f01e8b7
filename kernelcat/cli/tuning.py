"""Verbs that measure, or predict for a GPU that this machine does not have: tune, bench, ladder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from kernelcat import catalog
from kernelcat.catalog.random_problems import draw
from kernelcat.catalog.spec import Problem
from kernelcat.cli import auditing
from kernelcat.cli.devices import devices
from kernelcat.cli.options import as_json, database, note_missing_languages, problem_names, seconds
from kernelcat.cli.output import echo, emit, note_missing_database, show
from kernelcat.errors import InvalidArgument, Unsupported

_OPTIONS = (
    click.option(
        "--gpu",
        help="SKU; by default this machine's GPU. For another SKU, times are predicted.",
    ),
    devices,
    click.option(
        "--executor", type=click.Choice(("local", "ray")),
        help="local: GPUs of this machine, the default. ray: GPUs of a running Ray cluster.",
    ),
    click.option(
        "--address", metavar="HOST:PORT",
        help="With --executor ray: where the cluster is; $RAY_ADDRESS or auto by default.",
    ),
    problem_names,
    click.option(
        "--language", "languages", multiple=True, help="Use only this language; may be repeated."
    ),
    click.option(
        "--variant", "variants", multiple=True,
        help="Use only this variant; may be repeated.",
    ),
    click.option("--budget", help="Time for all problems together: 90s, 10m or 1h."),
    click.option(
        "--regime", "regimes", multiple=True, type=click.Choice(("graph", "eager")),
        help="graph: device time. eager: host time included. Both by default.",
    ),
    click.option(
        "--state", "states", multiple=True, type=click.Choice(("burst", "sustained")),
        help="burst: cool chip. sustained: hot chip. Both by default.",
    ),
    click.option("--no-peers", is_flag=True, help="Race without peers (cuBLAS and others)."),
    click.option(
        "--db", "url",
        help="Path or SQLAlchemy URL of the database; $KERNELCAT_DB by default.",
    ),
    as_json,
)  # fmt: skip


def _auditing(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of an audit."""
    for option in reversed(auditing.options):
        command = option(command)
    return command


def _measuring(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that tune and bench share."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("entry", required=False)
@click.option(
    "--workload",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Tune the problems of this file, those that cost most first; ENTRY may be left out.",
)
@click.option(
    "--replays",
    type=click.IntRange(min=0),
    metavar="COUNT",
    help="With --workload: a call that a CUDA graph captured counts COUNT times; once by default.",
)
@click.option(
    "--random",
    "count",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="Tune COUNT random problems in place of the named ones: sizes of published models and "
    "around them.",
)
@click.option("--seed", help="With --random: a text from which the problems follow.")
@click.option(
    "--unusual", is_flag=True, help="With --random: sizes and options that no published model has."
)
@_measuring
@click.option(
    "--strategy",
    default="auto",
    help="Search strategy: auto, exhaustive, random, halving or tpe (a model that learns). With "
    "--audit: all of them, or those named, with commas between.",
)
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="Screen at most COUNT candidates of a problem.",
)
@click.option("--fresh", is_flag=True, help="Ignore earlier results, failures included.")
@_auditing
def tune(
    as_json: bool, entry: str | None, workload: Path | None, replays: int | None,
    count: int | None, seed: str | None, unusual: bool, audit: bool, path: Path | None,
    shipped: bool, **options: Any,
) -> None:  # fmt: skip
    """Find the fastest configurations of ENTRY.

    The fastest ones race with each other and with ENTRY's peers, and all results are stored. A tune
    that was stopped resumes when it is started again.

    \b
    Example:
      kernelcat tune gemm --problem 4096x4096x4096 --budget 2m
      kernelcat tune --workload workload.jsonl --budget 10m
      kernelcat tune paged_attn --random 20 --no-peers
      kernelcat tune gemm --audit --out audit.jsonl

    Progress goes to standard error: a bar on a terminal, elsewhere a line when a problem begins and
    one with its result when it ends.

    An entry of several ranks runs in a process for each rank, on all GPUs by default, and its rows
    have the GPUs' common name (h200x2-nvlink).
    With several GPUs of one SKU (--device all, or --executor ray with --gpu), each GPU screens and
    races one problem at a time.
    The environment variable KERNELCAT_RECORD makes a program write a workload.
    """
    from kernelcat import tune

    if seed is not None and count is None:
        raise InvalidArgument("--seed is for --random")
    if audit:
        more = {"workload": workload, "replays": replays, "random": count, **options}
        return auditing.run(entry, path, shipped, as_json, **more)
    if path is not None or shipped:
        raise InvalidArgument("--out and --shipped are for --audit")
    if workload is not None:
        if count is not None:
            raise InvalidArgument("--random does not go with --workload, which names the problems")
        return _tune_workload(workload, entry, replays, as_json, **options)
    if entry is None:
        raise click.UsageError("Missing argument 'ENTRY'; only --workload goes without it.")
    if replays is not None:
        raise InvalidArgument("--replays is for --workload")
    if count is not None:
        options["problems"] = _drawn(entry, seed, count, unusual, **options)
    if _has_ranks(entry):
        return _tune_ranks(as_json, entry=entry, **options)
    _measure(tune.tune, as_json, entry=entry, **options)


@click.command()
@click.argument("entry")
@_measuring
def bench(as_json: bool, **options: Any) -> None:
    """Race the best known configurations of ENTRY with its peers.

    An entry of several ranks runs in a process for each rank, on all GPUs by default, and races
    the best configuration of each variant; nothing is stored.

    \b
    Example:
      kernelcat bench gemm --problem 4096x4096x4096
      kernelcat bench all_reduce --problem 1x2880 --json
    """
    if _has_ranks(options["entry"]):
        return _race_ranks(as_json, **options)
    from kernelcat import tune

    _measure(tune.race_best_known, as_json, **options)


@click.command()
@click.argument("entries", metavar="ENTRY...", nargs=-1, required=True)
@click.option("--problem", help="Show only this problem.")
@click.option("--gpu", help="Show only this SKU.")
@click.option(
    "--measure",
    is_flag=True,
    help="First race every variant on this machine's GPU; needs --problem.",
)
@database
@as_json
def ladder(
    entries: tuple[str, ...],
    problem: str | None,
    gpu: str | None,
    measure: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Show the speedup of each variant of ENTRY.

    A ladder is one race of all variants, from the naive kernels on. Each variant is compared with
    the variant before. Times are in microseconds.

    \b
    Example:
      kernelcat ladder gemm multicast_gemm --problem 4096x4096x4096 --measure
    """
    from kernelcat import tune
    from kernelcat.report.board import load
    from kernelcat.report.ladder import ladders, sheet
    from kernelcat.runtime import gpu as gpus

    if measure and problem is None:
        raise InvalidArgument(
            "name a --problem to measure: naive kernels take seconds for large ones"
        )
    if measure:
        _say_what_is_missing(entries, ())
        for entry in entries:
            raced = _run(tune.ladder, url, entry, problems=[problem])
            reasons = [f"{name}: skipped, {why}" for name, why in raced.skipped.items()]
            for line in (*reasons, *raced.notes):
                echo(line, err=True)
    sku = gpus.find(gpu).sku if gpu else None
    shown = []
    for entry in entries:
        rows = load(sku, entry, "graph", url)
        shown += ladders(rows, entry, sku, problem)
    if url is None:
        note_missing_database()
    if as_json:
        return emit(shown)
    if not shown:
        echo("Nothing measured yet: give --problem and --measure.")
    for each in shown:
        show(sheet(each).console())


def _has_ranks(entry: str) -> bool:
    """Whether ``entry`` is one of several ranks; another backend's entries are not."""
    return entry in catalog.names() and catalog.entry(entry).ranks is not None


def _drawn(
    entry: str,
    seed: str | None,
    count: int,
    unusual: bool,
    problems: Sequence[str],
    **options: Any,
) -> list[Problem]:
    """The random problems of ``--random``. ``regret`` draws others: its seeds are commits."""
    if problems:
        raise InvalidArgument("--problem does not go with --random, which draws the problems")
    if _has_ranks(entry):
        raise InvalidArgument("--random is not for an entry of several ranks")
    return draw(catalog.entry(entry), seed or "tune", count, unusual)


_FOR_RANKS = ("problems", "devices", "languages", "variants", "no_peers")
"""Options that go with an entry of several ranks."""


def _ranks_of(entry: str, more: tuple[str, ...] = (), **options: Any) -> tuple[Any, ...]:
    """Implementations, problems, and numbers of GPUs that options name for several ranks.

    ``more`` names further options that may be given.
    """
    from kernelcat.runtime import driver
    from kernelcat.runtime.devices import numbers

    for name, value in options.items():
        if value and name not in _FOR_RANKS + more and (name, value) != ("strategy", "auto"):
            word = {"regimes": "regime", "states": "state", "url": "db"}.get(name, name)
            raise InvalidArgument(f"--{word} is not for an entry of several ranks")
    _say_what_is_missing([entry], options["languages"])
    languages, variants = options["languages"], options["variants"]
    chosen = [
        each for each in catalog.implementations(entry)
        if (not languages or each.language in languages)
        and (not variants or each.variant in variants)
    ]  # fmt: skip
    if not chosen:
        raise Unsupported(f"{entry} has no implementation with these languages and variants")
    specification = catalog.entry(entry)
    problems = [specification.named(name) for name in options["problems"]]
    problems = problems or list(specification.problems.values())
    return chosen, problems, numbers(options["devices"] or "all", driver.count())


def _race_ranks(as_json: bool, entry: str, **options: Any) -> None:
    """Race an entry of several ranks; nothing is stored."""
    from kernelcat.ranks import race

    chosen, problems, numbers = _ranks_of(entry, **options)
    raced = (race.run(chosen, each, numbers, not options["no_peers"]) for each in problems)
    rows = [row for each in raced for row in each.rows()]
    if as_json:
        return emit(rows)
    for row in rows:
        echo("  ".join(f"{name} {value}" for name, value in row.items()))


def _tune_ranks(as_json: bool, entry: str, **options: Any) -> None:
    """Tune an entry of several ranks."""
    from kernelcat.ranks.tune import tune
    from kernelcat.store import Store

    chosen, problems, numbers = _ranks_of(entry, ("budget", "url"), **options)
    budget = options["budget"] and seconds(options["budget"])
    with Store.open(options["url"]) as store:
        report = tune(catalog.entry(entry), chosen, problems, numbers, store, budget,
                      not options["no_peers"])  # fmt: skip
    _show_report(report, as_json)


def _show_report(report: Any, as_json: bool) -> None:
    if as_json:
        return emit(report.to_json())
    for line in report.lines():
        echo(line)


def _measure(
    work: Callable[..., Any], as_json: bool, entry: str, url: str | None, **options: Any
) -> None:
    _say_what_is_missing([entry], options["languages"])
    _show_report(_run(work, url, entry, **_chosen(**options)), as_json)


def _tune_workload(
    path: Path, entry: str | None, replays: int | None, as_json: bool, url: str | None,
    problems: tuple[str, ...], **options: Any,
) -> None:  # fmt: skip
    """Tune a workload; the lines of each problem are printed as soon as it is tuned, notes once."""
    from kernelcat.tune.report import TuneReport
    from kernelcat.tune.workload import tune_workload

    if problems:
        raise InvalidArgument("--problem does not go with --workload, which names the problems")
    _say_what_is_missing([entry] if entry else catalog.names(), options["languages"])
    noted: set[str] = set()

    def show_lines(report: TuneReport) -> None:
        for line in report.lines():
            if line not in report.notes:
                echo(f"{report.entry} {line}")
            elif line not in noted:
                noted.add(line)
                echo(line)

    chosen = _chosen(**options) | {"replays": 1 if replays is None else replays}
    done = (lambda report: None) if as_json else show_lines
    _show_report(_run(tune_workload, url, path, entry=entry, done=done, **chosen), as_json)


def _say_what_is_missing(entries: Iterable[str], languages: Iterable[str]) -> None:
    """Name languages that are left out; raise ``MissingDependency`` for one that was asked for."""
    known = [entry for entry in entries if entry in catalog.names()]  # another backend's are not
    for entry in known:
        for language in languages:
            catalog.in_language(entry, language)
    if not languages:
        note_missing_languages(*known)


def _chosen(*, budget: str | None, no_peers: bool, **options: Any) -> dict[str, Any]:
    """Arguments of functions of ``kernelcat.tune`` for the options that were given."""
    given = {name: value for name, value in options.items() if value}
    return given | {"budget_s": None if budget is None else seconds(budget), "peers": not no_peers}


def _run(work: Callable[..., Any], url: str | None, subject: str | Path, **options: Any) -> Any:
    """Call ``work`` on an entry or a file, with an open database, and return its report.

    Progress goes to standard error, so that with --json standard output has JSON alone.

    Ctrl-C ends the program with one line about the results that were stored.
    """
    from kernelcat.store import Store
    from kernelcat.tune import Interrupted

    with Store.open(url) as store:
        try:
            return work(subject, store=store, **options)
        except Interrupted as stopped:
            echo(f"\n{stopped}", err=True)
            sys.exit(130)
