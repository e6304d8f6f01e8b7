// kernels/cuda/include/kernelcat/copy_arrival.cuh on the host.
#pragma once

#include <kernelcat/mbarrier.cuh>

namespace kernelcat {

inline void arrive_when_copied(Barrier& barrier) {
  auto copies = std::move(host::current->copies);
  host::current->copies.clear();
  host::landings.push_back([&barrier, copies = std::move(copies)] {
    for (const auto& copy : copies) copy();
    barrier.arrive();
  });
}

}  // namespace kernelcat
