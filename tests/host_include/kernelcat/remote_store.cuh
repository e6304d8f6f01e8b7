// Barriers and stores between the thread blocks of a cluster on the host. A barrier has one phase.
#pragma once

#include <kernelcat/cluster_store.cuh>

namespace kernelcat {

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

template <typename Vector>
void store_remote(Vector* shared, const Vector& value, Barrier& barrier, uint32_t cta) {
  char* const anchor = host::block->cluster->anchors[cta];
  std::memcpy(anchor + (reinterpret_cast<char*>(shared) - &host::anchor), &value, sizeof value);
  auto* there = anchor + (reinterpret_cast<char*>(&barrier) - &host::anchor);
  __atomic_fetch_sub(&reinterpret_cast<Barrier*>(there)->num_bytes, static_cast<int>(sizeof value),
                     __ATOMIC_SEQ_CST);
}

}  // namespace kernelcat
