// Clusters on the host: barriers count arrivals, and stores find the other thread block's memory.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

inline uint32_t cluster_rank() {
  return host::block->rank;
}
inline void cluster_arrive_relaxed() {
  ++host::block->fibers[host::block->current].cluster_arrivals;
  ++host::block->cluster->num_arrivals;
}
inline void cluster_wait() {
  const host::Block& block = *host::block;
  const long num_threads = block.num_threads * block.cluster->anchors.size();
  const long num_expected = block.fibers[block.current].cluster_arrivals * num_threads;
  while (block.cluster->num_arrivals < num_expected) {
    ++host::block->num_waiting_for_cluster;
    host::yield();
  }
}
inline void cluster_sync() {
  cluster_arrive_relaxed();
  cluster_wait();
}
inline void store_word(void* shared, uint32_t word, uint32_t cta) {
  const auto offset = static_cast<char*>(shared) - &host::anchor;
  std::memcpy(host::block->cluster->anchors[cta] + offset, &word, sizeof word);
}

}  // namespace kernelcat
