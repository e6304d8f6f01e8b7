"""What a program launches, as plain data: all that reaches the driver but the code itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kernelcat.catalog.implementation import Param, Program, Step, TensorMap


def values(program: Program, places: Mapping[str, int] | None = None) -> list[Any]:
    """The launches of a program, in order, and the bytes of its workspaces.

    With ``places`` tensors and workspaces are told by number instead of by name.
    """

    def named(name: str) -> Any:
        return name if places is None else places.get(name, name)

    workspaces = sorted(([named(n), size] for n, size in program.workspaces.items()), key=repr)
    return [[_launch(step, named) for step in program.steps], workspaces]


def _launch(step: Step, named: Any) -> list[Any]:
    where = [step.grid, step.block, step.shared_bytes, step.cluster, step.programmatic]
    params = [_param(param, named) for param in step.params]
    return [step.source.language, step.source.instance(), where, params]


def _param(param: Param, named: Any) -> list[Any]:
    told = asdict(param)
    if isinstance(param, TensorMap):
        told["l2_promotion"] = param.promoted_bytes
    if "tensor" in told:
        told["tensor"] = named(told["tensor"])
    return [type(param).__name__, sorted(told.items())]
