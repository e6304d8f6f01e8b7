// Windows: the memory of each rank that all ranks write to, and how the ranks wait for each other.
//
// Every launch has an epoch, the number of launches before it plus one, which the window counts: a
// graph that is replayed counts too, and nothing is reset. Launches of odd and even epochs write to
// different halves of a window. That makes writes safe without a barrier at the end: a rank that
// begins epoch e + 2 has received something of epoch e + 1 from every rank, so every rank has ended
// epoch e. All ranks make the same launches in the same order, on one stream each.
//
// A rank waits for kPatienceNs at most; then it names the missing rank in `error`, and no later
// launch on the window waits for anything. kernelcat/ranks/window.py has the same layout.
#pragma once

#include <kernelcat/system_scope.cuh>

namespace kernelcat {

constexpr int kMaxRanks = 8;
constexpr int kMaxWindowBlocks = 512;  // thread blocks of a launch
constexpr int kWords = 1 << 17;        // flagged words from each rank: 1 MiB of data
constexpr int kTileVectors = 4 << 20;  // vectors of 16 bytes in half of the tiles: 64 MiB
constexpr int kSlotVectors = 4 << 20;  // vectors of 16 bytes in half of the slots: 64 MiB
constexpr uint64_t kPatienceNs = 5000000000;

struct alignas(128) Window {
  uint32_t epochs[kMaxWindowBlocks];  // the last epoch, for each thread block of the next launch
  uint32_t error;                     // 0, or 1 + the rank that did not answer
  alignas(128) uint64_t signals[2][kMaxWindowBlocks][kMaxRanks];  // rounds, thread blocks, senders
  alignas(128) FlaggedWord words[2][kMaxRanks][kWords];           // halves, senders
  uint4 tiles[2][kTileVectors];                                   // halves
  uint4 slots[2][kSlotVectors];  // halves; zeros but for what is on its way
};

// The windows of all ranks, as this rank maps them: of[shift] is that of rank `peer(shift)`, and
// of[0] is its own. Ranks that send in this order do not all send to the same rank at once.
template <int kRanks>
struct Windows {
  static_assert(2 <= kRanks && kRanks <= kMaxRanks);
  Window* of[kMaxRanks];
  int rank;

  __device__ __forceinline__ int peer(int shift) const { return (rank + shift) % kRanks; }
  __device__ __forceinline__ int shift_of(int peer) const {
    return (peer - rank + kRanks) % kRanks;
  }
};

// How long a thread has waited. The clock is read in every 256th call.
class Patience {
 public:
  __device__ __forceinline__ bool is_over() {
    if (++num_calls_ % 256 != 0) return false;
    const uint64_t now = global_nanoseconds();
    if (end_ == 0) end_ = now + kPatienceNs;
    return now > end_;
  }

 private:
  uint32_t num_calls_ = 0;
  uint64_t end_ = 0;
};

__device__ __forceinline__ void report_missing(Window* own, int rank) {
  *reinterpret_cast<volatile uint32_t*>(&own->error) = 1 + rank;
}

__device__ __forceinline__ bool has_failed(const Window* own) {
  return *reinterpret_cast<const volatile uint32_t*>(&own->error) != 0;
}

// The epoch of this launch. The thread block's copy is its own, so no thread block has to wait for
// the others to have read it.
__device__ __forceinline__ uint32_t begin_epoch(const Window* own) {
  return *reinterpret_cast<const volatile uint32_t*>(&own->epochs[blockIdx.x]) + 1;
}

// Counts the launch, after all threads of the thread block have called begin_epoch. The copies
// beyond the grid are counted too, so that later launches may have any grid.
__device__ __forceinline__ void end_epoch(Window* own, uint32_t epoch) {
  __syncthreads();
  const int step = gridDim.x * blockDim.x;
  for (int i = blockIdx.x + threadIdx.x * gridDim.x; i < kMaxWindowBlocks; i += step) {
    own->epochs[i] = epoch;
  }
}

// Signals of one round (0 or 1) go between thread blocks of equal index. Signal number `count` of
// an epoch says that the sender has done its tiles up to that number, which begins with 1. The
// first thread of warp `shift` sends to the peer of this shift, and waits for that peer, so a
// thread block has a warp for each rank.
__device__ __forceinline__ uint64_t signal_value(uint32_t epoch, int count) {
  return static_cast<uint64_t>(epoch) << 32 | count;
}

// All threads call this together; what they wrote to the peers before comes before the signal.
template <int kRanks>
__device__ __forceinline__ void send_signals(const Windows<kRanks>& windows, int round,
                                             uint32_t epoch, int count) {
  __syncthreads();
#pragma unroll
  for (int shift = 1; shift < kRanks; ++shift) {
    if (threadIdx.x == shift * kWarpThreads) {
      store_release_system(&windows.of[shift]->signals[round][blockIdx.x][windows.rank],
                           signal_value(epoch, count));
    }
  }
}

// All threads call this together. Afterwards all see what the peers wrote before their signals;
// false if a peer did not answer.
template <int kRanks>
__device__ __forceinline__ bool wait_for_signals(const Windows<kRanks>& windows, int round,
                                                 uint32_t epoch, int count) {
  const int shift = threadIdx.x / kWarpThreads;
  bool is_missing = false;
  if (threadIdx.x % kWarpThreads == 0 && 0 < shift && shift < kRanks) {
    Window* own = windows.of[0];
    const uint64_t* signal = &own->signals[round][blockIdx.x][windows.peer(shift)];
    Patience patience;
    while (!is_missing && load_acquire_system(signal) < signal_value(epoch, count)) {
      is_missing = patience.is_over();
    }
    if (is_missing) report_missing(own, windows.peer(shift));
  }
  return !__syncthreads_or(is_missing);
}

}  // namespace kernelcat
