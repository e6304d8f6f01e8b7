"""`squared_relu`: out = max(x, 0)^2, the activation of Primer (So et al., 2021) and Nemotron."""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Entry, Peer, Problem, Tensor, Tolerance
from kernelcat.reference._peers import import_torch


def _oracle(problem, arrays):
    """The definition, in operators that NumPy and CuPy share. All arrays are float32 (M, N)."""
    return {"out": arrays["x"].clip(0) ** 2}


def _torch():
    """The peer: torch's operators, fused by ``torch.compile``."""
    torch = import_torch("torch")

    @torch.compile(fullgraph=True, dynamic=False)
    def run(x, out):
        out.copy_(torch.relu(x.float()).square())

    return lambda problem, arrays: lambda: run(arrays["x"], arrays["out"])


def _problem(m: int, n: int) -> Problem:
    return Problem.of("squared_relu", M=m, N=n, dtype="bfloat16")


ENTRY = Entry(
    name="squared_relu",
    summary="max(x, 0)^2 of each element.",
    axes=(
        Axis.size("M", "rows", 0, 200),
        Axis.size("N", "columns", 0, 300),
        Axis.choice("dtype", "element type", "bfloat16", "float16"),
    ),
    inputs=(Tensor("x", ("M", "N"), "dtype", "the values"),),
    outputs=(Tensor("out", ("M", "N"), "dtype", "their squares, 0 for negative values"),),
    oracle=_oracle,
    make_inputs=lambda problem, normal: {"x": normal((problem["M"], problem["N"]))},
    tolerance={"bfloat16": Tolerance(1e-6, 2**-8), "float16": Tolerance(1e-6, 2**-10)},
    flops=lambda problem: 2 * problem["M"] * problem["N"],
    bytes_moved=lambda problem: 2 * problem["M"] * problem["N"] * dtypes.itemsize(problem["dtype"]),
    problems={"64x24576": _problem(64, 24576), "8192x24576": _problem(8192, 24576)},
    peers=(Peer("torch", _torch),),
)
