// Prefetches on the host do nothing.
#pragma once

namespace kernelcat {

inline void prefetch_l2(const void*) {}

}  // namespace kernelcat
