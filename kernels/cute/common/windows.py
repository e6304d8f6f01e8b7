"""Windows of ranks: words that are their own flags in slots, and words with flags.

kernels/cuda/include/kernelcat/row_slots.cuh has the protocol of slots, window.cuh that of windows.
Windows are given by their addresses. Every access is relaxed, in the scope of the system: each
word, and each flagged word of 64 bits, arrives whole, and in no order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelcat.kernels.cuda.common.windows import (
    EPOCHS,
    ERROR_OFFSET,
    HALF_BYTES,
    SENDER_BYTES,
    SLOTS_OFFSET,
    TRIES,
    WORDS_OFFSET,
)
from kernelcat.reference.all_reduce import MAX_RANKS


@cute.jit
def load_word(address: Int64):
    """The word at ``address``."""
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.u32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


@cute.jit
def store_word(address: Int64, word: Uint32):
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.u32 [{$r0}], {$r1};", read_only_args=[address, word]
    )


@cute.jit
def load_words(address: Int64):
    """The four words at ``address``, a multiple of 16 bytes."""
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.v4.u32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Uint32, Uint32, Uint32, Uint32],
        read_only_args=[address],
    )


@cute.jit
def store_words(address: Int64, w0: Uint32, w1: Uint32, w2: Uint32, w3: Uint32):
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.v4.u32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address, w0, w1, w2, w3],
    )


@cute.jit
def load_flagged(address: Int64):
    """The word at ``address``, and the flag after it."""
    return cute.arch.inline_ptx(
        """{
        .reg .b64 both;
        ld.relaxed.sys.global.u64 both, [{$r0}];
        mov.b64 { {$w0}, {$w1} }, both;
        }""",
        write_only_types=[Uint32, Uint32],
        read_only_args=[address],
    )


@cute.jit
def store_flagged(address: Int64, word: Uint32, flag: Uint32):
    cute.arch.inline_ptx(
        """{
        .reg .b64 both;
        mov.b64 both, { {$r1}, {$r2} };
        st.relaxed.sys.global.u64 [{$r0}], both;
        }""",
        read_only_args=[address, word, flag],
    )


@cute.jit
def begin_epoch(window: Int64, copy: Int32):
    """The epoch of this launch, by a copy of the count of launches; and how often to look for what
    does not come."""
    epoch = load_word(window + 4 * copy) + Uint32(1)
    tries = Int32(TRIES)
    if load_word(window + ERROR_OFFSET) != Uint32(0):
        tries = Int32(0)
    return epoch, tries


@cute.jit
def end_epoch(window: Int64, epoch: Uint32, threads: cutlass.Constexpr):
    """Counts the launch; all threads call this, after they have called `begin_epoch`."""
    cute.arch.barrier()
    cta, num_ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    first = cta + cute.arch.thread_idx()[0] * num_ctas
    for copy in cutlass.range(first, EPOCHS, num_ctas * threads, unroll=1):
        store_word(window + 4 * copy, epoch)


@cute.jit
def slots_of(window: Int64, epoch: Uint32):
    """The address of the slots of an epoch."""
    return window + SLOTS_OFFSET + Int64(epoch & Uint32(1)) * HALF_BYTES


@cute.jit
def flagged_words_of(window: Int64, epoch: Uint32, sender: Int32):
    """The address of the flagged words of a sender in an epoch."""
    half = Int64(epoch & Uint32(1)) * (MAX_RANKS * SENDER_BYTES)
    return window + WORDS_OFFSET + half + Int64(sender) * SENDER_BYTES


@cute.jit
def report(window: Int64, missing: Int32, tries: Int32, left: Int32, source: Int32):
    """Names rank ``source`` where something is ``missing`` and ``tries`` is over."""
    if missing != 0 and left == 0 and tries > 0:
        store_word(window + ERROR_OFFSET, Uint32(1 + source))


@cute.jit
def on_wire(word: Uint32):
    """A word as it travels: a word that has arrived is not zero."""
    sent = ~word
    if sent == Uint32(0):
        sent = Uint32(0x80000000)
    return sent


@cute.jit
def send_vectors(
    first: Int64,
    step: cutlass.Constexpr,  # bytes from a vector to the next
    count: Int32,
    words: cute.Tensor,  # (4, n)
):
    """Sends ``count`` vectors, at most n, to a slot."""
    for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
        if i < count:
            store_words(first + i * step, *[on_wire(words[w, i]) for w in range(4)])


@cute.jit
def look_for_vectors(
    first: Int64,
    step: cutlass.Constexpr,  # bytes from a vector to the next
    count: Int32,
    words: cute.Tensor,  # (4, n)
):
    """Loads ``count`` vectors, at most n; returns 1 unless all have arrived."""
    missing = Int32(0)
    for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
        if i < count:
            w0, w1, w2, w3 = load_words(first + i * step)
            words[0, i], words[1, i], words[2, i], words[3, i] = ~w0, ~w1, ~w2, ~w3
            zero = Uint32(0)
            if w0 == zero or w1 == zero or w2 == zero or w3 == zero:
                missing = Int32(1)
    return missing


@cute.jit
def take_vectors(
    window: Int64,
    source: Int32,
    first: Int64,
    step: cutlass.Constexpr,  # bytes from a vector to the next
    count: Int32,
    words: cute.Tensor,  # (4, n), written
    tries: Int32,
):
    """Takes ``count`` vectors, at most n, which rank ``source`` sends; zeros stay behind.

    Returns what is left of ``tries``.
    """
    left = tries
    missing = look_for_vectors(first, step, count, words)
    while missing != 0 and left > 0:
        missing = look_for_vectors(first, step, count, words)
        left -= 1
    report(window, missing, tries, left, source)
    zero = Uint32(0)
    for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
        if i < count:
            store_words(first + i * step, zero, zero, zero, zero)
    return left


@cute.jit
def take_word(window: Int64, source: Int32, address: Int64, tries: Int32):
    """A word that rank ``source`` sends to a slot, and what is left of ``tries``."""
    left = tries
    word = load_word(address)
    while word == Uint32(0) and left > 0:
        word = load_word(address)
        left -= 1
    report(window, Int32(word == Uint32(0)), tries, left, source)
    store_word(address, Uint32(0))
    return ~word, left


@cute.jit
def wait_for_greeting(window: Int64, epoch: Uint32, source: Int32, tries: Int32):
    """Waits for the first flagged word of rank ``source``."""
    left = tries
    _, flag = load_flagged(flagged_words_of(window, epoch, source))
    while flag != epoch and left > 0:
        _, flag = load_flagged(flagged_words_of(window, epoch, source))
        left -= 1
    report(window, Int32(flag != epoch), tries, left, source)


@cute.jit
def vectors_of_thread(num_vectors: Int32, threads: cutlass.Constexpr):
    """How many of a row's vectors a thread has: those ``threads`` apart from its own index on."""
    return (num_vectors - cute.arch.thread_idx()[0] + threads - 1) // threads


@cute.jit
def load_vectors(
    row: cute.Tensor,  # (4, num_vectors), in global memory
    words: cute.Tensor,  # (4, n), written; zeros after the row
    threads: cutlass.Constexpr,
):
    """Loads a thread's vectors of a row, at most n."""
    words.fill(0)
    for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
        at = cute.arch.thread_idx()[0] + i * threads
        if at < row.shape[1]:
            cute.autovec_copy(row[None, at], words[None, i])
