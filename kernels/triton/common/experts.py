"""Weights of experts as arguments (device/experts.py)."""

from kernelcat.catalog.spec import Problem
from kernelcat.kernels.triton.common.architectures import illegal_float8
from kernelcat.reference._experts import FP4, FP8
from kernelcat.runtime.gpu import Gpu


def weight_types(problem: Problem) -> tuple[str, str]:
    """Element types by which kernels load the weights and their scales.

    4-bit codes and scales are bytes, or words of a register in tiles. Weights in 16 bits have no
    scales.
    """
    format = problem["format"]
    if format in FP4:
        loaded = "int32" if problem["packing"] == "tiles" else "uint8"
        return loaded, loaded
    return FP8 if format == "fp8" else format, "float32"


def illegal_type(problem: Problem, gpu: Gpu) -> str | None:
    """Why kernels cannot convert the types of weights or activations."""
    uses_float8 = problem["act_dtype"] == FP8 or problem["format"] == "fp8"
    return illegal_float8(gpu) if uses_float8 else None
