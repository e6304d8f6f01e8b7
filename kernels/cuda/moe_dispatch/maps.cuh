// The index maps of the rows that arrive: assignments sorted by expert, as grouped products take
// them. Each thread block counts the assignments of some tokens for all experts. Counts of all
// thread blocks tell where those of a thread block begin, and warps count in the same way.
#pragma once

#include <kernelcat/block_sum.cuh>

#include "arrivals.cuh"

namespace kernelcat {

struct Maps {
  int* offsets;   // (local_experts + 1,)
  int* order;     // (ranks * tokens * top_k,)
  int* position;  // (ranks * tokens, top_k)
};

// What a thread block that makes maps counts, in shared memory. A token that comes is counted for
// `experts`, one number after the last expert, so that rows are numbered like assignments.
template <int kThreads>
struct MapMemory {
  static constexpr int kWarps = kThreads / kWarpThreads;
  int experts;
  int* counts;      // (experts + 2,) of the thread block's tokens; an even number of counts travels
  int* totals;      // (experts + 2,) of all tokens
  int* starts;      // (experts + 2,) where the next assignment of an expert stands
  uint32_t* lanes;  // (kWarps, experts + 1), a bit for each lane that has the expert
  int* of_warps;    // (kWarps, experts + 1), assignments beyond these bits, then those of the warps
                    // before

  __device__ __forceinline__ MapMemory(int* memory, int experts) : experts(experts) {
    counts = memory;
    totals = counts + experts + 2;
    starts = totals + experts + 2;
    lanes = reinterpret_cast<uint32_t*>(starts + experts + 2);
    of_warps = reinterpret_cast<int*>(lanes + kWarps * (experts + 1));
  }

  __device__ __forceinline__ int of_warp(int expert) const {
    return threadIdx.x / kWarpThreads * (experts + 1) + expert;
  }

  __device__ __forceinline__ void clear() const {
    for (int i = threadIdx.x; i < 3 * (experts + 2); i += kThreads) counts[i] = 0;
    clear_warps();
  }

  __device__ __forceinline__ void clear_warps() const {
    for (int i = threadIdx.x; i < kWarps * (experts + 1); i += kThreads) lanes[i] = of_warps[i] = 0;
  }

  // Turns what warps have marked into the assignments of the warps before; adds up to `sums`.
  __device__ __forceinline__ void add_up_warps(int* sums) const {
    for (int i = threadIdx.x; i <= experts; i += kThreads) {
      int count = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const int at = warp * (experts + 1) + i, beyond = of_warps[at];
        of_warps[at] = count;
        count += __popc(lanes[at]) + beyond;
      }
      sums[i] += count;
    }
  }
};

// One thread block's part of the maps. There are `num_blocks`, which share the tokens of all ranks
// in rounds of kThreads, and what belongs to no expert.
template <int kRanks, int kThreads, int kIdWords>
class MapMaker {
 public:
  __device__ __forceinline__ MapMaker(const Maps& maps, const Tokens<kIdWords>& tokens, int rank,
                                      Window* own, uint32_t epoch, int index, int num_blocks,
                                      const MapMemory<kThreads>& memory)
      : maps_(maps),
        tokens_(tokens),
        memory_(memory),
        sent_{tokens, own, epoch},
        comers_(Comers::of<kRanks>(tokens, own, rank, epoch)),
        counted_(comers_.words + comers_.num_groups),
        epoch_(epoch),
        rank_(rank),
        index_(index),
        num_blocks_(num_blocks) {
    const int rounds = ceil_div(ceil_div(kRanks * tokens.tokens, num_blocks), kThreads);
    first_ = index * rounds * kThreads;
    end_ = min(first_ + rounds * kThreads, kRanks * tokens.tokens);
  }

  // All threads call this together. `scratch` is shared memory, (kThreads / 32,). Where ids do not
  // come in time there are no maps.
  __device__ __forceinline__ void make(Waiting& waiting, int2* scratch) {
    memory_.clear();
    __syncthreads();
    TokenExperts<kIdWords> found;
    bool is_missing = false, has_repeated = false;
    for (int base = first_; base < end_; base += kThreads) {  // first what others wait for
      int missing;
      waiting.until_none([&] { return missing = sent_.load(found, base + threadIdx.x); });
      if (missing >= 0) found.clear();
      is_missing |= missing >= 0;
      say_who_comes(found, base);
    }
    for (int base = first_; base < end_; base += kThreads) {
      if (has_rounds()) sent_.load(found, base + threadIdx.x);
      if (base > first_) next_round();
      has_repeated = mark(found);
      __syncthreads();
      memory_.add_up_warps(memory_.counts);
    }
    if (__syncthreads_or(is_missing)) return;
    const int* totals = memory_.counts;
    if (num_blocks_ > 1) {
      send_counts();
      is_missing = !take_counts(waiting);
      totals = memory_.totals;
      if (__syncthreads_or(is_missing)) return;
    }
    start_experts(totals, scratch);
    const int num_rows = totals[memory_.experts];
    if (has_rounds()) {
      __syncthreads();  // all have read `num_rows`
      place_again();
    } else if (first_ < end_) {
      place(found, has_repeated);
    }
    fill(num_rows);
  }

