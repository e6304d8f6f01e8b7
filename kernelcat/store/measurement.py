"""One row of the database: what ran, where, how, and the result. Plain validated data.

This module imports no database, so that the call path reads shipped results quickly.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, cast, get_args
from uuid import uuid4

from kernelcat.catalog.implementation import Config, ConfigValue
from kernelcat.catalog.spec import AxisValue, Problem
from kernelcat.errors import InvalidArgument
from kernelcat.store import origin as origins
from kernelcat.store.fields import (
    MAX_TEXT,
    check_integer,
    check_one_of,
    check_text,
    check_values,
    check_word,
    one_line,
    short_repr,
    to_float,
    to_interval,
    to_quantiles,
    to_utc,
)

Status = Literal["passed", "wrong", "compile_error", "launch_error", "crashed", "timeout"]
Kind = Literal["measured", "predicted"]
STATUSES: tuple[str, ...] = get_args(Status)
KINDS: tuple[str, ...] = get_args(Kind)
REGIMES = ("graph", "eager")
PEER = "peer"
"""``language`` of the rows of peers."""

LINE_BYTES = 64 << 10
"""Most bytes of a record."""

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True)
class Measurement:
    """One append-only row. An invalid row raises ``InvalidArgument``.

    ``median_us`` has a value if and only if ``status`` is ``passed``. If ``kind`` is ``measured``,
    ``ci_us`` and ``samples`` have values too. If ``kind`` is ``predicted``, nothing ran: ``passed``
    means that the configuration compiled and fits, ``median_us`` is the cost model's estimate,
    ``ci_us``, clock, power, temperature and error are None, and ``samples`` is 0.

    Attributes
    ----------
    language : ``cuda``, ``triton``, ``cute``, or ``peer`` with the peer's name as ``variant``
    problem, config : values of the axes, and of the tuning parameters; a peer's config is empty
    problem_name : name of the problem in the entry, or None
    source : digest of the implementation's sources; empty for a peer
    gpu : SKU (``h200``)
    environment : the machine and its compilers (:class:`kernelcat.runtime.environment.Environment`)
    protocol : ``regime`` (graph, eager), ``l2``, ``state`` (burst, sustained, ladder, screen)
    run : rows of one run were raced together and may be compared
    kind : ``measured`` or ``predicted``
    status : one of :data:`STATUSES`
    median_us, ci_us : microseconds; ``ci_us`` is (low, high)
    samples : number of timed samples
    sm_clock_mhz, power_w, temperature_c : MHz, W and degrees Celsius during the measurement; None
        where unknown
    max_error : largest error against the oracle; None where unknown or not finite
    created_at : ISO 8601 with a time zone; stored in UTC with milliseconds
    detail : why the run failed or the configuration was rejected, as one line, or None; JSON has
        the key only where there is a reason
    sqnr_db : signal to quantization noise of the result in dB; None without quantized inputs and in
        old rows; JSON has the key only where there is a value
    winner : whether the tuner declared this row the winner of its race, from paired differences;
        JSON has the key only where it is true
    quantiles_us : the distribution of the samples, ascending, in microseconds
        (:func:`kernelcat.bench.stats.quantiles`); None in old rows and for what was not timed; JSON
        has the key only where there is a value
    """

    entry: str
    language: str
    variant: str
    problem: Mapping[str, AxisValue]
    problem_name: str | None
    config: Mapping[str, ConfigValue]
    source: str
    gpu: str
    environment: Mapping[str, Any]
    protocol: Mapping[str, str]
    run: str
    kind: Kind
    status: Status
    median_us: float | None
    ci_us: tuple[float, float] | None
    samples: int
    sm_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    max_error: float | None
    created_at: str
    detail: str | None = None
    sqnr_db: float | None = None
    winner: bool = False
    quantiles_us: tuple[float, ...] | None = None
    origin, is_altered = origins.LOCAL, False  # no fields: kernelcat.store.origin.brought sets both

    def __post_init__(self) -> None:
        for name in ("entry", "language", "variant", "gpu", "run"):
            check_word(name, getattr(self, name))
        check_values("problem", self.problem)
        check_values("config", self.config)
        check_text("source", self.source, MAX_TEXT)
        if self.problem_name is not None:
            check_text("problem_name", self.problem_name, MAX_TEXT)
        self._set("detail", one_line(self.detail))
        _check_protocol(self.protocol)
        check_one_of("kind", self.kind, KINDS)
        check_one_of("status", self.status, STATUSES)
        if not isinstance(self.environment, Mapping):
            raise InvalidArgument("environment must be an object")
        check_integer("samples", self.samples)
        self._set("median_us", to_float("median_us", self.median_us, 1e-3, 1e12))
        self._set("ci_us", to_interval(self.ci_us))
        self._set("sm_clock_mhz", to_float("sm_clock_mhz", self.sm_clock_mhz, 0, 1e5))
        self._set("power_w", to_float("power_w", self.power_w, 0, 1e5))
        self._set("temperature_c", to_float("temperature_c", self.temperature_c, -100, 1000))
        self._set("max_error", to_float("max_error", self.max_error, 0, math.inf))
        self._set("sqnr_db", to_float("sqnr_db", self.sqnr_db, -1e4, 1e4))
        self._set("quantiles_us", to_quantiles(self.quantiles_us))
        self._set("created_at", to_utc(self.created_at))
        if not isinstance(self.winner, bool):
            raise InvalidArgument(f"winner={short_repr(self.winner)} must be a boolean")
        self._check_timing()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_timing(self) -> None:
        passed = self.status == "passed"
        if passed != (self.median_us is not None):
            raise InvalidArgument(
                f"median_us must be {'given' if passed else 'null'}: status is {self.status}"
            )
        timed = passed and self.kind == "measured"
        if self.winner and (not timed or self.is_peer):
            raise InvalidArgument("winner must be false: only what was timed can win, and no peer")
        if timed != (self.ci_us is not None) or timed != (self.samples > 0):
            raise InvalidArgument(
                f"ci_us and samples must be {'given' if timed else 'null and 0'}: "
                f"kind is {self.kind}, status is {self.status}"
            )
        if timed:
            (low, high), median = cast(tuple[float, float], self.ci_us), self.median_us
            if not low <= cast(float, median) <= high:
                raise InvalidArgument(f"median_us={median} lies outside ci_us=[{low}, {high}]")
        if self.quantiles_us is not None and not timed:
            raise InvalidArgument("quantiles_us must be null: nothing was timed")

    @cached_property
    def problem_key(self) -> str:
        """Canonical JSON of the problem, equal to ``Problem.key``."""
        return canonical(self.problem)

    @cached_property
    def config_key(self) -> str:
        """Canonical JSON of the configuration, equal to ``Config.key``."""
        return canonical(self.config)

    @cached_property
    def digest(self) -> str:
        """Digest of the whole content, 32 hexadecimal digits: equal rows are stored once."""
        return hashlib.sha256(self.line().encode()).hexdigest()[:32]

    @property
    def is_peer(self) -> bool:
        return self.language == PEER

    @property
    def regime(self) -> str:
        return self.protocol["regime"]

    @property
    def state(self) -> str:
        return self.protocol["state"]

    def to_problem(self) -> Problem:
        return self._problem

    @cached_property
    def _problem(self) -> Problem:
        return Problem.of(self.entry, **self.problem)

    def to_config(self) -> Config:
        return Config(self.config)

    def to_json(self) -> dict[str, Any]:
        """Plain data in the order of the fields; optional fields only where they have a value."""
        record = {name: getattr(self, name) for name in FIELDS}
        for name in ("problem", "config", "environment", "protocol"):
            record[name] = dict(record[name])
        if self.ci_us is not None:
            record["ci_us"] = list(self.ci_us)
        if self.quantiles_us is not None:
            record["quantiles_us"] = list(self.quantiles_us)
        for name, absent in _OPTIONAL.items():
            if record[name] is absent:
                del record[name]
        return record

    def line(self) -> str:
        """Canonical JSON: one line, keys sorted, without the newline.

        Raises ``InvalidArgument`` for more than :data:`LINE_BYTES`.
        """
        line = canonical(self.to_json())
        if len(line) > LINE_BYTES:
            raise InvalidArgument(f"the record is longer than {LINE_BYTES} bytes")
        return line

    @staticmethod
    def from_json(record: Any) -> Measurement:
        """The row that ``record`` (a parsed JSON object) describes.

        Raises
        ------
        InvalidArgument
            A key is unknown, missing, of a wrong type or out of range; the message names the key.
        """
        if not isinstance(record, dict):
            raise InvalidArgument(f"a record must be a JSON object, not {type(record).__name__}")
        keys = record.keys()
        if keys - _KEYS:
            raise InvalidArgument(f"unknown key {short_repr(min(keys - _KEYS))}")
        if _REQUIRED - keys:
            raise InvalidArgument(f"the key {min(_REQUIRED - keys)!r} is missing")
        if record.get("detail") == "winner" and "winner" not in keys:  # form of old rows
            record = record | {"detail": None, "winner": True}
        return Measurement(**record)

    @staticmethod
    def from_line(line: str | bytes) -> Measurement:
        """The row on one line of JSON; raises as :meth:`from_json`, also for invalid JSON."""
        return Measurement.from_json(decode(line))


FIELDS = tuple(field.name for field in fields(Measurement))
_KEYS = frozenset(FIELDS)
_OPTIONAL = {"detail": None, "sqnr_db": None, "winner": False, "quantiles_us": None}
"""Optional field -> the value for which JSON leaves the field out."""
_REQUIRED = _KEYS - _OPTIONAL.keys()


def now() -> str:
    """The current time in the form of ``created_at``."""
    return to_utc(datetime.now(UTC).isoformat())


def new_run() -> str:
    """A new name for a run: ``20261120T093012-5f0c``. Names sort by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid4().hex[:4]}"


