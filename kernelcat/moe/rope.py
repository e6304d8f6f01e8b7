"""RoPE: the angles of a model's positions, as the table that `kv_write` and others read.

Pair i of ``dim`` elements turns by ``position / theta^(2 i / dim)``. Three extensions to longer
contexts change these frequencies:

    linear   all frequencies are divided by ``factor``
    llama3   low frequencies are divided by ``factor``, and those between two limits partly
    yarn     the same with limits in rotations over the original context; cosines and sines are also
             multiplied by ``attention_factor``, which sharpens attention

Sources: Su et al., "RoFormer", 2021; Peng et al., "YaRN", 2023; Llama 3.1's model card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import ceil, floor, log, pi
from typing import Any

import torch

from kernelcat.errors import InvalidArgument

OPTIONAL = ("attention_factor", "mscale", "mscale_all_dim")
PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    ),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
        *OPTIONAL,
    ),
}  # fmt: skip
"""Type -> what it needs beside theta; those in ``OPTIONAL`` may be absent."""


@dataclass(frozen=True)
class Rope:
    """RoPE's parameters, by their names in `config.json`; 0 stands for a value that is absent."""

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @staticmethod
    def of(config: Mapping[str, Any]) -> Rope:
        """The parameters in ``config``, the content of a `config.json`.

        They stand in ``rope_parameters``, or as older files have it in ``rope_theta`` and
        ``rope_scaling``, where the type may be called ``type``.

        Raises
        ------
        InvalidArgument
            The type is unknown, or a parameter that the type needs is absent.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise InvalidArgument(f"config.json: RoPE's parameters {scaling!r} must be an object")
        parameters = dict(scaling)
        parameters.setdefault("rope_theta", config.get("rope_theta"))
        parameters.setdefault("rope_type", parameters.get("type"))
        names = {field.name for field in fields(Rope)}
        rope = Rope(**{n: v for n, v in parameters.items() if n in names and v is not None})
        for field in fields(Rope):
            value = getattr(rope, field.name)
            if isinstance(value, str) != (field.type == "str") or not isinstance(
                value, (int, float, str)
            ):
                raise InvalidArgument(
                    f"config.json: {field.name}={value!r} must be of type {field.type}"
                )
        if rope.rope_type not in PARAMETERS:
            known = ", ".join(PARAMETERS)
            raise InvalidArgument(f"rope_type={rope.rope_type!r} is not supported; use {known}")
        if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise InvalidArgument("partial_rotary_factor must be 1: heads are rotated as a whole")
        if rope.rope_type in ("llama3", "yarn") and not rope.original_max_position_embeddings:
            raise InvalidArgument(
                f"rope_type={rope.rope_type!r} needs original_max_position_embeddings"
            )
        return rope

    def published(self) -> dict[str, Any]:
        """The parameters as `config.json` has them; the inverse of :meth:`of`."""
        values = asdict(self)
        scaling = {name: values[name] for name in PARAMETERS[self.rope_type]}
        absent = [name for name in OPTIONAL if not scaling.get(name, True)]
        scaling = {name: value for name, value in scaling.items() if name not in absent}
        is_plain = self.rope_type == "default"
        return {
            "rope_theta": self.rope_theta,
            "rope_scaling": None if is_plain else {"rope_type": self.rope_type, **scaling},
        }

    def magnitude(self, mscale: float = 1.0) -> float:
        """YaRN's ``0.1 mscale ln(factor) + 1``; 1 where the context is not extended."""
        return 0.1 * mscale * log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, dim: int) -> torch.Tensor:
        """Radians a position of each pair, (dim / 2,) float32."""
        rates = 1.0 / self.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if self.rope_type == "llama3":
            rotations = self.original_max_position_embeddings * rates / (2 * pi)
            span = self.high_freq_factor - self.low_freq_factor
            ratio = ((rotations - self.low_freq_factor) / span).clamp(0, 1)
            return (1 - ratio) * rates / self.factor + ratio * rates
        if self.rope_type == "yarn":
            low, high = (self._pair_of(dim, beta) for beta in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = floor(low), ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            span = high - low or 0.001
            ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
            return ramp * rates / self.factor + (1 - ramp) * rates
        return rates / self.factor

    def _pair_of(self, dim: int, rotations: float) -> float:
        """The pair, not rounded, that turns ``rotations`` times in the original context."""
        wavelength = self.original_max_position_embeddings / (2 * pi * rotations)
        return dim * log(wavelength) / (2 * log(self.rope_theta))

    def table(self, dim: int, num_positions: int) -> torch.Tensor:
        """cos_sin (num_positions, dim) float32: dim / 2 cosines, then as many sines."""
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * self.frequencies(dim)
        return torch.cat((angles.cos(), angles.sin()), 1) * self._attention_factor()

    def _attention_factor(self) -> float:
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            ratio = self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
            return self.attention_factor or ratio
        return self.attention_factor or self.magnitude()
