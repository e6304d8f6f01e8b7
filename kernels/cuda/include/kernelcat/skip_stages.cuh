// How a consumer that takes turns with another one passes over the other one's stages of a ring.
#pragma once

#include <kernelcat/mbarrier.cuh>

namespace kernelcat {

// Moves past the stages of a tile that the other consumer multiplies.
template <int kNumStages>
__device__ __forceinline__ void skip(PipelineState<kNumStages>& position, int num_k_blocks) {
  const int stage = position.stage + num_k_blocks;
  position.phase ^= stage / kNumStages & 1;
  position.stage = stage % kNumStages;
}

}  // namespace kernelcat
