"""Rows that cannot be true: checks against the specification, the space and the datasheet.

Rows come from files and databases of other people too. A row is *doubtful* if it contradicts what
is known without a measurement. An import refuses a doubtful row, a call passes over it, and tables
mark it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelcat.catalog import discovery
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.dtypes import E2M1_MAX, E4M3_MAX
from kernelcat.errors import InvalidArgument, MissingDependency, UnknownName
from kernelcat.runtime import gpu as gpus
from kernelcat.store import origin
from kernelcat.store.measurement import PEER, Measurement, decode
from kernelcat.store.races import Race, newest_races

if TYPE_CHECKING:
    from kernelcat.store.database import Store

CLOCK_SKEW = timedelta(days=1)
"""How far the clock of another machine may be ahead."""
PREDICTION_FACTOR = 2.0
"""An estimate may be below the roofline by this factor: cost models round sizes and rates."""
MAX_PER_OPERATION = 1024.0
"""An output of n operations on drawn inputs, which are of the order of 1, is at most this times n.
The bound is generous: it has to tell an error of a thousand times the tolerance from none."""
MAX_LOOPS = 1 << 26
"""Most steps of a loop over sequences and their tokens, to count the work of a problem that has no
name."""


class Limits(NamedTuple):
    """Bounds of the rows of a problem: microseconds of a run, and the error against the oracle."""

    min_us: float
    max_error: float


def check(row: Measurement) -> None:
    """Raise ``InvalidArgument`` for a doubtful row; the message has the reason."""
    reason = doubt(row)
    if reason is not None:
        raise InvalidArgument(reason)


def doubt(row: Measurement) -> str | None:
    """Why ``row`` cannot be true, as one line; None for a row that can be.

    A row of an entry, a variant or axes that the catalog does not have cannot be chosen, and only
    its date and its environment are checked. The dates of shipped rows are not compared with the
    clock, which may be wrong. The row keeps the answer: a table asks for it several times.
    """
    if origin.DOUBT not in vars(row):
        vars(row)[origin.DOUBT] = _doubt(row)
    reason: str | None = vars(row)[origin.DOUBT]
    return reason


def _doubt(row: Measurement) -> str | None:
    if row.is_altered:
        return "the row was changed after it was stored: its digest is another"
    if row.origin != origin.SHIPPED and row.created_at > _latest():
        return f"created_at={row.created_at} is in the future by this machine's clock"
    return _wrong_environment(row) or _contradiction(row)


def sound(races: Iterable[Race], store: Store) -> list[Race]:
    """The races that take the places of ``races`` with a doubtful row: the newest without one.

    ``races`` are of ``store``, which is asked again only where a row is doubtful.
    """
    keys = {race.key for race in races if any(doubt(row) for row in race.measurements)}
    if not keys:
        return []
    candidates = store.possible_rows({key.subject for key in keys}, _is_possible)
    return [race for race in newest_races(r for r in candidates if doubt(r) is None)
            if race.key in keys]  # fmt: skip


def _latest() -> str:
    return (datetime.now(UTC) + CLOCK_SKEW).strftime("%Y-%m-%dT%H:%M:%S")


def _wrong_environment(row: Measurement) -> str | None:
    """How the environment contradicts the row's GPU; None where the two agree."""
    sku = row.environment.get("sku", row.gpu)
    if sku != row.gpu:
        return f"gpu={row.gpu}, but the environment is that of {sku!r}"
    name = row.environment.get("name")
    if isinstance(name, str) and _are_two_gpus(name, row.gpu):
        return f"gpu={row.gpu}, but the environment is that of {name!r}"
    return None


@lru_cache(256)
def _are_two_gpus(one: str, other: str) -> bool:
    """Whether the names are known, and not of one SKU."""
    try:
        return gpus.find(one).sku != gpus.find(other).sku
    except UnknownName:
        return False


