// Shared-memory addresses and barriers on the host. An address counts from the anchor, next to
// which shared memory lies. A barrier has one phase.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - &host::anchor);
}
inline char* shared_pointer(uint32_t address) {
  return &host::anchor + static_cast<int32_t>(address);
}

struct alignas(8) Barrier {
  int num_arrivals, num_bytes;  // that are missing; bytes may come before they are expected

  void init(int arrivals) { num_arrivals = arrivals, num_bytes = 0; }
  void arrive_expect(int bytes) {
    __atomic_fetch_add(&num_bytes, bytes, __ATOMIC_SEQ_CST);
    __atomic_fetch_sub(&num_arrivals, 1, __ATOMIC_SEQ_CST);
  }
  void wait(uint32_t phase) {
    while (__atomic_load_n(&num_arrivals, __ATOMIC_SEQ_CST) > 0 ||
           __atomic_load_n(&num_bytes, __ATOMIC_SEQ_CST) > 0) {
      ++host::block->num_waiting_for_cluster;
      host::yield();
    }
  }
};

inline void fence_barrier_init() {}

}  // namespace kernelcat
