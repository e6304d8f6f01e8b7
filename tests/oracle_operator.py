"""Operators that need no GPU: an entry's oracle, called as ``kernelcat.get(name)`` is called."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernelcat import catalog
from kernelcat.call import signature
from kernelcat.catalog.spec import Tensor


class OracleOperator:
    """An operator on CPU tensors that computes its results by the entry's oracle.

    Tensors of float32 may stand in for bfloat16 ones: the oracle gets them unrounded, and its
    results are not rounded either.
    """

    def __init__(self, name: str) -> None:
        self.entry = catalog.entry(name)

    def __call__(self, *arrays: Any, out: Any = None, **axes: Any) -> tuple[Any, ...]:
        inputs, axes = signature.arrange(self.entry, arrays, axes)
        outs = signature.outputs(self.entry, out)
        tensors = self.entry.inputs + self.entry.outputs[: len(outs)]
        arguments = dict(zip(tensors, (*inputs, *outs), strict=True))
        typed = [_as_typed(tensor, array) for tensor, array in arguments.items()]
        infos = signature.describe(self.entry, typed[: len(inputs)], typed[len(inputs) :])
        problem = signature.infer(self.entry, infos, axes)
        values = {t.name: _values(t, array) for t, array in arguments.items() if array is not None}
        output_arrays = self.entry.oracle(problem, values)
        contiguous = [np.ascontiguousarray(output_arrays[t.name]) for t in self.entry.outputs]
        results = [torch.from_numpy(array) for array in contiguous]
        if outs:
            for array, result in zip(outs, results, strict=True):
                array.copy_(result)
            return outs
        if inputs[0].dtype == torch.float32:
            return tuple(results)
        types = [getattr(torch, t.dtype_of(problem)) for t in self.entry.outputs]
        return tuple(result.to(dtype) for result, dtype in zip(results, types, strict=True))

    def bind(self, *arrays: Any, **named: Any) -> Any:
        """A function without arguments that leaves its results in its attribute ``out``."""

        def run() -> None:
            run.out = self(*arrays, **named)

        return run


def _as_typed(tensor: Tensor, array: Any) -> Any:
    """``array``, in bfloat16 if it is a float32 array that stands in for one of another type."""
    if array is None or array.dtype != torch.float32 or tensor.dtype == "float32":
        return array
    return array.bfloat16()


def _values(tensor: Tensor, array: Any) -> np.ndarray:
    return (array if tensor.dtype == "int32" else array.float()).numpy()
