// kernels/cuda/include/kernelcat/mbarrier.cuh on the host.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<const uint8_t*>(pointer) - dynamic_shared;
}

struct alignas(8) Barrier {
  short count, missing;  // arrivals of a phase, and those that the current phase lacks
  int state;             // bytes that the current phase lacks times two, plus the phase

  void init(int num_arrivals) {
    count = missing = static_cast<short>(num_arrivals);
    state = 0;
  }
  void arrive() { change(1, 0); }
  void arrive_expect(uint32_t num_bytes) { change(1, static_cast<int>(num_bytes)); }
  void complete_bytes(uint32_t num_bytes) { change(0, -static_cast<int>(num_bytes)); }

  bool try_wait(uint32_t phase) const { return (state & 1u) != phase; }
  void wait(uint32_t phase) {
    host::wait_until([&] { return try_wait(phase); });
  }

  void change(int arrivals, int bytes) {
    ++host::progress;
    missing -= static_cast<short>(arrivals);
    state += 2 * bytes;
    host::require(missing >= 0, "a barrier has more arrivals than it was initialised for");
    if (missing == 0 && state >> 1 == 0) {
      missing = count;
      state ^= 1;
    }
  }
};

inline void fence_barrier_init() {}

template <int kNumStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  void advance() {
    if (++stage == kNumStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace kernelcat
