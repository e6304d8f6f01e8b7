// kernels/cuda/include/kernelcat/async_copy.cuh on the host.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

inline void async_copy_16(uint32_t shared_address, const void* global, bool valid) {
  host::current->copies.push_back([=] {
    if (valid) {
      std::memcpy(dynamic_shared + shared_address, global, 16);
    } else {
      std::memset(dynamic_shared + shared_address, 0, 16);
    }
  });
}

}  // namespace kernelcat
