"""What launches over several ranks share: windows, and thread blocks that run at once."""

from __future__ import annotations

from kernelcat.catalog.implementation import Param, Rank, Window
from kernelcat.reference.all_reduce import MAX_RANKS, SM_BLOCKS
from kernelcat.runtime.gpu import Gpu

SHARED_BYTES = 96 << 10
"""Most shared memory of a thread block, so that an SM holds two."""
HALF_BYTES = 64 << 20
"""Bytes of tiles, and of slots, in half of a window."""
FLAGGED_WORDS = 1 << 17
"""Flagged words from each rank in half of a window."""
RING_TILES = 4
"""Tiles of a ring."""

ERROR_OFFSET, WORDS_OFFSET, SLOTS_OFFSET = 2048, 67712, 167839872
"""Bytes of a window (``kernelcat/window.cuh``) before its error, flagged words and slots."""
SENDER_BYTES, EPOCHS = 16 * FLAGGED_WORDS, 512
"""Bytes of the flagged words from each rank in half of a window; copies of the epoch."""
TRIES = 5_000_000
"""How often kernels in Triton and CuTe look for words before they give up: seconds."""

NVLINK = 370e9
"""Bytes per second from one GPU to another that a copy reaches."""
TRIP_US = 1.5
"""From a store to a peer's memory until the peer has seen it."""
BLOCK_RATE = 8e9
"""Bytes per second that a thread block sends."""


def window_params() -> tuple[Param, ...]:
    """The last parameters of a kernel: the launching rank, and all ranks' windows from its own."""
    return (Rank(), *(Window(shift=shift) for shift in range(MAX_RANKS)))


def why_not_resident(num_blocks: int, gpu: Gpu) -> str | None:
    """Thread blocks wait for each other across ranks, so all of them must run at once."""
    if num_blocks > SM_BLOCKS * gpu.sms:
        return f"{num_blocks} thread blocks are more than {SM_BLOCKS} for each of {gpu.sms} SMs"
    return None


def wire_us(num_bytes: float, num_blocks: int) -> float:
    """Microseconds in which so many thread blocks send ``num_bytes`` to other GPUs."""
    return num_bytes / min(NVLINK, BLOCK_RATE * num_blocks) * 1e6


def rounds_of_tokens(tokens: int, ranks: int, row_bytes: int) -> list[tuple[int, int]]:
    """First token and number of tokens of the launches, each with as many as the slots hold."""
    at_once = HALF_BYTES // (ranks * row_bytes)
    return [(begin, min(at_once, tokens - begin)) for begin in range(0, tokens, at_once)]


def why_no_slots(ranks: int, row_bytes: int) -> str | None:
    """Why the slots do not hold a token of each rank, or None."""
    if ranks * row_bytes > HALF_BYTES:
        return f"rows of {row_bytes} bytes do not fit into slots of {HALF_BYTES} for {ranks} ranks"
    return None
