// The experts of every token, by one warp for each token.
#include <kernelcat/pdl.cuh>

#include "router.cuh"

namespace kernelcat {

// kProgrammatic: launched by programmatic dependent launch, which sm_80 does not have.
template <bool kProgrammatic, typename Logit, Score kScore, bool kRenormalize, bool kGrouped,
          int kPerLane, int kVector,
          typename Kind = RouterKind<Logit, kScore, kRenormalize, kGrouped, kPerLane, kVector>>
__global__ void __launch_bounds__(128)
    moe_mlp_route(const Logit* logits,      // (tokens, experts)
                  const float* correction,  // (experts,), or null
                  int* ids,                 // (tokens, top_k)
                  float* gates,             // (tokens, top_k)
                  int tokens, int experts, int top_k, int group_size, int top_groups,
                  float scaling) {
  extern __shared__ uint8_t dynamic_shared[];
  if constexpr (kProgrammatic) {
    grid_dependency_wait();
    launch_dependents();
  }
  const int warp = warp_index(), num_warps = blockDim.x / kWarpThreads;
  const Router<Kind> router = {logits, correction, experts, top_k, group_size, top_groups, scaling};
  float* scratch = reinterpret_cast<float*>(dynamic_shared) + warp * experts;  // for kGrouped
  for (int token = blockIdx.x * num_warps + warp; token < tokens; token += gridDim.x * num_warps) {
    store_choice(router.select(token, scratch), token, top_k, ids, gates);
  }
}

}  // namespace kernelcat
