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

// The experts of a token.
template <int kIdWords>
struct TokenExperts {
  uint2 ids[kIdWords];

  // Loads ids from `words`; false unless all are of `epoch`.
  __device__ __forceinline__ bool load(const FlaggedWord* words, uint32_t epoch) {
    bool has_come = true;
#pragma unroll
    for (int part = 0; part < kIdWords; ++part) {
      const FlaggedWord word = load_flagged(&words[part]);
      has_come &= word.low_flag == epoch && word.high_flag == epoch;
      ids[part] = {word.low, word.high};
    }
    return has_come;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int part = 0; part < kIdWords; ++part) ids[part] = {~0u, ~0u};
  }

  // Calls `visit(slot, expert)` for each slot. Experts are counted from `first`; the expert is -1
  // where it is not one of `local_experts`.
  template <typename Visit>
  __device__ __forceinline__ void visit(int top_k, int first, int local_experts,
                                        Visit visit) const {
#pragma unroll
    for (int slot = 0; slot < kIdWords * kWordIds; ++slot) {
      if (slot >= top_k) continue;
      const int expert = unpacked_id(ids[slot / kWordIds], slot % kWordIds) - first;
      const bool is_here = 0 <= expert && expert < local_experts;
      visit(slot, is_here ? expert : -1);
    }
  }
};

// The ids of all ranks' tokens, in this rank's window.
template <int kRanks, int kIdWords>
struct SentIds {
  const Tokens<kIdWords>& tokens;
  const Window* own;
  uint32_t epoch;

  // Loads the experts of token number i of all ranks; one that there is not has none. Returns the
  // rank whose ids have not come, or -1.
  __device__ __forceinline__ int load(TokenExperts<kIdWords>& experts, int i) const {
    experts.clear();
    if (i >= kRanks * tokens.tokens) return -1;
    const int source = i / tokens.tokens, word = tokens.word_of(i % tokens.tokens, 0);
    return experts.load(&own->words[epoch % 2][source][word], epoch) ? -1 : source;
  }
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
  int* of_warps;    // (kWarps, experts + 1) counts of each warp, and then where they begin
  uint32_t* lanes;  // (kWarps, experts + 1), a bit for each lane that has the expert

  __device__ __forceinline__ MapMemory(int* memory, int experts) : experts(experts) {
    counts = memory;
    totals = counts + experts + 2;
    starts = totals + experts + 2;
    of_warps = starts + experts + 2;
    lanes = reinterpret_cast<uint32_t*>(of_warps + kWarps * (experts + 1));
  }

  __device__ __forceinline__ int of_warp(int expert) const {
    return threadIdx.x / kWarpThreads * (experts + 1) + expert;
  }

  __device__ __forceinline__ void clear_counts() const {
    for (int i = threadIdx.x; i < 3 * (experts + 2); i += kThreads) counts[i] = 0;
  }

  __device__ __forceinline__ void clear_warps() const {
    for (int i = threadIdx.x; i < 2 * kWarps * (experts + 1); i += kThreads) of_warps[i] = 0;
  }

  // Turns the counts of warps into where their assignments begin, after all earlier ones.
  __device__ __forceinline__ void start_warps() const {
    for (int i = threadIdx.x; i <= experts; i += kThreads) {
      int next = starts[i];
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        int& of_warp = of_warps[warp * (experts + 1) + i];
        const int count = of_warp;
        of_warp = next;
        next += count;
      }
      starts[i] = next;
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
        counted_(reinterpret_cast<FlaggedWord*>(own->words[epoch % 2][rank]) + tokens.num_words()),
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
    memory_.clear_counts();
    __syncthreads();
    TokenExperts<kIdWords> found;
    bool is_missing = false;
    for (int base = first_; base < end_; base += kThreads) {
      waiting.until_none([&] {
        const int missing = sent_.load(found, base + threadIdx.x);
        is_missing = missing >= 0;
        return missing;
      });
      count(found);
    }
    if (__syncthreads_or(is_missing)) return;
    if (num_blocks_ > 1) {
      send_counts();
      is_missing = !take_counts(waiting);
    } else {
      for (int i = threadIdx.x; i <= memory_.experts; i += kThreads) {
        memory_.totals[i] = memory_.counts[i];
      }
    }
    if (__syncthreads_or(is_missing)) return;
    start_experts(scratch);
    for (int base = first_; base < end_; base += kThreads) {
      memory_.clear_warps();
      __syncthreads();
      if (end_ - first_ > kThreads) sent_.load(found, base + threadIdx.x);
      place(found);
      __syncthreads();
    }
    fill();
  }

