// One warp selects the experts of one token, from sorted lists.
//
// Each lane has consecutive experts of one group, in the order of lanes, and sorts them once as
// candidates. Then the token's best expert is at the head of a lane's list, and of equal heads the
// one of the lowest lane comes first.
#pragma once

#include "warp_select.cuh"

namespace kernelcat::sorted {

// Which experts a lane has. kGroupLanes neighbouring lanes, a power of two, have the experts of a
// group; a lane has room for kPerLane consecutive ones, which it loads in vectors of kVector. A
// token uses the best kTopGroups of kGroups groups, or all experts, which are one group then.
template <int kExperts_, int kGroups_, int kTopGroups_, int kGroupLanes_, int kPerLane_,
          int kVector_>
struct LaneExperts {
  static constexpr int kExperts = kExperts_, kGroups = kGroups_, kTopGroups = kTopGroups_;
  static constexpr int kGroupLanes = kGroupLanes_, kPerLane = kPerLane_, kVector = kVector_;
  static constexpr int kGroupSize = kExperts / kGroups;
  static constexpr int kWordVector = kVector < 4 ? kVector : 4;
  static constexpr bool kIsFull = kWarpThreads * kPerLane == kExperts;
  static_assert(kPerLane % kVector == 0 && kGroupSize % kVector == 0);

  static __device__ __forceinline__ int group() { return lane_index() / kGroupLanes; }
  static __device__ __forceinline__ int part() { return lane_index() % kGroupLanes; }
  static __device__ __forceinline__ int at(int i) {
    return group() * kGroupSize + part() * kPerLane + i;
  }
  // Whether there is an expert number i of the lane.
  static __device__ __forceinline__ bool has(int i) {
    return kIsFull || (group() < kGroups && part() * kPerLane + i < kGroupSize);
  }
};

// A value for each of the lane's experts, in registers; garbage where there is no expert. `row` is
// (experts,).
template <typename T, typename Experts, int kVector>
struct LaneValues {
  using Vector = typename WordsOf<kVector * sizeof(T)>::Type;
  Vector vectors[Experts::kPerLane / kVector];

  __device__ __forceinline__ void load(const T* row) {
#pragma unroll
    for (int i = 0; i < Experts::kPerLane; i += kVector) {
      if (Experts::has(i)) {
        vectors[i / kVector] = *reinterpret_cast<const Vector*>(row + Experts::at(i));
      }
    }
  }

  __device__ __forceinline__ void store(T* row) const {
#pragma unroll
    for (int i = 0; i < Experts::kPerLane; i += kVector) {
      if (Experts::has(i)) {
        *reinterpret_cast<Vector*>(row + Experts::at(i)) = vectors[i / kVector];
      }
    }
  }

  __device__ __forceinline__ T& operator[](int i) { return reinterpret_cast<T*>(vectors)[i]; }
  __device__ __forceinline__ T operator[](int i) const {
    return reinterpret_cast<const T*>(vectors)[i];
  }
};

template <typename T, typename Experts>
using LaneLogits = LaneValues<T, Experts, Experts::kVector>;
template <typename Experts>
using LaneWords = LaneValues<float, Experts, Experts::kWordVector>;

// The experts that a token may still select. A key is the ordered bits of a selection score, 0 for
// an expert that is taken or that the token may not use. A tail is the complement of the expert: of
// equal keys the one with the larger tail comes first.
template <typename Experts>
struct LaneCandidates {
  static constexpr int kPerLane = Experts::kPerLane;
  uint32_t keys[kPerLane], tails[kPerLane];

  // Sorts in descending order, by Batcher's odd-even mergesort: from the step on that merges sorted
  // parts of kSize and compares over kDistance.
  template <int kSize = 1, int kDistance = 1>
  __device__ __forceinline__ void sort() {
    if constexpr (kSize < kPerLane) {
#pragma unroll
      for (int i = kDistance % kSize; i < kPerLane - kDistance; ++i) {
        const bool is_first = (i - kDistance % kSize) / kDistance % 2 == 0;
        if (is_first && i / (2 * kSize) == (i + kDistance) / (2 * kSize)) {
          put_in_order(i, i + kDistance);
        }
      }
      if constexpr (kDistance > 1) {
        sort<kSize, kDistance / 2>();
      } else {
        sort<2 * kSize, 2 * kSize>();
      }
    }
  }

  __device__ __forceinline__ void put_in_order(int i, int j) {
    const uint32_t key = keys[i], tail = tails[i], other_key = keys[j], other_tail = tails[j];
    const uint64_t wide = static_cast<uint64_t>(key) << 32 | tail;
    const bool is_ordered = wide > (static_cast<uint64_t>(other_key) << 32 | other_tail);
    keys[i] = is_ordered ? key : other_key;
    keys[j] = is_ordered ? other_key : key;
    tails[i] = is_ordered ? tail : other_tail;
    tails[j] = is_ordered ? other_tail : tail;
  }

