"""Words in the windows of ranks: words that are their own flags in slots, and words with flags.

kernels/cuda/include/kernelcat/row_slots.cuh has the protocol of slots, window.cuh that of windows.
"""

import triton
import triton.language as tl

from kernelcat.kernels.cuda.common import windows

EPOCHS = tl.constexpr(windows.EPOCHS)
ERROR_OFFSET = tl.constexpr(windows.ERROR_OFFSET)
SENDER_BYTES = tl.constexpr(windows.SENDER_BYTES)
HALF_BYTES = tl.constexpr(windows.HALF_BYTES)
SLOTS_OFFSET = tl.constexpr(windows.SLOTS_OFFSET)
TRIES = tl.constexpr(windows.TRIES)
WORDS_OFFSET = tl.constexpr(windows.WORDS_OFFSET)


@triton.jit
def words_at(address, byte):
    """A pointer to 32-bit words at ``byte``, a multiple of 4, of the window at ``address``."""
    return (address + byte).to(tl.pointer_type(tl.int32))


@triton.jit
def slots_of(window, epoch):
    """The slots of an epoch."""
    slots = words_at(window, SLOTS_OFFSET + (epoch & 1).to(tl.int64) * HALF_BYTES)
    return tl.multiple_of(slots, 16)


@triton.jit
def flagged_words_of(window, epoch, sender):
    """The flagged words of a sender in an epoch: 64 bits each, the flag above the word."""
    byte = WORDS_OFFSET + ((epoch & 1) * 8 + sender).to(tl.int64) * SENDER_BYTES
    return (window + byte).to(tl.pointer_type(tl.int64))


@triton.jit
def begin_epoch(window, copy):
    """The epoch of this launch, by a copy of the count of launches; and how often to look for what
    does not come."""
    epoch = tl.load(words_at(window, copy * 4), volatile=True) + 1
    has_failed = tl.load(words_at(window, ERROR_OFFSET), volatile=True) != 0
    return epoch, tl.where(has_failed, 0, TRIES)


@triton.jit
def end_epoch(window, epoch, program, num_programs):
    """Count the launch: every program does, in its own copies."""
    tl.debug_barrier()  # all threads have read the epoch
    copies = program + tl.arange(0, EPOCHS) * num_programs
    tl.store(words_at(window, 0) + copies, epoch, mask=copies < EPOCHS)


@triton.jit
def report(window, tries, left, source):
    """Name rank ``source`` if it was waited for in vain: what was left of ``tries`` is over."""
    if (left == 0) & (tries > 0):
        tl.store(words_at(window, ERROR_OFFSET), 1 + source)


@triton.jit
def on_wire(words):
    """Words as they travel: a word that has arrived is not zero."""
    return tl.where(words == -1, -2147483648, ~words)


@triton.jit
def take(places, mask, tries):
    """The words at ``places`` once all have arrived, or ``tries`` is over; and what is left of it.

    Zeros stay behind. Where there are fewer words than threads, every warp loads all of them and
    looks for itself: none may store zeros while another one still looks.
    """
    words = tl.load(places, mask=mask, other=-1, volatile=True)
    while (tl.min((words != 0).to(tl.int32), axis=0) == 0) & (tries > 0):
        words = tl.load(places, mask=mask, other=-1, volatile=True)
        tries -= 1
    tl.debug_barrier()
    tl.store(places, tl.zeros_like(words), mask=mask)
    return ~words, tries


@triton.jit
def flagged(words, epoch):
    """Words with the flag of an epoch."""
    return (epoch.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def wait_for_flagged(places, mask, epoch, tries):
    """The words at ``places`` (n, m) once all have their flags, or ``tries`` is over; and what is
    left of it."""
    some_miss = tl.full([], 1, tl.int32)
    while (some_miss != 0) & (tries > 0):
        found = tl.load(places, mask=mask, other=0, volatile=True)
        missing = mask & ((found >> 32).to(tl.int32) != epoch)
        some_miss = tl.max(tl.max(missing.to(tl.int32), axis=1), axis=0)
        tries -= some_miss
    found = tl.load(places, mask=mask, other=0, volatile=True)
    return found.to(tl.int32), tries


@triton.jit
def wait_for_greetings(window, epoch, rank, tries, RANKS: tl.constexpr):
    """Wait for the first flagged word of every other rank; returns what is left of ``tries``."""
    for source in tl.static_range(RANKS):
        mask = tl.full([1, 1], source, tl.int32) != rank
        places = flagged_words_of(window, epoch, source) + tl.zeros([1, 1], tl.int32)
        _, left = wait_for_flagged(places, mask, epoch, tries)
        report(window, tries, left, source)
        tries = left
    return tries


@triton.jit
def halves(words, IS_BFLOAT16: tl.constexpr):
    """Both 16-bit elements of each word as float32: the one at the lower address first."""
    low, high = (words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16)
    if IS_BFLOAT16:
        return (
            low.to(tl.bfloat16, bitcast=True).to(tl.float32),
            high.to(tl.bfloat16, bitcast=True).to(tl.float32),
        )
    else:
        return (
            low.to(tl.float16, bitcast=True).to(tl.float32),
            high.to(tl.float16, bitcast=True).to(tl.float32),
        )


@triton.jit
def rounded_bits(values, IS_BFLOAT16: tl.constexpr):
    """The bits of float32 values that are rounded to 16 bits, in int32."""
    if IS_BFLOAT16:
        bits = values.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = values.to(tl.float16).to(tl.int16, bitcast=True)
    return bits.to(tl.int32) & 0xFFFF


@triton.jit
def joined(low, high, IS_BFLOAT16: tl.constexpr):
    """The words of both rounded elements."""
    return rounded_bits(low, IS_BFLOAT16) | (rounded_bits(high, IS_BFLOAT16) << 16)
