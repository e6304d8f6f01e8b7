"""What launches over several ranks share: the windows and the places in them."""

from __future__ import annotations

from kernelcat.catalog.implementation import Rank, Window
from kernelcat.jit import triton
from kernelcat.reference.all_reduce import MAX_RANKS
from kernelcat.runtime.gpu import Gpu

ERROR_OFFSET, WORDS_OFFSET, SLOTS_OFFSET = 2048, 67712, 167839872
"""Bytes of a window (``kernelcat/window.cuh``) before its error, flagged words and slots."""
SENDER_BYTES, SLOT_BYTES, EPOCHS = 2 << 20, 64 << 20, 512
"""Bytes of the flagged words of one sender, and of the slots, in half of a window; epochs."""
TRIES = 5_000_000
"""How often a program looks for words before it gives up: seconds."""
NVLINK, TRIP_US, PROGRAM_RATE = 370e9, 1.5, 4e9
"""Bytes per second over the link and of a program, and microseconds of a trip to a peer."""


def window_arguments() -> dict[str, triton.Argument]:
    """The launching rank, and all ranks' windows from its own on."""
    windows = {f"window{shift}": triton.Argument("i64", (Window(shift=shift),), 16)
               for shift in range(MAX_RANKS)}  # fmt: skip
    return {"rank": triton.Argument("i32", (Rank(),)), **windows}


def wire_us(num_bytes: float, num_programs: int) -> float:
    """Microseconds in which so many programs send ``num_bytes`` to other GPUs."""
    return num_bytes / min(NVLINK, PROGRAM_RATE * max(num_programs, 1)) * 1e6


def rounds_of_tokens(tokens: int, ranks: int, row_bytes: int) -> list[tuple[int, int]]:
    """First token and number of tokens of the launches, each with as many as the slots hold."""
    at_once = SLOT_BYTES // (ranks * row_bytes)
    return [(begin, min(at_once, tokens - begin)) for begin in range(0, tokens, at_once)]


def why_not_resident(num_programs: int, gpu: Gpu) -> str | None:
    """Programs wait for each other across ranks, so all of them must run at once."""
    if num_programs > gpu.sms:
        return f"{num_programs} programs wait for each other on {gpu.sms} SMs"
    return None
