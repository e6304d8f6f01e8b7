"""Which tokens of a thread block use an expert: a bit for each token.

A token uses an expert at most once. So the number of an expert's assignments is a population count,
and the rank of an assignment is the population count of the bits of earlier tokens.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

WORD_TOKENS = 32


def masks_layout(block_tokens: int, max_experts: int):
    """(max_experts, words): word w has the tokens from 32 * w on."""
    return cute.make_layout((max_experts, -(-block_tokens // WORD_TOKENS)))


@cute.jit
def clear(
    sMasks: cute.Tensor,  # (max_experts, words), written
    threads: cutlass.Constexpr[int],
):
    """Clears all masks; for all threads of the thread block."""
    max_experts, words = sMasks.shape
    for expert in cutlass.range(cute.arch.thread_idx()[0], max_experts, threads, unroll=1):
        for w in cutlass.range_constexpr(words):
            sMasks[expert, w] = Uint32(0)


@cute.jit
def add(
    sMasks: cute.Tensor,  # (max_experts, words), changed
    token: Int32,
    expert: Int32,
):
    """Sets the bit of a token that uses the expert."""
    word = sMasks[None, token // WORD_TOKENS].iterator + expert
    cute.arch.atomic_or(word, Uint32(1) << Uint32(token % WORD_TOKENS))


@cute.jit
def count(
    sMasks: cute.Tensor,  # (max_experts, words)
    expert: Int32,
):
    """Tokens that use the expert."""
    total = Uint32(0)
    for w in cutlass.range_constexpr(sMasks.shape[1]):
        total += cute.arch.popc(sMasks[expert, w])
    return total


@cute.jit
def rank(
    sMasks: cute.Tensor,  # (max_experts, words)
    token: Int32,
    expert: Int32,
):
    """Tokens before ``token`` that use the expert."""
    total = Uint32(0)
    for w in cutlass.range_constexpr(sMasks.shape[1]):
        num_bits = token - WORD_TOKENS * w
        earlier = Uint32(0)
        if num_bits >= WORD_TOKENS:
            earlier = Uint32(0xFFFFFFFF)
        elif num_bits > 0:
            earlier = (Uint32(1) << Uint32(num_bits)) - Uint32(1)
        total += cute.arch.popc(sMasks[expert, w] & earlier)
    return Int32(total)
