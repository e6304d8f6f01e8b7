"""Merging partial results of the thread blocks of a cluster, through distributed shared memory.

Each thread block stores one part of the rows, and has an inbox with a place for each sender. It
sends its vectors of a row to the inbox of the thread block that stores the row. It sends by
asynchronous stores, which the receiver's barrier counts: they need no fence, no thread block waits
for another one to read, and a thread block may exit when it has stored its rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.common.partials import VECTOR

CHUNK = 8
"""Consecutive vectors that one thread block stores: 64 bytes of ``out``."""


class Exchange:
    """Rows of ``partials`` in a cluster of ``size``; each thread block stores every size-th chunk.

    barrier     who arrives (how many)                          who waits    for what
    cluster     all threads, after inbox_full is initialized    all threads  inboxes may be written
    inbox_full  thread 0 (1), and bytes of all thread blocks    all threads  all parts have arrived
    """

    def __init__(self, partials, size: int):
        self.partials, self.size = partials, size
        chunks = partials.block_m * partials.vectors // CHUNK
        self.slots = -(-chunks // size) * CHUNK

    def inbox_layout(self):
        """(VECTOR, 2, slots, size): a vector of values, then row max and sum, of each sender."""
        return cute.make_layout((VECTOR, 2, self.slots, self.size))

    @cute.jit
    def open(self, inbox_full: cute.Pointer):
        """Initializes the barrier and arrives at the cluster's barrier; for all threads."""
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(inbox_full, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def expect(self, inbox_full: cute.Pointer, num_rows: Int32, rank: Int32):
        """Sets the bytes that this inbox receives, some of which may have arrived already.

        A barrier of the thread block must lie between ``open`` and this.
        """
        if cute.arch.thread_idx()[0] == 0:
            chunks = num_rows * (self.partials.vectors // CHUNK)
            own_chunks = (chunks + self.size - 1 - rank) // self.size
            num_bytes = own_chunks * (4 * VECTOR * 2 * CHUNK * self.size)
            cute.arch.mbarrier_arrive_and_expect_tx(inbox_full, num_bytes)

    @cute.jit
    def send(
        self,
        parts: cute.Tensor,  # (VECTOR, vectors + 1, block_m, num_parts)
        num_rows: Int32,
        sInbox: cute.Tensor,  # (VECTOR, 2, slots, size)
        inbox_full: cute.Pointer,
        rank: Int32,
    ):
        """Merges the warps' parts and sends each vector to the thread block that stores it."""
        cute.arch.cluster_wait()
        record = cute.make_rmem_tensor((VECTOR, 2), Float32)
        record.fill(0.0)
        bits = cute.recast_tensor(record, Int32)
        vectors = self.partials.vectors
        first = cute.arch.thread_idx()[0]
        for index in cutlass.range(first, num_rows * vectors, self.partials.threads, unroll=1):
            row, vector = index // vectors, index % vectors
            record[0, 1], record[1, 1] = self.partials.merge(
                parts[None, vector, row, None], parts[None, vectors, row, None],
                Int32(self.partials.num_parts), record[None, 0],
            )  # fmt: skip
            chunk = index // CHUNK
            slot = chunk // self.size * CHUNK + index % CHUNK
            for i in cutlass.range_constexpr(2):
                words = tuple(bits[v, i] for v in range(VECTOR))
                target = sInbox[None, i, slot, rank].iterator.align(4 * VECTOR)
                cute.arch.store_async_dsmem(target, words, inbox_full, chunk % self.size)

    @cute.jit
    def store(
        self,
        sInbox: cute.Tensor,  # (VECTOR, 2, slots, size)
        inbox_full: cute.Pointer,
        num_rows: Int32,
        rank: Int32,
        mO: cute.Tensor,  # (head_dim, group_size, query tokens) of the key-value head
        mL: cute.Tensor,  # (group_size, query tokens)
        mSinks: cute.Tensor,  # (group_size,)
        group_size: Int32,
        row_begin: Int32,
        v_factor: Float32,
    ):
        """Merges this thread block's chunks in the order of the ranks; stores out and lse."""
        cute.arch.mbarrier_wait(inbox_full, 0)
        values = cute.make_rmem_tensor(VECTOR, Float32)
        first = cute.arch.thread_idx()[0]
        for slot in cutlass.range(first, self.slots, self.partials.threads, unroll=1):
            index = (slot // CHUNK * self.size + rank) * CHUNK + slot % CHUNK
            row, vector = index // self.partials.vectors, index % self.partials.vectors
            if row < num_rows:
                row_max, row_sum = self.partials.merge(
                    sInbox[None, 0, slot, None], sInbox[None, 1, slot, None],
                    Int32(self.size), values, self.size,
                )  # fmt: skip
                self.partials.store_vector(
                    values, row_max, row_sum, row_begin + row, vector, mO, mL, mSinks, group_size,
                    v_factor,
                )  # fmt: skip
