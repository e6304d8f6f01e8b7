// Routing without tricks, in three kernels: logits, one thread for each; the selection, one thread
// for each token; and places of assignments, one thread for each expert.
#include "scores.cuh"

namespace kernelcat {

constexpr int kMaxExperts = 512;

template <typename T>
__global__ void __launch_bounds__(256)
    moe_route_naive_logits(const T* x,            // (tokens, hidden)
                           const T* router,       // (experts, hidden)
                           const T* router_bias,  // (experts,) or null
                           float* logits,         // (tokens, experts)
                           int tokens, int experts, int hidden) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= static_cast<int64_t>(tokens) * experts) return;
  const T* row = x + i / experts * hidden;
  const T* column = router + i % experts * hidden;
  float sum = 0.0f;
  for (int k = 0; k < hidden; ++k) sum = fmaf(to_float(row[k]), to_float(column[k]), sum);
  logits[i] = sum + (router_bias ? to_float(router_bias[i % experts]) : 0.0f);
}

// The experts of one token.
template <typename T, Score kScore>
struct Token {
  const T* logits;          // (experts,)
  const float* correction;  // (experts,) or null
  int experts, group_size;
  uint32_t groups = 0xffffffff;  // a bit for each group that the token may use

  __device__ float score(int expert) const {
    if (!(groups >> expert / group_size & 1)) return -kInfinity;
    return selection_score<kScore>(to_float(logits[expert]), correction, expert);
  }

  // The sum of the two best scores of a group, or the only score.
  __device__ float group_score(int group) const {
    float best = -kInfinity, second = -kInfinity;
    for (int i = 0; i < group_size; ++i) {
      const float value = score(group * group_size + i);
      second = fmaxf(second, fminf(best, value));
      best = fmaxf(best, value);
    }
    return group_size == 1 ? best : best + second;
  }

  __device__ void limit_groups(int top_groups) {
    const int num_groups = experts / group_size;
    if (top_groups >= num_groups) return;
    uint32_t selected = 0;
    for (int n = 0; n < top_groups; ++n) {
      int best = -1;
      for (int group = 0; group < num_groups; ++group) {
        if (selected >> group & 1) continue;
        if (best < 0 || group_score(group) > group_score(best)) best = group;
      }
      selected |= 1u << best;
    }
    groups = selected;
  }

  // The best expert for which `is_open(expert)`, the lowest of equal ones; -1 where there is none.
  template <typename Predicate>
  __device__ int best(Predicate is_open) const {
    int found = -1;
    for (int expert = 0; expert < experts; ++expert) {
      const float value = score(expert);
      if (value == -kInfinity || !is_open(expert)) continue;
      if (found < 0 || value > score(found)) found = expert;
    }
    return found;
  }

  // Weights of the experts in ids[0 .. top_k), some of which may be -1.
  __device__ void weigh(const int* ids, float* weights, int top_k, bool renormalize,
                        float scaling) const {
    float max_logit = -kInfinity, total = 0.0f;
    for (int e = 0; e < experts; ++e) max_logit = fmaxf(max_logit, to_float(logits[e]));
    const auto value = [&](int e) {
      return unscaled_weight<kScore>(to_float(logits[e]), max_logit);
    };
    if (renormalize) {
      for (int i = 0; i < top_k; ++i) total += ids[i] < 0 ? 0.0f : value(ids[i]);
      total += 1e-20f;
    } else if (kScore == Score::kSoftmax) {
      for (int e = 0; e < experts; ++e) total += value(e);
    } else {
      total = 1.0f;
    }
    for (int i = 0; i < top_k; ++i)
      weights[i] = ids[i] < 0 ? 0.0f : value(ids[i]) / total * scaling;
  }
};

__device__ __forceinline__ bool contains(const int* ids, int num_ids, int id) {
  for (int i = 0; i < num_ids; ++i) {
    if (ids[i] == id) return true;
  }
  return false;
}

