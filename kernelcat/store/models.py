"""The tables of the database, and the conversion of measurements to rows and back."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    Text,
    false,
)

from kernelcat.store.measurement import FIELDS, Measurement, canonical, decode
from kernelcat.store.origin import LOCAL, MAX_CHARS, UNKNOWN, brought

metadata = MetaData()

schema = Table("kernelcat_schema", metadata, Column("version", Integer, nullable=False))

measurements = Table(
    "kernelcat_measurements",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("digest", String(32), nullable=False, unique=True),
    Column("entry", String(64), nullable=False),
    Column("language", String(64), nullable=False),
    Column("variant", String(64), nullable=False),
    Column("problem", Text, nullable=False),
    Column("problem_name", String(128)),
    Column("config", Text, nullable=False),
    Column("source", String(128), nullable=False),
    Column("gpu", String(64), nullable=False),
    Column("environment", Text, nullable=False),
    Column("regime", String(16), nullable=False),
    Column("l2", String(64), nullable=False),
    Column("state", String(64), nullable=False),
    Column("run", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("median_us", Float(53)),
    Column("ci_low_us", Float(53)),
    Column("ci_high_us", Float(53)),
    Column("samples", BigInteger, nullable=False),
    Column("sm_clock_mhz", Float(53)),
    Column("power_w", Float(53)),
    Column("temperature_c", Float(53)),
    Column("max_error", Float(53)),
    Column("created_at", String(32), nullable=False),
    Column("detail", Text),
    Column("sqnr_db", Float(53)),
    Column("winner", Boolean, nullable=False, server_default=false()),
    Column("quantiles_us", Text),
    Column("origin", String(MAX_CHARS), nullable=False, server_default=LOCAL),
)

Index(
    "kernelcat_by_entry",
    measurements.c.entry,
    measurements.c.gpu,
    measurements.c.regime,
    measurements.c.status,
)
Index(
    "kernelcat_by_source",
    measurements.c.source,
    measurements.c.entry,
    measurements.c.language,
    measurements.c.variant,
    measurements.c.gpu,
)
Index("kernelcat_by_run", measurements.c.run, measurements.c.entry)

_ENCODED = ("problem", "config", "environment")
"""Fields that a column holds as canonical JSON."""
_QUANTILES = "quantiles_us"
"""A field that a column holds as JSON, or as NULL where it has no value."""
_PLAIN = [name for name in FIELDS
          if name in measurements.c and name not in (*_ENCODED, _QUANTILES)]  # fmt: skip
"""Fields that a column holds as they are."""


def to_row(measurement: Measurement) -> dict[str, Any]:
    """Column values of a measurement."""
    low, high = measurement.ci_us or (None, None)
    quantiles = measurement.quantiles_us
    return {name: getattr(measurement, name) for name in _PLAIN} | {
        "digest": measurement.digest,
        **{name: canonical(getattr(measurement, name)) for name in _ENCODED},
        "regime": measurement.protocol["regime"],
        "l2": measurement.protocol["l2"],
        "state": measurement.protocol["state"],
        "ci_low_us": low,
        "ci_high_us": high,
        _QUANTILES: None if quantiles is None else canonical(quantiles),
        "origin": measurement.origin,
    }


def from_row(row: Row[Any]) -> Measurement:
    """The measurement in a row, with its origin. The row's table may lack the newest columns.

    Where the content differs from the stored digest, the measurement is marked as altered.

    Raises
    ------
    InvalidArgument
        The row is not a valid measurement.
    """
    values = row._mapping
    quantiles = values.get(_QUANTILES)
    measurement = Measurement(
        **{name: values[name] for name in _PLAIN if name in values},
        **{name: decode(values[name]) for name in _ENCODED},
        protocol={name: values[name] for name in ("regime", "l2", "state")},
        ci_us=None if values["ci_low_us"] is None else (values["ci_low_us"], values["ci_high_us"]),
        quantiles_us=None if quantiles is None else decode(quantiles),
    )
    is_altered = measurement.digest != values["digest"]
    return brought(measurement, values.get("origin", UNKNOWN), is_altered)
