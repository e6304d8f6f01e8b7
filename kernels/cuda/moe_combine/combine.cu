// What the experts of all ranks made of a token goes back to the token's rank, which adds it up.
#include <kernelcat/pdl.cuh>

#include "rings.cuh"
#include "slots.cuh"

namespace kernelcat {

// Sums travel in rings of tiles of kTileTokens tokens; if that is 0, every token has a slot.
template <typename T, int kRanks, int kTileTokens, int kThreads, bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads, 2)
    moe_combine(const uint4* sums,      // (ranks * tokens, hidden), of T
                const int* row_of,      // (ranks, tokens)
                const int* expert_ids,  // (tokens, top_k)
                const uint4* residual,  // (tokens, hidden), of T, or null
                uint4* out,             // (tokens, hidden), of T
                int num_tokens, int hidden, int top_k, int local_experts, int rank, Window* window0,
                Window* window1, Window* window2, Window* window3, Window* window4, Window* window5,
                Window* window6, Window* window7) {
  extern __shared__ uint8_t dynamic_shared[];
  const Windows<kRanks> windows{
      {window0, window1, window2, window3, window4, window5, window6, window7}, rank};
  Window* own = windows.of[0];
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  const uint32_t epoch = begin_epoch(own);
  const ExpertSums<T, kRanks, kThreads> expert_sums{sums,       row_of,  expert_ids,   residual,
                                                    out,        windows, epoch,        num_tokens,
                                                    hidden / 8, top_k,   local_experts};
  if constexpr (kTileTokens == 0) {
    combine_in_slots(expert_sums);
  } else {
    combine_in_rings<kTileTokens>(expert_sums, dynamic_shared);
  }
  end_epoch(own, epoch);
}

}  // namespace kernelcat
