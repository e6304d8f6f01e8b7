// A ring of shared-memory stages through which one thread copies tiles with the bulk copy engine.
#pragma once

#include <kernelcat/bulk_copy.cuh>

namespace kernelcat {

// Copies tiles 0 .. num_tiles - 1. `load(tile, stage, barrier)` arrives at the barrier with the
// bytes of the tile and starts a load that completes on the barrier; `store(tile, stage)` starts a
// store. A stage is loaded again when the store of its tile has read shared memory, which is waited
// for only after kNumStores later stores were started: so about kNumStages - kNumStores loads and
// kNumStores stores are in flight. Runs in one thread; `barriers` are freshly initialised.
template <int kNumStages, int kNumStores, typename Load, typename Store>
__device__ __forceinline__ void copy_through_ring(Barrier (&barriers)[kNumStages],
                                                  int64_t num_tiles, Load load, Store store) {
  static_assert(0 < kNumStores && kNumStores < kNumStages);
  for (int64_t tile = 0; tile < kNumStages && tile < num_tiles; ++tile) {
    load(tile, static_cast<int>(tile), barriers[tile]);
  }
  PipelineState<kNumStages> position;
  int refill = kNumStages - kNumStores;  // the stage of tile - kNumStores
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    barriers[position.stage].wait(position.phase);
    store(tile, position.stage);
    commit_stores();
    position.advance();
    const int64_t next = tile - kNumStores + kNumStages;
    if (tile >= kNumStores && next < num_tiles) {
      wait_stores_read<kNumStores>();
      load(next, refill, barriers[refill]);
    }
    refill = refill + 1 == kNumStages ? 0 : refill + 1;
  }
  wait_stores_read<0>();
}

}  // namespace kernelcat
