"""The ring of stages between a warp that loads and warpgroups that multiply (device/ring.py)."""

from kernelcat.runtime.gpu import Gpu

CONSUMERS = 2
"""Warpgroups that multiply, of `gemm` and `multicast_gemm`."""
CONSUMER_WARPS = 4
MIN_STAGES, MAX_STAGES = 3, 8
BARRIER_BYTES = 1024
"""Shared memory kept for barriers."""


def num_stages(stage_bytes: int, d_bytes: int, gpu: Gpu) -> int:
    """As many stages as fit in shared memory beside the ``d_bytes`` through which D is stored."""
    return int(min((gpu.shared_bytes - BARRIER_BYTES - d_bytes) // stage_bytes, MAX_STAGES))


def illegal_stages(stages: int, gpu: Gpu) -> str | None:
    if stages < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    return None
