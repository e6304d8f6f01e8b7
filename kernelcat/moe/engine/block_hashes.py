"""Hashes by which full blocks of tokens are found again.

The hash of a block covers the block's tokens and the hash of the block before, thus all tokens up
to the block's end: keys and values depend on all of them. The first block's parent is a hash of the
request's salt, so requests with different salts share nothing. The hash is cryptographic: nobody
can make a prompt that is served with another prompt's keys and values.

Chained hashes of blocks follow the design of vLLM's version 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], page_size: int, salt: str = ""
) -> None:
    """Appends the hashes of those full blocks of ``tokens`` that ``hashes`` does not have yet."""
    for start in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
        parent = hashes[-1] if hashes else blake2b(salt.encode(), digest_size=HASH_BYTES).digest()
        block = array("q", tokens[start : start + page_size]).tobytes()
        hashes.append(blake2b(parent + block, digest_size=HASH_BYTES).digest())
