// Shared-memory barriers that count arrivals and bytes, and flip a phase bit when both are met.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

struct alignas(8) Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(int num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(num_arrivals)
                 : "memory");
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }

  // One arrival; the phase also waits for `num_bytes` to land.
  __device__ __forceinline__ void arrive_expect(uint32_t num_bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(num_bytes)
        : "memory");
  }

  // Waits until the phase with this parity has completed. A barrier starts in phase 0, and the
  // phase before phase 0 (parity 1) counts as completed.
  __device__ __forceinline__ void wait(uint32_t phase) {
    while (!try_wait(phase)) {
    }
  }

  __device__ __forceinline__ bool try_wait(uint32_t phase) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(this)), "r"(phase)
        : "memory");
    return done != 0;
  }
};

// Makes initialised barriers visible to the copy engine; a block-wide barrier must follow.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A stage of a ring and the phase of its barriers; the phase flips each time the ring wraps around.
template <int kNumStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kNumStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace kernelcat
