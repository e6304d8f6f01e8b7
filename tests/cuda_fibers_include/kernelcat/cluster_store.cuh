// kernels/cuda/include/kernelcat/cluster_store.cuh on the host.
#pragma once

#include <kernelcat/cluster.cuh>

namespace kernelcat {

inline void store_word(void* shared, uint32_t word, uint32_t cta) {
  *host::remote(static_cast<uint32_t*>(shared), cta) = word;
}

}  // namespace kernelcat
