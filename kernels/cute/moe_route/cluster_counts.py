"""Sums of the assignments of all thread blocks of a cluster, through distributed shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelcat.kernels.cute.moe_route import token_masks


class ClusterCounts:
    """Each thread block writes its number of assignments of every expert to all thread blocks.

    A word of sCounts (max_experts / 2, cluster_size, num_buffers) has two experts' numbers of one
    thread block. A sum of all thread blocks fits 16 bits too. With two buffers a thread block may
    write the next numbers while another one reads these.
    """

    def __init__(self, max_experts: int, threads: int, cluster_size: int, num_buffers: int):
        self.pairs, self.threads = max_experts // 2, threads
        self.cluster_size, self.num_buffers = cluster_size, num_buffers

    def allocate(self, shared):
        """sCounts."""
        layout = cute.make_layout((self.pairs, self.cluster_size, self.num_buffers))
        return shared.allocate_tensor(Uint32, layout)

    @cute.jit
    def open(self):
        """Says that this thread block has begun, so that others may write to its shared memory."""
        if cutlass.const_expr(self.cluster_size > 1):
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def wait_for_all(self):
        """Waits until all thread blocks of the cluster have begun."""
        if cutlass.const_expr(self.cluster_size > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def add_up(
        self,
        sMasks: cute.Tensor,  # (max_experts, words)
        sCounts: cute.Tensor,  # (max_experts / 2, cluster_size, num_buffers)
        sTotals: cute.Tensor,  # (max_experts,), written: assignments in the cluster
        sEarlier: cute.Tensor,  # (max_experts,), written: those in thread blocks before ``rank``
        rank: Int32,
        buffer: Int32,  # which calls alternate
    ):
        """Adds up the numbers that ``sMasks`` of all thread blocks have; for all threads."""
        cute.arch.barrier()
        first = cute.arch.thread_idx()[0]
        for pair in cutlass.range(first, self.pairs, self.threads, unroll=1):
            low, high = (token_masks.count(sMasks, 2 * pair + i) for i in range(2))
            words = cute.make_rmem_tensor(1, Uint32)
            words[0] = low | high << Uint32(16)
            place = sCounts[None, rank, buffer].iterator + pair
            for cta in cutlass.range_constexpr(self.cluster_size):
                target = place
                if cutlass.const_expr(self.cluster_size > 1):
                    target = cute.arch.map_dsmem_ptr(place, cta)
                cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(1)))
        if cutlass.const_expr(self.cluster_size > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()
        for pair in cutlass.range(first, self.pairs, self.threads, unroll=1):
            total, earlier = Uint32(0), Uint32(0)
            for cta in cutlass.range_constexpr(self.cluster_size):
                if cta == rank:
                    earlier = total
                total += sCounts[pair, cta, buffer]
            for i in cutlass.range_constexpr(2):
                sTotals[2 * pair + i] = Int32((total >> Uint32(16 * i)) & Uint32(0xFFFF))
                sEarlier[2 * pair + i] = Int32((earlier >> Uint32(16 * i)) & Uint32(0xFFFF))
        cute.arch.barrier()
