"""Adding up the partial sums of a split K range, in the same order on every run."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

WARPGROUP = 128


@cute.jit
def reduce_splits(
    total: cute.Tensor,  # a thread's sums; the sums of all splits where this returns True
    partial: cute.Tensor,  # (4, sums / 4, num_splits), this thread's
    counter: cute.Pointer,  # in global memory, zero before and after
    is_last: cute.Pointer,  # in shared memory, a word of the warpgroup's own
    split_idx: Int32,
    barrier_id: Int32,
):
    """Leave this split's sums; the warpgroup that finds all others done adds them up.

    All 128 threads of a warpgroup call this together.
    """
    num_splits, vectors = partial.shape[2], partial.shape[1]
    leader = cute.arch.thread_idx()[0] % WARPGROUP == 0
    sums = cute.make_tensor(total.iterator, cute.make_layout((4, vectors)))
    for v in cutlass.range_constexpr(vectors):
        cute.autovec_copy(sums[None, v], partial[None, v, split_idx])
    # The barrier hands the stores of all threads to the leader, whose atomic releases them.
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
        total.fill(0.0)
        part = cute.make_rmem_tensor((4, vectors), Float32)
        for s in cutlass.range(num_splits, unroll=1):
            for v in cutlass.range_constexpr(vectors):
                cute.autovec_copy(partial[None, v, s], part[None, v])
            sums.store(sums.load() + part.load())
    return found
