"""One row of the database: what ran, where, how, and the result. Plain validated data.

This module imports no database, so that the call path reads shipped results quickly.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, cast, get_args
from uuid import uuid4

from kernelcat.catalog.implementation import Config, ConfigValue
from kernelcat.catalog.spec import AxisValue, Problem
from kernelcat.errors import InvalidArgument
from kernelcat.store import origin as origins

Status = Literal["passed", "wrong", "compile_error", "launch_error", "crashed", "timeout"]
Kind = Literal["measured", "predicted"]
STATUSES: tuple[str, ...] = get_args(Status)
KINDS: tuple[str, ...] = get_args(Kind)
REGIMES = ("graph", "eager")
MAX_QUANTILES = 32
"""Most values of ``quantiles_us``."""
PEER = "peer"
"""``language`` of the rows of peers."""

LINE_BYTES = 64 << 10
"""Most bytes of a record."""

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}").fullmatch
_TEXT, _DETAIL, _INTEGER, _MEMBERS = 128, 2000, 1 << 63, 64
"""Limits: characters of a text and of ``detail``, integers (exclusive), keys of an object."""


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
            _check_word(name, getattr(self, name))
        _check_values("problem", self.problem)
        _check_values("config", self.config)
        _check_text("source", self.source, _TEXT)
        if self.problem_name is not None:
            _check_text("problem_name", self.problem_name, _TEXT)
        self._set("detail", _one_line(self.detail))
        _check_protocol(self.protocol)
        _check_one_of("kind", self.kind, KINDS)
        _check_one_of("status", self.status, STATUSES)
        if not isinstance(self.environment, Mapping):
            raise InvalidArgument("environment must be an object")
        _check_integer("samples", self.samples)
        self._set("median_us", _to_float("median_us", self.median_us, 1e-3, 1e12))
        self._set("ci_us", _to_interval(self.ci_us))
        self._set("sm_clock_mhz", _to_float("sm_clock_mhz", self.sm_clock_mhz, 0, 1e5))
        self._set("power_w", _to_float("power_w", self.power_w, 0, 1e5))
        self._set("temperature_c", _to_float("temperature_c", self.temperature_c, -100, 1000))
        self._set("max_error", _to_float("max_error", self.max_error, 0, math.inf))
        self._set("sqnr_db", _to_float("sqnr_db", self.sqnr_db, -1e4, 1e4))
        self._set("quantiles_us", _to_quantiles(self.quantiles_us))
        self._set("created_at", _to_utc(self.created_at))
        if not isinstance(self.winner, bool):
            raise InvalidArgument(f"winner={_short_repr(self.winner)} must be a boolean")
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
            raise InvalidArgument(f"unknown key {_short_repr(min(keys - _KEYS))}")
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
    return _to_utc(datetime.now(UTC).isoformat())


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
        raise InvalidArgument(f"not JSON: {_short_repr(line)} is no text")
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


def _short_repr(value: object) -> str:
    """``repr(value)``, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _to_record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these keys and values; each key must be there once."""
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key occurs twice")
    return record


@lru_cache(1024)
def _is_word(text: str) -> bool:
    return _WORD(text) is not None


def _check_word(name: str, value: object) -> None:
    if not isinstance(value, str) or not _is_word(value):
        raise InvalidArgument(
            f"{name}={_short_repr(value)} must be a word of letters, digits and _.+-"
        )


def _check_text(name: str, value: object, limit: int) -> None:
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise InvalidArgument(
            f"{name}={_short_repr(value)} must be one printable line of up to {limit} characters"
        )


def _one_line(detail: object) -> str | None:
    """``detail`` (any text of compilers and drivers) as one printable line."""
    if detail is None:
        return None
    if not isinstance(detail, str):
        raise InvalidArgument(f"detail={_short_repr(detail)} must be a text or null")
    text = " ".join(detail[: 4 * _DETAIL].split())
    return "".join(c if c.isprintable() else "?" for c in text)[:_DETAIL].strip() or None


_decode = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_to_record).decode


def _check_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgument(f"{name}={_short_repr(value)} must be one of: {', '.join(known)}")


def _check_integer(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < _INTEGER:
        raise InvalidArgument(f"{name}={_short_repr(value)} must be a whole number >= 0")


def _to_float(name: str, value: object, low: float, high: float) -> float | None:
    """``value`` as a float; it must be null or a number from ``low`` to ``high``."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{name}={_short_repr(value)} must be a number or null")
    if not (low <= value <= high and abs(value) <= 1e300):  # NaN fails every comparison
        raise InvalidArgument(f"{name}={_short_repr(value)} is out of range [{low:g}, {high:g}]")
    return float(value) + 0.0  # no negative zero: a database would not keep it


def _to_interval(value: object) -> tuple[float, float] | None:
    """``ci_us`` as (low, high), in microseconds; it must be null or a list of two numbers."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != 2 or None in value:
        raise InvalidArgument(f"ci_us={_short_repr(value)} must be [low, high]")
    low, high = (cast(float, _to_float("ci_us", end, 0, 1e12)) for end in value)
    return (low, high)


def _to_quantiles(value: object) -> tuple[float, ...] | None:
    """``quantiles_us``, in microseconds; it must be null or a list of ascending numbers."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MAX_QUANTILES or None in value:
        raise InvalidArgument(
            f"quantiles_us={_short_repr(value)} must be 1 to {MAX_QUANTILES} ascending numbers"
        )
    times = tuple(cast(float, _to_float("quantiles_us", time, 0, 1e12)) for time in value)
    if any(later < earlier for earlier, later in pairwise(times)):
        raise InvalidArgument(f"quantiles_us={_short_repr(value)} must ascend")
    return times


def _check_values(name: str, mapping: object) -> None:
    """Check the problem or the configuration (``name``): words -> texts, numbers or booleans."""
    if not isinstance(mapping, Mapping) or len(mapping) > _MEMBERS:
        raise InvalidArgument(f"{name} must be an object of up to {_MEMBERS} members")
    for key, value in mapping.items():
        if not isinstance(key, str) or not _is_word(key):
            raise InvalidArgument(f"{_short_repr(key)} cannot be a key of {name}")
        if isinstance(value, str):
            _check_text(name, value, _TEXT)
        elif not isinstance(value, (int, float)) or not abs(value) < _INTEGER:
            raise InvalidArgument(
                f"{name}.{key}={_short_repr(value)} must be a number, text or boolean"
            )


def _check_protocol(protocol: object) -> None:
    if not isinstance(protocol, Mapping) or set(protocol) != {"regime", "l2", "state"}:
        raise InvalidArgument("protocol must have exactly the keys regime, l2 and state")
    _check_one_of("protocol.regime", protocol["regime"], REGIMES)
    _check_word("protocol.l2", protocol["l2"])
    _check_word("protocol.state", protocol["state"])


def _to_utc(value: object) -> str:
    """``created_at`` in UTC with milliseconds; it must be an ISO 8601 time with a time zone."""
    try:
        moment = datetime.fromisoformat(cast(str, value))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"created_at={_short_repr(value)} must be an ISO 8601 time"
        ) from error
    if moment.tzinfo is None:
        raise InvalidArgument(f"created_at={_short_repr(value)} must name a time zone (end in Z)")
    try:
        utc = moment.astimezone(UTC)
    except OverflowError as error:
        raise InvalidArgument(f"created_at={_short_repr(value)} is out of range") from error
    return utc.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