def _contradiction(row: Measurement) -> str | None:
    """How a row contradicts the catalog."""
    if row.entry not in discovery.names():
        return None
    entry = discovery.entry(row.entry)
    if row.problem.keys() != set(entry.axis_names):
        return None
    reason = _why_no_problem(row.entry, row.problem_key) or _why_no_config(
        row.entry, row.language, row.variant, row.config
    )
    if reason is not None:
        return reason
    limits = _limits(row.entry, row.problem_key, row.gpu)
    least = limits.min_us / (1 if row.kind == "measured" else PREDICTION_FACTOR)
    if row.median_us is not None and row.median_us < least:
        return f"{row.median_us:g} us is below the roofline of {row.gpu}, {least:.4g} us"
    if row.status == "passed" and (row.max_error or 0) > limits.max_error:
        return f"max_error={row.max_error:g} is above the tolerance, here {limits.max_error:.4g}"
    return None


def why_no_problem(problem: Problem) -> str | None:
    """Why ``problem`` is no problem of its entry, or its work cannot be counted; None otherwise."""
    return _why_no_problem(problem.entry, problem.key)


@lru_cache(4096)
def _why_no_problem(entry_name: str, key: str) -> str | None:
    """:func:`why_no_problem`. The cache goes by text: ``M=1``, ``M=True`` and ``M=1.0`` are equal
    problems, and only the first is one."""
    entry, problem = discovery.entry(entry_name), Problem.of(entry_name, **json.loads(key))
    try:
        entry.problem(**problem.values)
    except (InvalidArgument, UnknownName) as error:
        return str(error)
    for axis in entry.axes:
        value = problem[axis.name]
        kinds = {type(known) for known in axis.values}
        if axis.values and not axis.is_number and type(value) not in kinds:
            return f"{axis.name}={value!r} must be one of: {', '.join(map(repr, axis.values))}"
    return _why_uncountable(entry, problem)


def _why_uncountable(entry: Entry, problem: Problem) -> str | None:
    """Why the work of a valid problem cannot be counted in a second; None where it can."""
    has_sequences = any(tensor.dtype == "int32" for tensor in entry.inputs)
    if has_sequences and entry.problem_name(problem) is None:
        sizes = sorted(problem[axis.name] for axis in entry.axes if not axis.values)
        if prod(sizes[-2:]) > MAX_LOOPS:
            return f"{entry.name}: the work of {problem} takes too long to count"
    return None


def _why_no_config(
    entry: str, language: str, variant: str, config: Mapping[str, Any]
) -> str | None:
    """Why ``config`` is not of the space; None for a peer and without the language."""
    if language == PEER:
        return None
    try:
        implementation = discovery.implementation(entry, language, variant)
    except (UnknownName, MissingDependency):
        return None
    return implementation.why_not_in_space(config)


def _is_possible(entry: str, language: str, variant: str, config: str) -> bool:
    """Whether rows with this configuration (JSON) can be true, as far as the space tells."""
    if entry not in discovery.names():
        return True
    try:
        values = decode(config)
    except InvalidArgument:
        return True  # the row is refused where it is read
    return not isinstance(values, dict) or not _why_no_config(entry, language, variant, values)


@lru_cache(4096)
def _limits(entry_name: str, key: str, gpu: str) -> Limits:
    """The limits of a valid problem (``Problem.key``); the time has none without a datasheet."""
    entry, problem = discovery.entry(entry_name), Problem.of(entry_name, **json.loads(key))
    flops, moved = entry.flops(problem), entry.bytes_moved(problem)
    dtype = entry.product_dtype(problem)
    try:
        roof_us = gpus.find(gpu).roofline_us(flops, moved, dtype)
    except UnknownName:
        roof_us = 0.0
    return Limits(roof_us, _max_error(entry, problem, flops))


def _max_error(entry: Entry, problem: Problem, flops: int) -> float:
    """The largest error that the tolerances of the outputs allow, for the largest values."""
    errors = [0.0]
    for tensor in entry.outputs:
        if tensor.present(problem):
            tolerance, elements = entry.tolerance_of(problem, tensor), tensor.span_of(problem)
            operations = max(1.0, flops / max(elements, 1))
            largest = _LARGEST.get(tensor.dtype_of(problem), MAX_PER_OPERATION * operations)
            errors.append(tolerance.absolute + tolerance.relative * largest)
    return max(errors)


_LARGEST = {"float4_e2m1fn_x2": E2M1_MAX, "float8_e4m3fn": E4M3_MAX, "float16": 65504.0}
"""Element type -> its largest finite value."""
