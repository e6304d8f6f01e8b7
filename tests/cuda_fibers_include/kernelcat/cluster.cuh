// kernels/cuda/include/kernelcat/cluster.cuh on the host.
#pragma once

#include <kernelcat/bulk_copy.cuh>

namespace kernelcat {

inline uint32_t cluster_rank() {
  return host::rank;
}

inline void cluster_arrive_relaxed() {
  ++host::progress;
  ++host::cluster_arrivals;
  ++host::current->cluster_arrivals;
}
inline void cluster_wait() {
  const long num_threads = host::cluster.size() * blockDim.x;
  const long expected = host::current->cluster_arrivals * num_threads;
  host::wait_until([&] { return host::cluster_arrivals >= expected; });
}
inline void cluster_sync() {
  host::wait_until([] { return host::current->num_sent == 0; });
  cluster_arrive_relaxed();
  cluster_wait();
}

// Arrives at a random time, as a store does.
inline void arrive_remote(Barrier& barrier, uint32_t cta) {
  host::Fiber& sender = *host::current;
  ++sender.num_sent;
  host::landings.push_back([=, &barrier, &sender] {
    host::remote(&barrier, cta)->arrive();
    --sender.num_sent;
  });
}

inline void tensor_load_multicast(void* shared, const TensorMap& map, int x, int y,
                                  Barrier& barrier, uint16_t mask, uint64_t) {
  host::landings.push_back([=, &map, &barrier] {
    for (uint32_t cta = 0; cta < host::cluster.size(); ++cta) {
      if ((mask >> cta & 1) == 0) continue;
      load_box(static_cast<uint8_t*>(shared), map, x, y, cta);
      host::remote(&barrier, cta)->complete_bytes(map.box[0] * map.box[1] * map.element_bytes);
    }
  });
}

}  // namespace kernelcat
