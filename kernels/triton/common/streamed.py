"""Products of a few tokens and streamed weights, transposed: what their launches share."""

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.kernels.triton.common.product import MIN_BYTES_IN_FLIGHT
from kernelcat.runtime.gpu import Gpu

MIN_BLOCK_T, MAX_BLOCK_T = 16, 64
"""Tokens that tensor cores multiply at a time, at least and at most."""
MAX_SUMS = 128
"""Partial sums of a thread that stay in registers."""
RESERVED_BYTES = 1024
"""Shared memory of a program besides its stages."""
LAST_SPLIT_US = 1.5
"""Time until the last split of a tile has all partial sums."""
SM_WARPS = 64


def block_t(tokens: int) -> int:
    """Tokens of a tile."""
    return min(max(next_power_of_two(tokens), MIN_BLOCK_T), MAX_BLOCK_T)


def unpromising_splits(
    splits: int, num_tiles: int, depth: int, block_k: int, tile_size: int, warps: int, gpu: Gpu
) -> str | None:
    """Why splitting ``depth`` columns into ``splits`` parts is not worth a try.

    ``num_tiles`` tiles have ``tile_size`` elements each.
    """
    if splits == 1:
        return None
    if depth < 2 * block_k * splits:
        return f"{depth} columns are too few for split_k={splits}"
    if num_tiles * splits > 4 * gpu.sms:
        return f"{num_tiles} tiles fill {gpu.sms} SMs without split_k={splits}"
    sums = tile_size * splits // (32 * warps)
    if sums > MAX_SUMS:
        return f"{sums} partial sums a thread are more than {MAX_SUMS}, which registers hold"
    return None


def stream_us(
    bytes_moved: int, num_programs: int, stage_bytes: int, stages: int, warps: int, gpu: Gpu
) -> float:
    """The memory's time, longer where few bytes are in flight or waves are not full.

    Where some SMs are idle, each of the others loads at most a quarter faster.
    """
    ring_bytes = stage_bytes * stages
    residents = min(gpu.shared_bytes // ring_bytes, SM_WARPS // warps) or 1
    per_sm = min(max(num_programs / gpu.sms, 1.0), residents)
    busy = min(num_programs / gpu.sms, 1.0)
    waves = num_programs / (residents * gpu.sms)
    filled = waves / ceil(waves) if waves > 1 else 1.0
    rate = min(per_sm * (ring_bytes - stage_bytes) / MIN_BYTES_IN_FLIGHT, 1.25)
    return copy_us(bytes_moved, gpu, 0.9 * filled * min(1.0, busy * rate))
