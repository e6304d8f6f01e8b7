"""Calibrated time models: coefficients of cost models and portfolios, a file for each SKU.

``tuning_db/models/nvidia-SKU.json`` follows from shipped rows (``kernelcat calibrate``), and is
reviewed like code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelcat import paths
from kernelcat.catalog.implementation import Config
from kernelcat.errors import StoreError, UnknownName
from kernelcat.runtime import gpu

if TYPE_CHECKING:
    import numpy as np

NEAREST, NEAREST_THEN_MODEL, MODEL = RULES = "nearest", "nearest then model", "model"
"""What serves a problem of which no bucket-mate is measured: the winner of the nearest problem,
else the highest rank; the winner of the nearest problem, else the least predicted time; the least
predicted time."""


CAUTIONS = (1.5, 0.5)
"""Standard deviations by which a predicted time may be raised before it is compared with others: of
many predictions the least is the one that errs most. Each model has one of them; the first one
unless the other likely loses less on problems that the model does not know."""


@dataclass(frozen=True)
class Coefficients:
    """What turns the estimate of an implementation into a predicted time on one SKU.

    Attributes
    ----------
    factor : measured over estimated time, for an estimate of ``center_us``
    slope : how the logarithm of that ratio grows with the logarithm of the estimate
    low_us, center_us, high_us
        Least, middle and greatest estimate of the rows; beyond them the ratio stays the same.
    rows : measured rows behind the coefficients
    spread : factor by which measured times differ from predictions, one standard deviation
    """

    factor: float
    slope: float
    low_us: float
    center_us: float
    high_us: float
    rows: int
    spread: float

    def predict(self, estimate_us: float) -> float:
        """Microseconds for an estimate of ``estimate_us``."""
        inside = min(max(estimate_us, self.low_us), self.high_us)
        return estimate_us * self.factor * exp(self.slope * log(inside / self.center_us))

    def log_predict(self, log_us: np.ndarray) -> np.ndarray:
        """Logarithms of :meth:`predict`, for logarithms of many estimates."""
        inside = log_us.clip(log(self.low_us), log(self.high_us))
        return log_us + log(self.factor) + self.slope * (inside - log(self.center_us))

    def doubt(self, caution: float) -> float:
        """Factor of a predicted time that ``caution`` standard deviations add."""
        return float(self.spread**caution)


@dataclass(frozen=True)
class Member:
    """A configuration of a portfolio; ``implementation`` is ``cuda/wgmma``."""

    implementation: str
    config: Config


@dataclass(frozen=True)
class Judgement:
    """What a rule loses on the measured problems, each served without the rows of its bucket.

    ``mean`` is geometric; ``mean`` and ``worst`` are fractions above the fastest row, of the chosen
    variant with its best raced configuration. ``problems`` is how many have a row of it.
    """

    mean: float
    worst: float
    problems: int


@dataclass(frozen=True)
class Calibrated:
    """The time model of an entry on one SKU.

    Attributes
    ----------
    rule : one of :data:`RULES`
    judged : rule -> what it loses
    coefficients : ``cuda/wgmma`` -> its coefficients
    portfolio : the configurations that the least predicted time is looked for among
    widened : whether the portfolio also serves random problems, whose times are predicted
    caution : one of :data:`CAUTIONS`
    estimates
        If widened, a hash of estimates of random problems: where today's differ, the portfolio is
        one for other estimates.
    """

    rule: str
    judged: Mapping[str, Judgement]
    coefficients: Mapping[str, Coefficients]
    portfolio: tuple[Member, ...]
    widened: bool = False
    caution: float = CAUTIONS[0]
    estimates: str = ""

    @cached_property
    def configs(self) -> dict[str, list[Config]]:
        """``cuda/wgmma`` -> its configurations in the portfolio."""
        found = dict[str, list[Config]]()
        for member in self.portfolio:
            found.setdefault(member.implementation, []).append(member.config)
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "widened": self.widened,
            "caution": self.caution,
            "estimates": self.estimates,
            "judged": {rule: asdict(each) for rule, each in self.judged.items()},
            "coefficients": {name: asdict(each) for name, each in self.coefficients.items()},
            "portfolio": [
                {"implementation": m.implementation, "config": dict(m.config)}
                for m in self.portfolio
            ],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Calibrated:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what is no model."""
        if values["rule"] not in RULES:
            raise ValueError(f"rule {values['rule']!r} must be one of {RULES}")
        return Calibrated(
            values["rule"],
            {rule: Judgement(**each) for rule, each in values["judged"].items()},
            {name: Coefficients(**each) for name, each in values["coefficients"].items()},
            tuple(Member(m["implementation"], Config(m["config"])) for m in values["portfolio"]),
            values.get("widened", False),
            values.get("caution", CAUTIONS[0]),
            values.get("estimates", ""),
        )


def path(sku: str) -> Path:
    """The file of ``sku``, which need not exist."""
    return paths.data("tuning_db") / "models" / f"nvidia-{sku}.json"


@cache
def models(sku: str) -> Mapping[str, Calibrated]:
    """Entry -> its model on ``sku``; empty without a file.

    Raises
    ------
    StoreError
        The file is not what :func:`save` writes.
    """
    file = path(sku)
    if not file.is_file():
        return {}
    try:
        entries = json.loads(file.read_text())
        return {name: Calibrated.from_json(values) for name, values in entries.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{file} is no file of calibrated models: {error}") from None


@cache
def lent(sku: str) -> Mapping[str, Calibrated]:
    """Entry -> the model of another SKU of the same architecture: of the one whose memory bandwidth
    is nearest, among those with a model of the entry. Raises what :func:`models` raises.
    """
    try:
        own = gpu.find(sku)
    except UnknownName:
        return {}
    found = dict[str, Calibrated]()
    for sibling in gpu.siblings(own):
        found = {**models(sibling.sku), **found}
    return found


def save(sku: str, entries: Mapping[str, Calibrated | None]) -> Path:
    """Writes the models of ``sku``; those of other entries stay. Returns the file.

    With None an entry has no model any more. Other processes may do the same at the same time.
    """
    from filelock import FileLock  # not on the path of calls

    file = path(sku)
    file.parent.mkdir(exist_ok=True)
    with FileLock(file.parent / ".lock"):
        models.cache_clear()  # what others have saved since is in the file
        every = {**models(sku), **entries}
        data = {name: model.to_json() for name, model in sorted(every.items()) if model is not None}
        file.write_text(_text(data, 3) + "\n")
    models.cache_clear()
    lent.cache_clear()
    return file


def _text(value: Any, depth: int, indent: str = "") -> str:
    """JSON with a line for each item of the outer ``depth`` levels."""
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, list):
        items = [_text(item, depth - 1, inner) for item in value]
    else:
        items = [f"{json.dumps(k)}: {_text(v, depth - 1, inner)}" for k, v in value.items()]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    lines = ",\n".join(inner + item for item in items)
    return f"{opening}\n{lines}\n{indent}{closing}"
