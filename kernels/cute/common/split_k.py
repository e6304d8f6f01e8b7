"""Split-K through a workspace: the last split to finish adds up all partial sums, in order."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

WARPGROUP = 128


@cute.jit
def reduce_splits(
    acc: cute.Tensor,  # a thread's sums of this split; those of all splits if this returns True
    partial: cute.Tensor,  # (4, vectors, num_splits) in global memory, of this thread
    counter: cute.Pointer,  # in global memory, zero before and after
    is_last: cute.Pointer,  # a word in shared memory that belongs to the warpgroup
    split_idx: Int32,
    barrier_id: Int32,
):
    """Write this split's partial sums; the last warpgroup to do this adds up those of all splits.

    All 128 threads of a warpgroup call this together. Returns whether theirs was the last.
    """
    num_splits, vectors = partial.shape[2], partial.shape[1]
    leader = cute.arch.thread_idx()[0] % WARPGROUP == 0
    sums = cute.make_tensor(acc.iterator, cute.make_layout((4, vectors)))
    for v in cutlass.range_constexpr(vectors):
        cute.autovec_copy(sums[None, v], partial[None, v, split_idx])
    # The barrier orders the stores of all threads before the leader's atomic, which releases them.
    cute.arch.barrier(barrier_id=barrier_id, number_of_threads=WARPGROUP)
    if leader:
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        last = Int32(before == num_splits - 1)
        if last == 1:
            cute.arch.store(counter, Int32(0))
        cute.arch.store(is_last, last)
    cute.arch.barrier(barrier_id=barrier_id, number_of_threads=WARPGROUP)
    found = cute.arch.load(is_last, Int32) == 1
    if found:
        acc.fill(0.0)
        addend = cute.make_rmem_tensor((4, vectors), Float32)
        for s in cutlass.range(num_splits, unroll=1):
            for v in cutlass.range_constexpr(vectors):
                cute.autovec_copy(partial[None, v, s], addend[None, v])
            sums.store(sums.load() + addend.load())
    return found
