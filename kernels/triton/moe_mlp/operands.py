"""What the variants of `moe_mlp` with products of their own share: routing, operands, constants."""

from __future__ import annotations

from kernelcat.catalog.composition import renamed
from kernelcat.catalog.implementation import ConfigValue, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton import moe_route
from kernelcat.kernels.triton.common.experts import weight_types
from kernelcat.reference._experts import FP8
from kernelcat.reference._moe_parts import ROUTER_NAMES, num_assignments, router
from kernelcat.reference.moe_route import ENTRY as ROUTER


def route(problem: Problem) -> Program:
    """The launch that writes ids and gates of all tokens."""
    return renamed(Program((moe_route.select_step(router(problem)),)), ROUTER_NAMES)


def routing_workspaces(problem: Problem) -> dict[str, int]:
    """Bytes of ids and gates."""
    return {"ids": 4 * num_assignments(problem), "gates": 4 * num_assignments(problem)}


def why_not_routed(problem: Problem) -> str | None:
    """Why the router does not serve the problem, or None."""
    if why := ROUTER.constraint(router(problem)):
        return f"the router: {why}"
    if num_assignments(problem) >= 1 << 31:
        return f"{num_assignments(problem)} assignments are more than 32-bit indices reach"
    return None


def pointers(problem: Problem, *names: str) -> dict[str, triton.Argument]:
    """Tensors and workspaces of 16-bit activations, and ids and gates."""
    types = {"ids": "int32", "gates": "float32", "y": "float32", "arrivals": "int32"}
    return {name: triton.pointer(name, types.get(name, problem["dtype"])) for name in names}


def weights(problem: Problem, number: int) -> dict[str, triton.Argument]:
    """Weights, scales, global scales and bias of a product."""
    w_type, scale_type = weight_types(problem)
    return {
        "w": triton.pointer(f"w{number}", w_type),
        "w_scale": triton.pointer(f"w{number}_scale", scale_type),
        "global_scale": triton.pointer(f"w{number}_global_scale", "float32"),
        "bias": triton.pointer(f"bias{number}", problem["dtype"]),
    }


def sizes(problem: Problem, number: int) -> dict[str, triton.Argument]:
    """top_k, and rows N and columns K of the weights of an expert."""
    hidden, inter = problem["hidden"], problem["inter"]
    n, k = (2 * inter, hidden) if number == 1 else (hidden, inter)
    return {
        "top_k": triton.integer(problem["top_k"], divisor=1),
        "N": triton.integer(n),
        "K": triton.integer(k),
    }


def constants(problem: Problem) -> dict[str, ConfigValue]:
    """What every product has compiled in."""
    return {
        "FORMAT": problem["format"],
        "IN_TILES": problem["packing"] == "tiles",
        "QUANTIZED": problem["act_dtype"] == FP8,
        "HAS_BIAS": problem["bias"],
    }