 private:
  template <typename Visit>
  __device__ __forceinline__ void visit(const TokenExperts<kIdWords>& found, Visit visit) const {
    found.visit(tokens_.top_k, rank_ * tokens_.local_experts, tokens_.local_experts, visit);
  }

  // Whether the thread block has more tokens than threads.
  __device__ __forceinline__ bool has_rounds() const { return end_ - first_ > kThreads; }

  __device__ __forceinline__ void say_who_comes(const TokenExperts<kIdWords>& found,
                                                int base) const {
    bool comes = false;
    visit(found, [&](int, int expert) { comes |= expert >= 0; });
    comers_.store(base + static_cast<int>(threadIdx.x) / kWarpThreads * kWarpThreads, comes,
                  epoch_);
  }

  // Marks the experts of this thread's token. True where a token of the warp has an expert twice.
  __device__ __forceinline__ bool mark(const TokenExperts<kIdWords>& found) const {
    const uint32_t own_bit = 1u << lane_index();
    int earlier[kIdWords * kWordIds];
    bool comes = false, is_repeated = false;
    visit(found, [&](int slot, int expert) {
      earlier[slot] = expert;
      if (expert < 0) return;
      comes = true;
      bool is_again = false;
#pragma unroll
      for (int i = 0; i < kIdWords * kWordIds; ++i) is_again |= i < slot && earlier[i] == expert;
      if (is_again) {
        is_repeated = true;
        atomicAdd(&memory_.of_warps[memory_.of_warp(expert)], 1);
      } else {
        atomicOr(&memory_.lanes[memory_.of_warp(expert)], own_bit);
      }
    });
    const uint32_t rows = __ballot_sync(0xffffffff, comes);
    if (lane_index() == 0) memory_.lanes[memory_.of_warp(memory_.experts)] = rows;
    return __any_sync(0xffffffff, is_repeated);
  }

  // All threads call this together, after add_up_warps and before they mark again.
  __device__ __forceinline__ void next_round() const {
    __syncthreads();
    memory_.clear_warps();
    __syncthreads();
  }

  // `place` for each round of tokens, which are marked once more.
  __device__ __forceinline__ void place_again() const {
    for (int base = first_; base < end_; base += kThreads) {
      TokenExperts<kIdWords> found;
      sent_.load(found, base + threadIdx.x);
      next_round();
      for (int i = threadIdx.x; i <= memory_.experts; i += kThreads) memory_.counts[i] = 0;
      const bool has_repeated = mark(found);
      __syncthreads();
      memory_.add_up_warps(memory_.counts);
      __syncthreads();
      place(found, has_repeated);
      __syncthreads();
      for (int i = threadIdx.x; i <= memory_.experts; i += kThreads) {
        memory_.starts[i] += memory_.counts[i];
      }
    }
  }

  // Counts travel by twos, as flagged words of this rank to itself.
  __device__ __forceinline__ int num_pairs() const { return memory_.experts / 2 + 1; }

  __device__ __forceinline__ void send_counts() const {
    for (int pair = threadIdx.x; pair < num_pairs(); pair += kThreads) {
      const uint2 counts = {static_cast<uint32_t>(memory_.counts[2 * pair]),
                            static_cast<uint32_t>(memory_.counts[2 * pair + 1])};
      store_flagged(&counted_[index_ * num_pairs() + pair], counts, epoch_);
    }
  }

