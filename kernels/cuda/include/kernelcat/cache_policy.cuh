// L2 eviction policy of TMA copies.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// The hardware's default: no policy bits, as in CUTLASS and Triton. The policy evict_normal is not
// the same, because it sets bits.
constexpr uint64_t kDefaultPolicy = 0;

}  // namespace kernelcat
