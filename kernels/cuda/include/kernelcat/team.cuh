// Reductions over the threads that work on a row: those of a thread block, or of a cluster.
#pragma once

#include <kernelcat/cluster.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// A value of up to eight words. Default values are neutral, and `merge` must not depend on order.
template <typename Value>
struct Words {
  static constexpr int kCount = sizeof(Value) / 4;
  uint32_t words[kCount];
};

template <typename Value>
__device__ __forceinline__ Value shuffled(const Value& value, int mask) {
  Words<Value> words = __builtin_bit_cast(Words<Value>, value);
#pragma unroll
  for (uint32_t& word : words.words) word = __shfl_xor_sync(0xffffffff, word, mask);
  return __builtin_bit_cast(Value, words);
}

// All values of a warp merged, in all lanes.
template <typename Value>
__device__ __forceinline__ Value merged_in_warp(Value value) {
#pragma unroll
  for (int mask = kWarpThreads / 2; mask > 0; mask /= 2) value.merge(shuffled(value, mask));
  return value;
}

constexpr int kMaxWords = 8;

// Values in shared memory: of warps, and of the thread blocks of the cluster. Two slots alternate,
// so that one barrier a reduction suffices: a slot is written again only after the next barrier.
template <int kNumWarps, int kClusterSize>
struct TeamMemory {
  uint32_t warps[2][kNumWarps][kMaxWords];
  uint32_t blocks[2][kClusterSize][kMaxWords];
};

template <int kThreads, int kClusterSize>
struct Team {
  static constexpr int kNumWarps = kThreads / kWarpThreads;
  static_assert(kNumWarps <= kWarpThreads && kClusterSize <= kWarpThreads);
  TeamMemory<kNumWarps, kClusterSize>& memory;
  int slot = 0;

  // The values of all threads merged, the same bits in all threads, which call this together. In a
  // cluster all thread blocks must have started.
  template <typename Value>
  __device__ __forceinline__ Value reduce(Value value) {
    static_assert(Words<Value>::kCount <= kMaxWords);
    const int lane = lane_index();
    value = merged_in_warp(value);
    if (lane == 0) write(memory.warps[slot][threadIdx.x / kWarpThreads], value);
    __syncthreads();
    value = merged_in_warp(lane < kNumWarps ? read<Value>(memory.warps[slot][lane]) : Value{});
    if constexpr (kClusterSize > 1) {
      auto& inbox = memory.blocks[slot];
      if (threadIdx.x < kClusterSize) write_remote(inbox[cluster_rank()], value, threadIdx.x);
      cluster_sync();
      value = merged_in_warp(lane < kClusterSize ? read<Value>(inbox[lane]) : Value{});
    }
    slot ^= 1;
    return value;
  }

 private:
  template <typename Value>
  static __device__ __forceinline__ void write(uint32_t (&target)[kMaxWords], const Value& value) {
    const Words<Value> words = __builtin_bit_cast(Words<Value>, value);
#pragma unroll
    for (int i = 0; i < Words<Value>::kCount; ++i) target[i] = words.words[i];
  }

  // Writes to where `target` lies in thread block `cta` of the cluster.
  template <typename Value>
  static __device__ __forceinline__ void write_remote(const uint32_t (&target)[kMaxWords],
                                                      const Value& value, uint32_t cta) {
    const Words<Value> words = __builtin_bit_cast(Words<Value>, value);
    const uint32_t address = remote_address(shared_address(target), cta);
#pragma unroll
    for (int i = 0; i < Words<Value>::kCount; ++i) {
      asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address + 4 * i), "r"(words.words[i])
                   : "memory");
    }
  }

  template <typename Value>
  static __device__ __forceinline__ Value read(const uint32_t (&source)[kMaxWords]) {
    Words<Value> words;
#pragma unroll
    for (int i = 0; i < Words<Value>::kCount; ++i) words.words[i] = source[i];
    return __builtin_bit_cast(Value, words);
  }
};

}  // namespace kernelcat
