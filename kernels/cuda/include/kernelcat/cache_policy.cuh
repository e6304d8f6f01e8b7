// How long L2 should keep what the copy engine moves.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// Leaves eviction to the hardware's default. Asking for evict_normal is not the same: its policy
// has other bits than the none that CUTLASS and Triton give.
constexpr uint64_t kDefaultPolicy = 0;

}  // namespace kernelcat
