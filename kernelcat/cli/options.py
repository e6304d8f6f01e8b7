"""Options that several verbs share, and the implementations and devices that they select."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelcat import catalog
from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.cli.output import echo
from kernelcat.errors import InvalidArgument, MissingDependency, Unsupported

if TYPE_CHECKING:
    from kernelcat.catalog.implementation import Implementation
    from kernelcat.runtime.device import Device

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
profile_file = click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Record decode steps to this file, a trace in Chrome's format, and show their kernels.",
)
out_file = click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write what --json prints to this file, again after each result.",
)
tp = click.option(
    "--tp", default=1, show_default=True, help="GPUs (or, on a CPU, processes) that share a layer."
)
ep = click.option(
    "--ep",
    default=1,
    show_default=True,
    help="GPUs (or, on a CPU, processes) that divide the experts.",
)
split_tokens = click.option(
    "--split-tokens",
    type=click.IntRange(0),
    metavar="TOKENS",
    help="With --tp or --ep: steps of as many tokens are computed in halves, so that exchanges "
    "overlap with products; 0: none.  [default: 4096, none with --ep 2]",
)
rebalance_every = click.option(
    "--rebalance-every",
    default=0,
    metavar="STEPS",
    help="Steps after which experts may change GPUs, to even out work; 0: never. With --ep.",
)
disaggregate = click.option(
    "--disaggregate",
    is_flag=True,
    help="One GPU (on a CPU: one process) computes prompts, another one writes.",
)
short_prompt = click.option(
    "--short-prompt",
    default=64,
    show_default=True,
    help="With --disaggregate: prompts with at most so many new tokens stay where they write.",
)
nvtx = click.option("--nvtx", is_flag=True, help="Mark phases of steps for Nsight Systems.")
host_cache = click.option(
    "--host-cache",
    metavar="GB",
    default=0.0,
    callback=lambda context, parameter, gigabytes: int(1e9 * gigabytes),
    help="Gigabytes of host memory for blocks that leave the GPU's cache.  [default: 0]",
)
database = click.option(
    "--db", "url", help="Path or SQLAlchemy URL of the database; $KERNELCAT_DB by default."
)
language = click.option("--language", help="Use only this language: cuda, triton or cute.")
variant = click.option("--variant", help="Use only this variant.")
problem_names = click.option(
    "--problem",
    "problems",
    multiple=True,
    help="Use only this problem, a name or axis values (M=256,N=512,K=64); may be repeated.",
)


_NAMED = 8
"""Implementations that a message names; of more it gives the number."""


def missing_languages(entry: str) -> dict[str, str]:
    """The languages that ``entry`` has kernels in and that are not installed, with the remedy."""
    missing = {}
    for each in catalog.languages(catalog.entry(entry).name):
        try:
            catalog.in_language(entry, each)
        except MissingDependency as error:
            missing[each] = str(error)
    return missing


def note_missing_languages(*entries: str) -> None:
    """Say on standard error which languages of the entries are left out, and what installs them."""
    missing: dict[str, str] = {}
    for entry in entries:
        missing |= missing_languages(entry)
    _note_left_out(missing.values())


def note_missing_compilers() -> None:
    """Say on standard error which languages lack their compiler; imports no kernel."""
    _note_left_out(filter(None, map(catalog.lacks_compiler, LANGUAGES)))


def _note_left_out(reasons: Iterable[str]) -> None:
    for reason in reasons:
        echo(f"left out: {reason}", err=True)


def choose(
    entries: Sequence[str], language: str | None, variant: str | None
) -> list[Implementation]:
    """The implementations of ``entries`` in a language and variant (default: in all of them).

    Raises ``UnknownName`` for an unknown entry or language, ``MissingDependency`` for a language
    that is not installed, ``InvalidArgument`` if an entry has no such implementation.
    """
    if language is None:
        note_missing_languages(*entries)
    return [each for entry in entries for each in _of_entry(entry, language, variant)]


def _of_entry(entry: str, language: str | None, variant: str | None) -> tuple[Implementation, ...]:
    chosen = catalog.in_language(entry, language) if language else catalog.implementations(entry)
    if variant:
        chosen = tuple(i for i in chosen if i.variant == variant)
    if not chosen:
        name = "/".join(part for part in (entry, language, variant) if part)
        names = ", ".join(i.name for i in catalog.implementations(entry)) or "nothing installed"
        raise InvalidArgument(f"no implementation is called {name}; there is: {names}")
    return chosen


def open_device(mirrored: bool = False) -> Device:
    """GPU 0, or Triton's interpreter without a GPU; ``mirrored`` keeps arrays on the host."""
    from kernelcat.runtime import driver
    from kernelcat.runtime.device import CudaDevice, Interpreter, MirroredDevice

    if driver.count():
        return MirroredDevice() if mirrored else CudaDevice()
    os.environ["TRITON_INTERPRET"] = "1"
    return Interpreter()


def runnable(implementations: list[Implementation], device: Device) -> list[Implementation]:
    """The implementations that ``device`` can run; ``Unsupported`` if there is none."""
    from kernelcat.runtime.device import Interpreter

    if isinstance(device, Interpreter):
        runnable = [i for i in implementations
                    if i.interpretable and not catalog.entry(i.entry).ranks]  # fmt: skip
        reason = "without a GPU only Triton kernels run (in its interpreter, which has no Gluon)"
    else:
        runnable = [i for i in implementations if i.serves(device.gpu.arch)]
        reason = f"this GPU is {device.gpu.arch}"
    if not runnable:
        names = [each.name for each in implementations]
        rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise Unsupported(f"{', '.join(names[:_NAMED])}{rest} cannot run here: {reason}")
    return runnable


def seconds(text: str) -> float:
    """The seconds in ``text`` (``90``, ``90s``, ``10m``, ``1h``); else ``InvalidArgument``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    if not match:
        raise InvalidArgument(f"budget {text!r} is not a time; write 90s, 10m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def divides_experts(ep: int, rebalance_every: int = 0) -> bool:
    """Whether ranks divide experts; ``InvalidArgument`` for options that say nothing sensible."""
    if ep < 1:
        raise InvalidArgument(f"--ep {ep} must be a number of GPUs, 1 for no division")
    if rebalance_every and ep == 1:
        raise InvalidArgument("--rebalance-every is for experts on several GPUs: add --ep")
    return ep > 1


def require_one_division(options: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` where options divide an engine in more than one way."""
    ways = [name for name in ("tp", "ep") if options[name] > 1]
    ways += ["disaggregate"] if options["disaggregate"] else []
    if len(ways) > 1:
        names = " and ".join(f"--{way}" for way in ways)
        raise InvalidArgument(f"{names} cannot be combined: give one of them")


def integers(text: str, rule: str) -> list[int]:
    """Positive numbers with commas between them, or ``InvalidArgument`` with ``rule``."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise InvalidArgument(f"{text!r} {rule}")
    return numbers
