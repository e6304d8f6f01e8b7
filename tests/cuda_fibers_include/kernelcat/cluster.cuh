// kernels/cuda/include/kernelcat/cluster.cuh on the host.
#pragma once

#include <kernelcat/bulk_copy.cuh>

namespace kernelcat {

inline uint32_t cluster_rank() {
  return host::rank();
}
inline void cluster_arrive_relaxed() {
  host::arrive_at_cluster();
}
inline void cluster_wait() {
  host::wait_for_cluster();
}
inline void cluster_sync() {
  host::wait_until([] { return host::current->num_arrivals == 0; });
  host::arrive_at_cluster();
  host::wait_for_cluster();
}

inline void arrive_remote(Barrier& barrier, uint32_t cta) {
  host::Fiber& sender = *host::current;
  ++sender.num_arrivals;
  host::land_in(cta, [&] {
    barrier.arrive();
    --sender.num_arrivals;
  });
}

inline void tensor_load_multicast(void* shared, const TensorMap& map, int x, int y,
                                  Barrier& barrier, uint16_t mask, uint64_t) {
  for (uint32_t cta = 0; cta < host::cluster.size(); ++cta) {
    if (mask >> cta & 1) host::land_in(cta, box_landing(shared, map, x, y, barrier));
  }
}

}  // namespace kernelcat
