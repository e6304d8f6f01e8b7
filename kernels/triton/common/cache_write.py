"""Kernels that write new tokens into a paged cache: what their launches share."""

from kernelcat.kernels.triton.common.powers import next_power_of_two

MAX_CHUNK = 1024
"""Comparisons of a token with the start of a sequence that a program makes at once."""
PROGRAM_START_US = 0.03
"""Time that an SM takes to start a program."""


def chunk(batch: int, tokens: int = 1) -> int:
    """Sequences whose starts a program of ``tokens`` tokens loads at once."""
    return min(next_power_of_two(batch), MAX_CHUNK // tokens)


def program_us(elements: float) -> float:
    """Time of a program whose threads have ``elements`` elements each, mostly waits for memory."""
    return 1.0 + 0.03 * elements