template <typename T, Score kScore>
__global__ void __launch_bounds__(128)
    moe_route_naive_select(const T* logits,          // (tokens, experts)
                           const float* correction,  // (experts,) or null
                           int* expert_ids,          // (tokens, top_k)
                           float* weights,           // (tokens, top_k)
                           int tokens, int experts, int top_k, int group_size, int top_groups,
                           int renormalize, float scaling) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= tokens) return;
  Token<T, kScore> row = {logits + token * experts, correction, experts, group_size};
  row.limit_groups(top_groups);
  int* ids = expert_ids + token * top_k;
  for (int slot = 0; slot < top_k; ++slot) {
    ids[slot] = row.best([&](int expert) { return !contains(ids, slot, expert); });
  }
  row.weigh(ids, weights + token * top_k, top_k, renormalize, scaling);
}

// One thread block with a thread for each expert, which goes over all assignments in order.
template <typename T, Score kScore>
__global__ void __launch_bounds__(kMaxExperts)
    moe_route_naive_place(const T* logits,          // (tokens, experts)
                          const float* correction,  // (experts,) or null
                          int* expert_ids,          // (tokens, top_k)
                          float* weights,           // (tokens, top_k)
                          int* counts,              // (experts,)
                          int* offsets,             // (experts + 1,)
                          int* order,               // (tokens * top_k,)
                          int* position,            // (tokens, top_k)
                          int* load,                // (experts,) or null
                          int* proposals,           // (tokens, top_k), or null without rerouting
                          int tokens, int experts, int top_k, int group_size, int top_groups,
                          int renormalize, float scaling, int capacity) {
  __shared__ int served[kMaxExperts], starts[kMaxExperts + 1];
  const int expert = threadIdx.x, num_assignments = tokens * top_k;
  int num_served = 0, num_selected = 0;
  for (int i = 0; i < num_assignments; ++i) {
    if (expert_ids[i] != expert) continue;
    ++num_selected;
    if (num_served < capacity) {
      ++num_served;
    } else {
      expert_ids[i] = -1;
      weights[i] = 0.0f;
    }
  }
  if (load && expert < experts) load[expert] += num_selected;
  __syncthreads();

  while (proposals) {  // rounds of rerouting
    served[expert] = num_served;
    __syncthreads();
    bool any_proposal = false;
    for (int token = threadIdx.x; token < tokens; token += blockDim.x) {
      Token<T, kScore> row = {logits + static_cast<int64_t>(token) * experts, correction, experts,
                              group_size};
      row.limit_groups(top_groups);
      const int* ids = expert_ids + token * top_k;
      int* proposed = proposals + token * top_k;
      for (int slot = 0; slot < top_k; ++slot) {
        proposed[slot] = ids[slot] >= 0 ? -1 : row.best([&](int e) {
          return served[e] < capacity && !contains(ids, top_k, e) && !contains(proposed, slot, e);
        });
        any_proposal |= proposed[slot] >= 0;
      }
    }
    if (!__syncthreads_or(any_proposal)) break;
    for (int i = 0; i < num_assignments; ++i) {
      if (proposals[i] != expert || num_served == capacity) continue;
      expert_ids[i] = expert;
      ++num_served;
    }
    __syncthreads();
  }
  for (int token = threadIdx.x; proposals && token < tokens; token += blockDim.x) {
    const T* row = logits + static_cast<int64_t>(token) * experts;
    Token<T, kScore>{row, correction, experts, group_size}.weigh(
        expert_ids + token * top_k, weights + token * top_k, top_k, renormalize, scaling);
  }

  served[expert] = num_served;
  __syncthreads();
  if (threadIdx.x == 0) {
    starts[0] = 0;
    for (int e = 0; e < experts; ++e) starts[e + 1] = starts[e] + served[e];
  }
  __syncthreads();
  if (expert < experts) {
    counts[expert] = num_served;
    offsets[expert] = starts[expert];
    offsets[expert + 1] = starts[expert + 1];
    int next = starts[expert];
    for (int i = 0; i < num_assignments; ++i) {
      if (expert_ids[i] != expert) continue;
      order[next] = i;
      position[i] = next++;
    }
  }
  for (int i = threadIdx.x; i < num_assignments; i += blockDim.x) {
    if (expert_ids[i] < 0) position[i] = -1;
    if (i >= starts[experts]) order[i] = -1;
  }
}

}  // namespace kernelcat