def canonical(value: Any) -> str:
    """JSON with sorted keys and no blanks.

    Raises ``InvalidArgument`` for a value that JSON has no form for (NaN, infinity, objects).
    """
    try:
        return _encode(dict(value) if isinstance(value, Mapping) else value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"not plain JSON data: {error}") from error


def decode(line: str | bytes) -> Any:
    """The JSON value on one line.

    Raises ``InvalidArgument`` for invalid JSON and for more than :data:`LINE_BYTES`.
    """
    if not isinstance(line, (str, bytes)):
        raise InvalidArgument(f"not JSON: {short_repr(line)} is no text")
    if len(line) > LINE_BYTES:
        raise InvalidArgument(f"the line is longer than {LINE_BYTES} bytes")
    try:
        text = line if isinstance(line, str) else line.decode()
        return _decode(text.strip())
    except RecursionError as error:
        raise InvalidArgument("not JSON: nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"not JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument("not JSON: the text is not UTF-8") from error
    except ValueError as error:
        raise InvalidArgument(f"not JSON: {error}") from error


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _to_record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these keys and values; each key must be there once."""
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key occurs twice")
    return record


_decode = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_to_record).decode


def _check_protocol(protocol: object) -> None:
    if not isinstance(protocol, Mapping) or set(protocol) != {"regime", "l2", "state"}:
        raise InvalidArgument("protocol must have exactly the keys regime, l2 and state")
    check_one_of("protocol.regime", protocol["regime"], REGIMES)
    check_word("protocol.l2", protocol["l2"])
    check_word("protocol.state", protocol["state"])