 private:
  template <typename Visit>
  __device__ __forceinline__ void visit(const TokenExperts<kIdWords>& found, Visit visit) const {
    found.visit(tokens_.top_k, rank_ * tokens_.local_experts, tokens_.local_experts, visit);
  }

  __device__ __forceinline__ void count(const TokenExperts<kIdWords>& found) const {
    bool comes = false;
    visit(found, [&](int, int expert) {
      if (expert >= 0) atomicAdd(&memory_.counts[expert], 1);
      comes |= expert >= 0;
    });
    const int num_rows = __popc(__ballot_sync(0xffffffff, comes));
    if (lane_index() == 0 && num_rows > 0) atomicAdd(&memory_.counts[memory_.experts], num_rows);
  }

  // Counts travel by twos, as flagged words of this rank to itself, after the ids.
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

  // Adds the assignments of lower experts to where an expert's assignments begin.
  __device__ __forceinline__ void start_experts(int2* scratch) {
    num_assignments_ = 0;
    for (int first = 0; first < memory_.experts; first += kThreads) {
      const int expert = first + threadIdx.x;
      const bool is_expert = expert < memory_.experts;
      const PairSum sum =
          block_pair_sum<kThreads>({is_expert ? memory_.totals[expert] : 0, 0}, scratch);
      const int start = num_assignments_ + sum.before.x;
      if (is_expert) memory_.starts[expert] += start;
      if (is_expert && index_ == 0) maps_.offsets[expert] = start;
      num_assignments_ += sum.total.x;
    }
    if (index_ == 0 && threadIdx.x == 0) maps_.offsets[memory_.experts] = num_assignments_;
  }

  // Stores the places of a token's assignments. All threads call this together.
  __device__ __forceinline__ void place(const TokenExperts<kIdWords>& found) const {
    const uint32_t own_bit = 1u << lane_index();
    bool comes = false, is_repeated = false;
    const auto mark = [&](int expert) {
      const uint32_t lanes = atomicOr(&memory_.lanes[memory_.of_warp(expert)], own_bit);
      atomicAdd(&memory_.of_warps[memory_.of_warp(expert)], 1);
      is_repeated |= (lanes & own_bit) != 0;
    };
    visit(found, [&](int, int expert) {
      comes |= expert >= 0;
      if (expert >= 0) mark(expert);
    });
    if (comes) mark(memory_.experts);
    const bool has_repeated = __syncthreads_or(is_repeated);
    memory_.start_warps();
    __syncthreads();
    const auto number_of = [&](int expert) {
      const int i = memory_.of_warp(expert);
      return memory_.of_warps[i] + __popc(memory_.lanes[i] & (own_bit - 1));
    };
    const int64_t row = comes ? number_of(memory_.experts) : 0;
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
          store(slot, expert, expert < 0 ? -1 : memory_.of_warps[memory_.of_warp(expert)]++);
        });
      }
      __syncwarp();
    }
  }

  // What belongs to no assignment: the ends of both maps.
  __device__ __forceinline__ void fill() const {
    const int num_rows = memory_.totals[memory_.experts];
    const int size = kRanks * tokens_.tokens * tokens_.top_k, step = num_blocks_ * kThreads;
    const int first = index_ * kThreads + threadIdx.x;
    for (int i = num_assignments_ + first; i < size; i += step) maps_.order[i] = -1;
    for (int i = num_rows * tokens_.top_k + first; i < size; i += step) maps_.position[i] = -1;
  }

  const Maps& maps_;
  const Tokens<kIdWords>& tokens_;
  const MapMemory<kThreads>& memory_;
  SentIds<kRanks, kIdWords> sent_;
  FlaggedWord* counted_;
  uint32_t epoch_;
  int rank_, index_, num_blocks_, first_, end_, num_assignments_ = 0;
};

}  // namespace kernelcat
