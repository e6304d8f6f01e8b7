"""The launches of a program as plain data: everything but the code that reaches the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernelcat.catalog.implementation import Param, Program, Step, TensorMap

Identify = Callable[[str], str | int]
"""From the name of a tensor or a workspace to the name or number that stands in the result."""


def values(program: Program, places: Mapping[str, int] | None = None) -> list[Any]:
    """The launches of a program, in order, and the sizes of its workspaces in bytes.

    ``places`` maps the name of a tensor or a workspace to a number, which stands for the name in
    the result; then renaming a tensor or a workspace changes nothing.
    """

    def identify(name: str) -> str | int:
        return name if places is None else places.get(name, name)

    workspaces = sorted(([identify(n), size] for n, size in program.workspaces.items()), key=repr)
    return [[_launch(step, identify) for step in program.steps], workspaces]


def _launch(step: Step, identify: Identify) -> list[Any]:
    shape = [step.grid, step.block, step.shared_bytes, step.cluster, step.programmatic]
    params = [_param(param, identify) for param in step.params]
    return [step.source.language, step.source.instance(), shape, params]


def _param(param: Param, identify: Identify) -> list[Any]:
    fields = dict(vars(param))
    if isinstance(param, TensorMap):
        fields["l2_promotion"] = param.promoted_bytes
    if "tensor" in fields:
        fields["tensor"] = identify(fields["tensor"])
    return [type(param).__name__, sorted(fields.items())]
