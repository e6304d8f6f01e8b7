"""Calls without data: which problem a call would be, and arrays of its outputs' shapes.

A program that runs on such calls, with torch's tensors on the device ``meta``, tells every problem
that it will ask for. Nothing is computed, and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelcat import catalog
from kernelcat.call import signature
from kernelcat.catalog.spec import Problem


class Outline:
    """The entry called ``name`` as a function on torch's tensors that computes nothing.

    ``outline(a, b, out=d)`` takes the same arguments as ``kernelcat.get(name)``, passes the problem
    to ``tell``, and returns ``out``, or outputs like those of the call on the device of the first
    input, without values.

    Raises
    ------
    UnknownName
        There is no such entry.
    InvalidArgument
        An argument does not fit the specification.
    """

    def __init__(self, name: str, tell: Callable[[Problem], object]) -> None:
        self.entry, self._tell = catalog.entry(name), tell

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        import torch

        entry = self.entry
        inputs, axes = signature.arrange(entry, args, named)
        outs = signature.outputs(entry, out)
        problem = signature.infer(entry, signature.describe(entry, inputs, outs), axes)
        self._tell(problem)
        if out is not None:
            return out
        like = next(array for array in inputs if array is not None)
        made = tuple(
            like.new_empty(
                tensor.extents(problem.values), dtype=getattr(torch, tensor.dtype_of(problem))
            )
            if tensor.present(problem)
            else None
            for tensor in entry.outputs
        )
        return made[0] if len(made) == 1 else made
