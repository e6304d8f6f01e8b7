"""Layout of the result, and which thread blocks of a sequence have tokens.

The sizes of a row of the cache are in `kernelcat.reference._mla_row`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernelcat.reference._mla_row import LATENT


def out_layout(vector, rows):
    """(vector, LATENT / vector, rows): rows of results in vectors."""
    return cute.make_layout(
        (vector, LATENT // vector, rows),
        stride=(1, vector, cute.assume(Int64(LATENT), divby=LATENT)),
    )


@cute.jit
def used_splits(kv_len: Int32, block_n: cutlass.Constexpr, num_splits: Int32):
    """Splits that have a tile of tokens; 1 for an empty sequence, whose result is still written."""
    return cutlass.max(cutlass.min(cute.ceil_div(kv_len, block_n), num_splits), 1)
