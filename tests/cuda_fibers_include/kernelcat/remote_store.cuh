// kernels/cuda/include/kernelcat/remote_store.cuh on the host: a store lands at a random time.
#pragma once

#include <kernelcat/cluster.cuh>

namespace kernelcat {

template <typename Vector>
void store_remote(Vector* shared, const Vector& value, Barrier& barrier, uint32_t cta) {
  static_assert(sizeof(Vector) == 16);
  host::landings.push_back([=, &barrier] {
    *host::remote(shared, cta) = value;
    host::remote(&barrier, cta)->complete_bytes(sizeof(Vector));
  });
}

}  // namespace kernelcat