  // Adds up the counts of all thread blocks, and those of the thread blocks before this one. A warp
  // takes every eighth thread block. False if counts did not come in time.
  __device__ __forceinline__ bool take_counts(Waiting& waiting) const {
    constexpr int kWarps = kThreads / kWarpThreads, kUnroll = 4;
    for (int first = threadIdx.x / kWarpThreads; first < num_blocks_; first += kWarps * kUnroll) {
      for (int pair = lane_index(); pair < num_pairs(); pair += kWarpThreads) {
        FlaggedWord words[kUnroll];
        bool have_come;
        waiting.until_none([&] {
          have_come = true;
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            const int block = first + i * kWarps;
            words[i] = {0, epoch_, 0, epoch_};
            if (block < num_blocks_) words[i] = load_flagged(&counted_[block * num_pairs() + pair]);
            have_come &= words[i].low_flag == epoch_ && words[i].high_flag == epoch_;
          }
          return have_come ? -1 : rank_;
        });
        if (!have_come) return false;
        int2 all = {0, 0}, before = {0, 0};
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const int low = words[i].low, high = words[i].high;
          all = {all.x + low, all.y + high};
          if (first + i * kWarps < index_) before = {before.x + low, before.y + high};
        }
        atomicAdd(&memory_.totals[2 * pair], all.x);
        atomicAdd(&memory_.totals[2 * pair + 1], all.y);
        atomicAdd(&memory_.starts[2 * pair], before.x);
        atomicAdd(&memory_.starts[2 * pair + 1], before.y);
      }
    }
    return true;
  }

  // Adds the assignments of lower experts to where an expert's assignments begin. All threads call
  // this together; `totals` of an expert is that of the thread which has added it up.
  __device__ __forceinline__ void start_experts(const int* totals, int2* scratch) {
    num_assignments_ = 0;
    for (int first = 0; first < memory_.experts; first += kThreads) {
      const int expert = first + threadIdx.x;
      const bool is_expert = expert < memory_.experts;
      const PairSum sum = block_pair_sum<kThreads>({is_expert ? totals[expert] : 0, 0}, scratch);
      const int start = num_assignments_ + sum.before.x;
      if (is_expert) memory_.starts[expert] += start;
      if (is_expert && index_ == 0) maps_.offsets[expert] = start;
      num_assignments_ += sum.total.x;
    }
    if (index_ == 0 && threadIdx.x == 0) maps_.offsets[memory_.experts] = num_assignments_;
    __syncthreads();
  }

  // Stores the places of a token's assignments. All threads of a warp call this together.
  __device__ __forceinline__ void place(const TokenExperts<kIdWords>& found,
                                        bool has_repeated) const {
    const uint32_t own_bit = 1u << lane_index();
    const auto first_of = [&](int expert) {
      return memory_.starts[expert] + memory_.of_warps[memory_.of_warp(expert)];
    };
    const auto number_of = [&](int expert) {
      return first_of(expert) + __popc(memory_.lanes[memory_.of_warp(expert)] & (own_bit - 1));
    };
    const bool comes = memory_.lanes[memory_.of_warp(memory_.experts)] & own_bit;
    const int64_t row = number_of(memory_.experts);
    const auto store = [&](int slot, int expert, int number) {
      if (expert >= 0) maps_.order[number] = row * tokens_.top_k + slot;
      maps_.position[row * tokens_.top_k + slot] = number;
    };
    if (!has_repeated) {
      if (!comes) return;
      visit(found, [&](int slot, int expert) {
        store(slot, expert, expert < 0 ? -1 : number_of(expert));
      });
      return;
    }
    // A token has an expert twice, which a bit for each lane does not tell: one lane after another.
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      if (comes && lane == lane_index()) {
        visit(found, [&](int slot, int expert) {
          store(slot, expert, expert < 0 ? -1 : first_of(expert));
          if (expert >= 0) memory_.of_warps[memory_.of_warp(expert)]++;
        });
      }
      __syncwarp();
    }
  }

  // What belongs to no assignment: the ends of both maps, after `num_rows` rows.
  __device__ __forceinline__ void fill(int num_rows) const {
    const int size = kRanks * tokens_.tokens * tokens_.top_k, step = num_blocks_ * kThreads;
    const int first = index_ * kThreads + threadIdx.x;
    for (int i = num_assignments_ + first; i < size; i += step) maps_.order[i] = -1;
    for (int i = num_rows * tokens_.top_k + first; i < size; i += step) maps_.position[i] = -1;
  }

  const Maps& maps_;
  const Tokens<kIdWords>& tokens_;
  const MapMemory<kThreads>& memory_;
  SentIds<kRanks, kIdWords> sent_;
  Comers comers_;
  FlaggedWord* counted_;
  uint32_t epoch_;
  int rank_, index_, num_blocks_, first_, end_, num_assignments_ = 0;
};

}  // namespace kernelcat
