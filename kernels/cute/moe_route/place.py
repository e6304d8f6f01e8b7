"""The second launch for many tokens: sums of all thread blocks' counts, and places."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.moe_route.maps import Maps

PLACE_THREADS = 512
WORD_COUNTS = 4
"""Numbers of assignments of a thread block, one byte each, in a word."""
BATCH = 8
"""Words that a thread loads before it adds up the first of them; their sums fit 16 bits."""


class Place:
    """Adds up the counts of all thread blocks of `Select`; places the assignments of one."""

    def __init__(self, load: bool, max_experts: int, block_tokens: int):
        self.maps, self.block_tokens = Maps(max_experts, PLACE_THREADS, load), block_tokens
        self.words = max_experts // WORD_COUNTS
        self.slices = PLACE_THREADS // self.words

    @cute.jit
    def __call__(
        self,
        block_counts: cute.Pointer,  # (num_blocks, max_experts / 4) words of four counts
        expert_ids: cute.Pointer,  # (tokens, top_k) int32
        weights: cute.Pointer,  # (tokens, top_k) float32
        counts: cute.Pointer,  # (experts,) int32
        offsets: cute.Pointer,  # (experts + 1,) int32
        order: cute.Pointer,  # (tokens * top_k,) int32
        position: cute.Pointer,  # (tokens, top_k) int32
        load: cute.Pointer,  # (experts,) int32
        tokens: Int32,
        experts: Int32,
        top_k: Int32,
        capacity: Int32,
        stream: cuda.CUstream,
    ):
        assignments = cute.make_layout(tokens * top_k)
        num_blocks = cute.ceil_div(tokens, self.block_tokens)
        self.kernel(
            cute.make_tensor(block_counts, cute.make_layout((self.words, num_blocks))),
            cute.make_tensor(expert_ids, assignments),
            cute.make_tensor(weights, assignments),
            cute.make_tensor(counts, cute.make_layout(experts)),
            cute.make_tensor(offsets, cute.make_layout(experts + 1)),
            cute.make_tensor(order, assignments),
            cute.make_tensor(position, assignments),
            cute.make_tensor(load, cute.make_layout(experts)),
            tokens,
            top_k,
            capacity,
        ).launch(
            grid=(num_blocks, 1, 1), block=(PLACE_THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mBlockCounts: cute.Tensor,  # (max_experts / 4, num_blocks)
        mIds: cute.Tensor,  # (assignments,)
        mWeights: cute.Tensor,  # (assignments,)
        mCounts: cute.Tensor,  # (experts,)
        mOffsets: cute.Tensor,  # (experts + 1,)
        mOrder: cute.Tensor,  # (assignments,)
        mPosition: cute.Tensor,  # (assignments,)
        mLoad: cute.Tensor,  # (experts,)
        tokens: Int32,
        top_k: Int32,
        capacity: Int32,
    ):
        tidx, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        sTotals, sEarlier, sStarts = self.maps.allocate(SmemAllocator())
        for e in cutlass.range(tidx, self.maps.max_experts, PLACE_THREADS, unroll=1):
            sTotals[e], sEarlier[e] = Int32(0), Int32(0)
        cute.arch.barrier()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.add_up(mBlockCounts, sTotals, sEarlier, tidx, block)
        cute.arch.barrier()
        if cute.arch.warp_idx() == 0:
            self.maps.scan(sTotals, sStarts, cute.size(mCounts), capacity)
        cute.arch.barrier()
        if block == 0:
            self.maps.store(sTotals, sStarts, mCounts, mOffsets, capacity)
            self.maps.add_load(sTotals, mLoad)
        first_token = block * self.block_tokens
        first_slot = first_token * top_k
        num_slots = cutlass.min(tokens - first_token, self.block_tokens) * top_k
        for slot in cutlass.range(tidx, num_slots, PLACE_THREADS, unroll=1):
            i = first_slot + slot
            is_served = self.maps.place(
                sEarlier, sStarts, mOrder, mPosition, i, mIds[i], mPosition[i], capacity
            )
            if not is_served:
                mIds[i], mWeights[i] = Int32(-1), Float32(0)

    @cute.jit
    def add_up(
        self,
        mBlockCounts: cute.Tensor,  # (max_experts / 4, num_blocks)
        sTotals: cute.Tensor,  # (max_experts,), changed
        sEarlier: cute.Tensor,  # (max_experts,), changed
        tidx: Int32,
        own_block: Int32,
    ):
        """Adds up the counts of all thread blocks, and of those before ``own_block``.

        Bytes 0 and 2, and bytes 1 and 3 of a word are added up in pairs.
        """
        word_idx, first = tidx % self.words, tidx // self.words
        num_blocks = mBlockCounts.shape[1]
        words = cute.make_rmem_tensor(BATCH, Uint32)
        totals = cute.make_rmem_tensor(WORD_COUNTS, Uint32)
        earlier = cute.make_rmem_tensor(WORD_COUNTS, Uint32)
        totals.fill(0)
        earlier.fill(0)
        for begin in cutlass.range(first, num_blocks, BATCH * self.slices, unroll=1):
            for u in cutlass.range_constexpr(BATCH):
                words[u] = Uint32(0)
                if begin + u * self.slices < num_blocks:
                    words[u] = mBlockCounts[word_idx, begin + u * self.slices]
            for j in cutlass.range_constexpr(2):
                pair_totals, pair_earlier = Uint32(0), Uint32(0)
                for u in cutlass.range_constexpr(BATCH):
                    pair = (words[u] >> Uint32(8 * j)) & Uint32(0x00FF00FF)
                    pair_totals += pair
                    if begin + u * self.slices < own_block:
                        pair_earlier += pair
                for half in cutlass.range_constexpr(2):
                    totals[j + 2 * half] += (pair_totals >> Uint32(16 * half)) & Uint32(0xFFFF)
                    earlier[j + 2 * half] += (pair_earlier >> Uint32(16 * half)) & Uint32(0xFFFF)
        for j in cutlass.range_constexpr(WORD_COUNTS):
            expert = WORD_COUNTS * word_idx + j
            cute.arch.atomic_add(sTotals.iterator + expert, Int32(totals[j]))
            cute.arch.atomic_add(sEarlier.iterator + expert, Int32(earlier[j]))
