// kernels/cuda/include/kernelcat/block_scales.cuh on the host: the same but for its copies.
#pragma once

#define async_copy_4 async_copy_4_by_ptx
#define arrive_when_copied arrive_when_copied_by_ptx
#include_next <kernelcat/block_scales.cuh>
#undef async_copy_4
#undef arrive_when_copied

namespace kernelcat {

inline void async_copy_4(float* shared, const float* global, bool valid) {
  host::current->copies.push_back([=] { *shared = valid ? *global : 0.0f; });
}

inline void arrive_when_copied(Barrier& barrier) {
  auto copies = std::move(host::current->copies);
  host::current->copies.clear();
  host::block->landings.push_back([&barrier, copies = std::move(copies)] {
    for (const auto& copy : copies) copy();
    barrier.arrive();
  });
}

}  // namespace kernelcat
