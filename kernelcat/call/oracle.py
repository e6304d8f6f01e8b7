"""Oracles as functions on CPU arrays: what `kernelcat.reference("gemm")` returns.

An oracle is the definition that every kernel of an entry is checked against. It runs on NumPy, so
it needs no GPU and no compiler, and is as slow as that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kernelcat import catalog, dtypes
from kernelcat.call import arrays, debugging, signature
from kernelcat.call.arrays import ArrayInfo
from kernelcat.catalog.spec import EXACT, ElementType, Entry, Problem, Tensor
from kernelcat.errors import InvalidArgument

STAND_IN = "bfloat16"
"""The 16-bit type that a float32 array stands for."""


def reference(name: str) -> Oracle:
    """The oracle of the entry called ``name``; raises ``UnknownName``."""
    return Oracle(catalog.entry(name))


class Oracle:
    """The definition of an entry as a function on CPU arrays of NumPy or torch.

    ``oracle(a, b, out=d)`` takes the same arguments as ``kernelcat.get(name)`` and returns the
    output, or a tuple of several outputs, rounded to their element types; None stands for an
    optional output that is absent. Where the entry updates an output, all outputs must be passed
    as ``out``.

    Float32 arrays may stand for arrays of 16 bits: then nothing is rounded, neither inputs nor
    outputs, and all outputs of 16 bits are float32.

    Raises
    ------
    InvalidArgument
        An argument does not fit the specification, or is not on the CPU.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __repr__(self) -> str:
        return f"<kernelcat.reference {self.entry.name}>"

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        entry = self.entry
        inputs, axes = signature.arrange(entry, args, named)
        outs = signature.outputs(entry, out)
        passed = dict(zip(entry.inputs + entry.outputs[: len(outs)], (*inputs, *outs), strict=True))
        passed = {tensor: array for tensor, array in passed.items() if array is not None}
        infos = {tensor.name: _describe(entry, tensor, array) for tensor, array in passed.items()}
        problem = signature.infer(entry, infos, axes)
        if debugging.is_on():
            debugging.check(
                entry, problem, lambda tensor: _decoded(problem, tensor, passed[tensor])
            )
        wide = [tensor for tensor, array in passed.items() if _is_stand_in(entry, tensor, array)]
        is_wide = bool(wide)
        results = entry.oracle(_widened(problem, wide), _values(entry, problem, passed))
        made = tuple(
            _array(results[tensor.name], _result_dtype(tensor, problem, is_wide), inputs[0])
            if tensor.present(problem)
            else None
            for tensor in entry.outputs
        )
        for target, source in zip(outs, made, strict=False):
            if target is not None:
                target[...] = source
        made = outs or made
        return made[0] if len(entry.outputs) == 1 else made


def _is_stand_in(entry: Entry, tensor: Tensor, array: Any) -> bool:
    """Whether ``array`` is a float32 array that stands for one of 16 bits."""
    if str(array.dtype).removeprefix("torch.") != "float32":
        return False
    if isinstance(tensor.dtype, ElementType):
        legal = set(dict(tensor.dtype.types).values())
    elif tensor.dtype in entry.axis_names:
        legal = set(map(str, entry.axis(tensor.dtype).values))
    else:
        legal = {tensor.dtype}
    return "float32" not in legal and STAND_IN in legal


def _widened(problem: Problem, wide: list[Tensor]) -> Problem:
    """``problem`` with float32 as the element type of the tensors ``wide``.

    So an oracle that decodes, encodes or rounds values of that type rounds nothing.
    """
    types = {str(tensor.dtype): "float32" for tensor in wide if tensor.dtype in problem.values}
    return Problem.of(problem.entry, **{**problem.values, **types})


def _describe(entry: Entry, tensor: Tensor, array: Any) -> ArrayInfo:
    try:
        info = arrays.describe(array)
    except InvalidArgument as error:
        raise InvalidArgument(f"{entry.name}: {tensor.name} {error}") from None
    if info.device != "cpu":
        raise InvalidArgument(
            f"{entry.name}: {tensor.name} is on {info.device}; the oracle takes arrays on the CPU, "
            f'kernelcat.get("{entry.name}") takes arrays on a GPU'
        )
    return replace(info, dtype=STAND_IN) if _is_stand_in(entry, tensor, array) else info


def _decoded(problem: Problem, tensor: Tensor, array: Any) -> np.ndarray:
    """Values of ``array``: integers, or float32."""
    if str(array.dtype).removeprefix("torch.") == "float32":
        return _numpy(array, "float32")
    dtype = tensor.dtype_of(problem)
    return np.asarray(dtypes.decode(_numpy(array, dtypes.STORAGE[dtype]), dtype))


def _values(entry: Entry, problem: Problem, passed: Mapping[Tensor, Any]) -> dict[str, Any]:
    """What the oracle takes, by tensor name."""
    values = {}
    for tensor, array in passed.items():
        dtype = tensor.dtype_of(problem)
        if _is_stand_in(entry, tensor, array):
            values[tensor.name] = _numpy(array, "float32")
            continue
        stored = _numpy(array, dtypes.STORAGE[dtype])
        is_stored = tensor.as_stored or entry.tolerance_of(problem) == EXACT
        values[tensor.name] = stored if is_stored else dtypes.decode(stored, dtype)
    return values


def _numpy(array: Any, storage: str) -> np.ndarray:
    """A view of ``array`` as a NumPy array of dtype ``storage``, of the same shape."""
    if isinstance(array, np.ndarray):
        return array.view(storage)
    size = array.element_size()
    integer = getattr(sys.modules["torch"], f"int{8 * size}")
    viewed: np.ndarray = array.detach().view(integer).numpy()
    return viewed.view(storage)


def _result_dtype(tensor: Tensor, problem: Problem, is_wide: bool) -> str:
    dtype = tensor.dtype_of(problem)
    return "float32" if is_wide and dtype in ("bfloat16", "float16") else dtype


def _array(result: np.ndarray, dtype: str, like: Any) -> Any:
    """``result``, float32 values or a storage array, in element type ``dtype`` and like's library.

    ``like`` is an array of NumPy or torch.
    """
    storage = np.dtype(dtypes.STORAGE[dtype])
    is_float = result.dtype.kind == "f" and result.dtype != storage
    stored = np.ascontiguousarray(dtypes.encode(result, dtype) if is_float else result)
    if isinstance(like, np.ndarray):
        return stored.view(arrays.numpy_dtype(dtype))
    torch = sys.modules["torch"]
    integers = torch.from_numpy(stored.view(f"int{8 * storage.itemsize}"))
    return integers.view(getattr(torch, dtype))
