// kernels/cuda/include/kernelcat/async_copy.cuh on the host: copies land when they are waited for.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// Starts to copy, or to clear where `valid` is false, `num_bytes` of shared memory.
inline void start_copy(uint32_t shared_address, const void* global, int num_bytes, bool valid) {
  if (shared_address % num_bytes || (valid && reinterpret_cast<uint64_t>(global) % num_bytes)) {
    std::abort();
  }
  host::current->copies.push_back([=] {
    if (valid) {
      std::memcpy(dynamic_shared + shared_address, global, num_bytes);
    } else {
      std::memset(dynamic_shared + shared_address, 0, num_bytes);
    }
  });
}

inline void async_copy_16(uint32_t shared_address, const void* global, bool valid) {
  start_copy(shared_address, global, 16, valid);
}

inline void commit_async_copies() {
  host::current->copy_groups.push_back(std::move(host::current->copies));
  host::current->copies.clear();
}

template <int kPending>
void wait_async_copies() {
  auto& groups = host::current->copy_groups;
  while (groups.size() > kPending) {
    for (const auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

}  // namespace kernelcat