  // Takes the best candidate out of the lanes' sorted lists, and returns its key. `is_mine` tells
  // whether it was this lane's, `expert` is the expert at the head of this lane's list.
  __device__ __forceinline__ uint32_t take_best(bool& is_mine, int& expert) {
    const uint32_t key = keys[0], best = __reduce_max_sync(kAllLanes, key);
    const uint32_t holders = __ballot_sync(kAllLanes, key == best);
    is_mine = key == best && (holders & ((1u << lane_index()) - 1)) == 0;
    expert = static_cast<int>(~tails[0]);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool is_last = i + 1 == kPerLane;
      keys[i] = is_mine ? (is_last ? 0 : keys[i + 1]) : keys[i];
      tails[i] = is_mine && !is_last ? tails[i + 1] : tails[i];
    }
    return best;
  }

  // Takes out `expert`; nothing for a negative number.
  __device__ __forceinline__ void remove(int expert) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (static_cast<int>(~tails[i]) == expert) keys[i] = 0;
    }
  }

  // Whether the lane's group is one of the token's best; keys are sorted.
  __device__ __forceinline__ bool may_use_group() const {
    uint32_t best = keys[0], second = kPerLane > 1 ? keys[1] : 0;
#pragma unroll
    for (int mask = 1; mask < Experts::kGroupLanes; mask *= 2) {
      const uint32_t other_best = __shfl_xor_sync(kAllLanes, best, mask);
      const uint32_t other_second = __shfl_xor_sync(kAllLanes, second, mask);
      second = max(min(best, other_best), max(second, other_second));
      best = max(best, other_best);
    }
    float total = from_ordered_bits(best);
    if (Experts::kGroupSize > 1) total += from_ordered_bits(second);
    return num_better_groups(ordered_bits(total)) < Experts::kTopGroups;
  }

  // Groups with a larger key than the lane's group; each of a group's lanes compares some.
  static __device__ __forceinline__ int num_better_groups(uint32_t key) {
    int num_better = 0;
#pragma unroll
    for (int first = 0; first < Experts::kGroups; first += Experts::kGroupLanes) {
      const int other = first + Experts::part();
      const uint32_t other_key =
          __shfl_sync(kAllLanes, key, other * Experts::kGroupLanes % kWarpThreads);
      const uint32_t least = other < Experts::group() ? key : key + 1;  // ties go to the lower one
      num_better += other_key >= least && other < Experts::kGroups;
    }
#pragma unroll
    for (int mask = 1; mask < Experts::kGroupLanes; mask *= 2) {
      num_better += __shfl_xor_sync(kAllLanes, num_better, mask);
    }
    return num_better;
  }
};

// The sorted candidates of a token. `sigmoids` is (experts,) in shared memory and belongs to the
// warp, for kSigmoid. `corrections` may be 0.
template <Score kScore, typename T, typename Experts>
__device__ __forceinline__ LaneCandidates<Experts> make_candidates(
    const LaneLogits<T, Experts>& logits, const LaneWords<Experts>& corrections, float* sigmoids) {
  constexpr int kPerLane = Experts::kPerLane;
  LaneCandidates<Experts> lane;
  LaneWords<Experts> scores;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    scores[i] = to_float(logits[i]);
    if constexpr (kScore == Score::kSigmoid) scores[i] = sigmoid(scores[i]);
  }
  if constexpr (kScore == Score::kSigmoid) scores.store(sigmoids);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if constexpr (kScore == Score::kSigmoid) scores[i] += corrections[i];
    lane.keys[i] = Experts::has(i) ? ordered_bits(scores[i]) : 0;
    lane.tails[i] = ~static_cast<uint32_t>(Experts::at(i));
  }
  lane.sort();
  if constexpr (Experts::kTopGroups < Experts::kGroups) {
    const bool is_usable = lane.may_use_group();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) lane.keys[i] = is_usable ? lane.keys[i] : 0;
  }
  return lane;
}

// The largest logit of a token.
template <typename T, typename Experts>
__device__ __forceinline__ float max_of(const LaneLogits<T, Experts>& logits) {
  uint32_t best = 0;
#pragma unroll
  for (int i = 0; i < Experts::kPerLane; ++i) {
    best = max(best, Experts::has(i) ? ordered_bits(to_float(logits[i])) : 0);
  }
  return from_ordered_bits(__reduce_max_sync(kAllLanes, best));
}

// The weight of the lane's expert, from its numerator, which is 0 in lanes without an expert.
template <Score kScore, bool kRenormalize, typename T, typename Experts>
__device__ __forceinline__ float weigh(const LaneLogits<T, Experts>& logits, float numerator,
                                       float max_logit, float scaling) {
  float total = 1.0f;
  if constexpr (kRenormalize) {
    total = warp_sum(numerator) + 1e-20f;
  } else if constexpr (kScore == Score::kSoftmax) {
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < Experts::kPerLane; ++i) {
      if (Experts::has(i)) total += unscaled_weight<kScore>(to_float(logits[i]), max_logit);
    }
    total = warp_sum(total);
  }
  return numerator * __fdividef(scaling, total);
}

}  // namespace kernelcat::sorted
