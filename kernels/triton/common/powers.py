"""Powers of two: Triton's ranges and tensors have no other sizes."""


def next_power_of_two(size: int) -> int:
    """The least power of two that is no less than ``size``; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
