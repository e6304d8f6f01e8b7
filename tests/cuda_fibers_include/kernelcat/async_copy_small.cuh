// kernels/cuda/include/kernelcat/async_copy_small.cuh on the host.
#pragma once

#include <kernelcat/async_copy.cuh>

namespace kernelcat {

template <int kBytes>
void async_copy_small(uint32_t shared_address, const void* global, bool valid) {
  start_copy(shared_address, global, kBytes, valid);
}

}  // namespace kernelcat
