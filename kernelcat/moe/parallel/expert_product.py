"""Grouped products of rows of which only a part comes: kernels for the rows that come.

A rank's arrays have room for the tokens of all ranks with all their experts. On average a rank's
experts serve one in ``ranks`` of these assignments. A kernel that is chosen for full arrays has
tiles for ``ranks`` times the rows of an expert, and multiplies empty ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import kernelcat
from kernelcat import catalog
from kernelcat.call import evidence, signature
from kernelcat.call.choice import MEASURED_WHY, choose
from kernelcat.call.operator import Op
from kernelcat.catalog.cost_model import least_estimate
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.moe.ops import launchers_of
from kernelcat.runtime import gpu
from kernelcat.runtime.gpu import Gpu


@dataclass(frozen=True)
class PartialProduct:
    """The operator ``product`` (`moe_gemm`) for arrays of which one row in ``ranks`` is served.

    ``chosen`` are operators of one kernel each, by the sizes of the call, which leave ``spare`` SMs
    to others.
    """

    product: Any
    ranks: int
    chosen: dict[Any, Op] = field(default_factory=dict)
    spare: int = 0

    def __call__(self, a: Any, w: Any, *args: Any, tokens: int, **named: Any) -> Any:
        """As `moe_gemm`, whose arguments these are."""
        if not isinstance(self.product, Op):  # an outline
            return self.product(a, w, *args, tokens=tokens, **named)
        key = (tokens, w.shape, w.dtype, named.get("activation"))
        op = self.chosen.get(key)
        if op is None:
            entry = self.product.entry
            inputs, axes = signature.arrange(entry, (a, w, *args), {"tokens": tokens, **named})
            problem = signature.infer(entry, signature.describe(entry, inputs, ()), axes)
            implementation, config = kernel_for(problem, self.ranks, gpu.detect(a.device.index))
            op = self.chosen[key] = kernelcat.get(
                problem.entry,
                language=implementation.language,
                variant=implementation.variant,
                config=config,
            )
        if self.spare:
            op = op.leaving(self.spare)
        return op(a, w, *args, tokens=tokens, **named)

    def leaving(self, sms: int) -> PartialProduct:
        """This product with kernels that run on ``sms`` SMs fewer, which are free for others."""
        return replace(self, spare=sms)

    def launchers(self) -> list[Any]:
        """What `Decoder.launchers` collects."""
        return launchers_of(*self.chosen.values())


def kernel_for(problem: Problem, ranks: int, machine: Gpu) -> tuple[Implementation, Config]:
    """What serves ``problem`` where one row in ``ranks`` is served.

    That is what was measured for so many fewer tokens, with skewed routing, as routers have it;
    where nothing was, the configuration with the least estimate for them, of the implementation
    that dispatch chooses.
    """
    tokens = -(-problem["tokens"] // ranks)
    served = Problem.of(problem.entry, **{**problem.values, "tokens": tokens, "skew": "zipf"})
    entry = catalog.entry(problem.entry)
    rows, refuted = evidence.of_entry(entry.name)
    decision = choose(entry, served, machine, rows, refuted=refuted)
    least = least_estimate(decision.implementation, served, machine)
    if decision.why in MEASURED_WHY or least is None:
        return decision.implementation, decision.config
    return decision.implementation, least[1]
