"""Adding up what the CTAs of a cluster found for the same rows, through distributed shared memory.

Each CTA sends its vectors of a row to the CTA that stores them, into a place of its own there. By
asynchronous stores, that the receiver's barrier counts: no fence, nobody waits for a reader, and
whoever has stored its share may leave.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.paged_attn.merge import VECTOR

CHUNK = 8
"""Vectors side by side that one CTA stores: 64 bytes of ``out``."""


class Exchange:
    """Rows of ``merge``, of which ``size`` CTAs have parts; each stores every ``size``-th chunk."""

    def __init__(self, merge, size: int):
        self.merge, self.size = merge, size
        chunks = merge.block_m * merge.vectors // CHUNK
        self.slots = -(-chunks // size) * CHUNK

    def inbox_layout(self):
        """(VECTOR, 2, slots, size): from each CTA a vector of values, then maximum and sum."""
        return cute.make_layout((VECTOR, 2, self.slots, self.size))

    @cute.jit
    def open(self, inbox_full: cute.Pointer):
        """Tell the cluster that this CTA's inbox may be written to; all threads."""
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(inbox_full, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def expect(self, inbox_full: cute.Pointer, num_rows: Int32, rank: Int32):
        """Say how much is to come, or has; a barrier of the CTA lies between open() and this."""
        if cute.arch.thread_idx()[0] == 0:
            chunks = num_rows * (self.merge.vectors // CHUNK)
            own = (chunks + self.size - 1 - rank) // self.size
            num_bytes = own * (4 * VECTOR * 2 * CHUNK * self.size)
            cute.arch.mbarrier_arrive_and_expect_tx(inbox_full, num_bytes)

    @cute.jit
    def send(
        self,
        parts: cute.Tensor,  # (VECTOR, vectors + 1, block_m, merge.parts)
        num_rows: Int32,
        sInbox: cute.Tensor,  # (VECTOR, 2, slots, size)
        inbox_full: cute.Pointer,
        rank: Int32,
    ):
        """What this CTA found, to all of the cluster."""
        cute.arch.cluster_wait()
        record = cute.make_rmem_tensor((VECTOR, 2), Float32)
        record.fill(0.0)
        bits = cute.recast_tensor(record, Int32)
        vectors = self.merge.vectors
        first = cute.arch.thread_idx()[0]
        for index in cutlass.range(first, num_rows * vectors, self.merge.threads, unroll=1):
            row, vector = index // vectors, index % vectors
            record[0, 1], record[1, 1] = self.merge.gather(
                parts[None, vector, row, None], parts[None, vectors, row, None],
                Int32(self.merge.parts), record[None, 0],
            )  # fmt: skip
            chunk = index // CHUNK
            slot = chunk // self.size * CHUNK + index % CHUNK
            for i in cutlass.range_constexpr(2):
                words = tuple(bits[v, i] for v in range(VECTOR))
                place = sInbox[None, i, slot, rank].iterator.align(4 * VECTOR)
                cute.arch.store_async_dsmem(place, words, inbox_full, chunk % self.size)

    @cute.jit
    def store(
        self,
        sInbox: cute.Tensor,  # (VECTOR, 2, slots, size)
        inbox_full: cute.Pointer,
        num_rows: Int32,
        rank: Int32,
        mO: cute.Tensor,  # (head_dim, group, query tokens) that share the key-value head
        mL: cute.Tensor,  # (group, query tokens)
        mSinks: cute.Tensor,  # (group,)
        group: Int32,
        row_begin: Int32,
        v_factor: Float32,
    ):
        """This CTA's share of the rows of out and lse, of what all have sent, always in order."""
        cute.arch.mbarrier_wait(inbox_full, 0)
        values = cute.make_rmem_tensor(VECTOR, Float32)
        first = cute.arch.thread_idx()[0]
        for slot in cutlass.range(first, self.slots, self.merge.threads, unroll=1):
            index = (slot // CHUNK * self.size + rank) * CHUNK + slot % CHUNK
            row, vector = index // self.merge.vectors, index % self.merge.vectors
            if row < num_rows:
                most, total = self.merge.gather(
                    sInbox[None, 0, slot, None], sInbox[None, 1, slot, None],
                    Int32(self.size), values, self.size,
                )  # fmt: skip
                self.merge.store_vector(
                    values, most, total, row_begin + row, vector, mO, mL, mSinks, group, v_factor
                )
