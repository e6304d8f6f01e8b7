"""Architectures that variants serve, and Blackwell's variants of Hopper's kernels."""

from dataclasses import replace

from kernelcat.catalog.implementation import Implementation
from kernelcat.runtime.gpu import Gpu

HOPPER, BLACKWELL = ("sm_90a",), ("sm_100a", "sm_103a")
FLOAT8 = ("sm_89+",)
"""Those with an instruction that converts to float8_e4m3fn."""


def illegal_float8(gpu: Gpu) -> str | None:
    """Why kernels with float8_e4m3fn arrays cannot run."""
    if int(gpu.arch.removeprefix("sm_").rstrip("af")) < 89:
        return f"Triton converts no float8_e4m3fn on {gpu.arch}, but from sm_89 on"
    return None


def on_blackwell(hopper: Implementation, opcode: str) -> Implementation:
    """The variant of the same source for Blackwell, where Triton multiplies by tcgen05.

    ``opcode`` is the prefix of the SASS instruction that proves it.
    """
    techniques = {name: proof for name, proof in hopper.techniques.items() if name != "wgmma"}
    return replace(
        hopper,
        variant=f"{hopper.variant}_blackwell",
        archs=BLACKWELL,
        techniques=techniques | {"tcgen05": opcode},
        unverified="needs a Blackwell GPU",
    )
