// Stores between the thread blocks of a cluster on the host.
#pragma once

#include <kernelcat/cluster_store.cuh>
#include <kernelcat/mbarrier.cuh>

namespace kernelcat {

template <typename Vector>
void store_remote(Vector* shared, const Vector& value, Barrier& barrier, uint32_t cta) {
  char* const anchor = host::block->cluster->anchors[cta];
  std::memcpy(anchor + (reinterpret_cast<char*>(shared) - &host::anchor), &value, sizeof value);
  auto* there = anchor + (reinterpret_cast<char*>(&barrier) - &host::anchor);
  __atomic_fetch_sub(&reinterpret_cast<Barrier*>(there)->num_bytes, static_cast<int>(sizeof value),
                     __ATOMIC_SEQ_CST);
}

}  // namespace kernelcat
