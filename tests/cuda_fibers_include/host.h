// CUDA on the host: the threads of a cluster of thread blocks are fibers, which run one after the
// other.
//
// A fiber that has to wait gives way to the others, in a random order that the seed determines.
// Copies by TMA land at random times, and products of wgmma are computed when they are waited for,
// i.e. as late as possible. If no fiber can go on, the cluster hangs, and run() reports that.
//
// What belongs to a thread block, shared memory among it, is in the variables below while fibers of
// the thread block run, and in a Block otherwise.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <fibers.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace kernelcat {
alignas(1024) inline unsigned char dynamic_shared[232448];
}

namespace host {

constexpr int kStackBytes = 256 << 10;
constexpr int kIdleRounds = 2000;  // without progress, until the cluster is said to hang
constexpr int kRoundsAhead = 100;  // of a thread block before others of its cluster go on, at most

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  int thread;
  bool is_done = false;
  std::vector<std::function<void()>> copies;  // cp.async that have not landed: the open group
  std::vector<std::vector<std::function<void()>>> copy_groups;  // and the groups before
  std::vector<std::vector<std::function<void()>>> products;  // committed groups, then the open one
  int num_operands = 0;  // operands in registers that were given to wgmma
  int cluster_arrivals = 0;
  int num_sent = 0;  // arrivals at barriers of other thread blocks that are under way
};

inline std::vector<Fiber> fibers;
inline Context scheduler;
inline Fiber* current = nullptr;
inline std::vector<std::function<void()>> landings;  // TMA copies under way
inline uint64_t progress = 0, random_state = 1;

inline uint32_t random_number() {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<uint32_t>(random_state >> 33);
}

inline void give_way() {
  current->context.switch_to(scheduler);
}

inline void require(bool condition, const char* message) {
  if (!condition) throw std::runtime_error(message);
}

template <typename Condition>
void wait_until(Condition condition) {
  while (!condition()) give_way();
}

// A barrier of `count` threads, any number of times.
struct Rendezvous {
  int arrived = 0;
  uint64_t generation = 0;

  void meet(int count) {
    ++progress;
    const uint64_t mine = generation;
    if (++arrived == count) {
      arrived = 0;
      ++generation;
      return;
    }
    wait_until([&] { return generation != mine; });
  }
};

inline Rendezvous named_barriers[16], warp_barriers[32];
inline uint32_t exchanged[32][32];  // [warp][lane]

// What all lanes of the warp give, by lane.
inline std::vector<uint32_t> exchange(uint32_t value) {
  const int warp = current->thread / 32, lane = current->thread % 32;
  exchanged[warp][lane] = value;
  warp_barriers[warp].meet(32);
  std::vector<uint32_t> values(exchanged[warp], exchanged[warp] + 32);
  warp_barriers[warp].meet(32);
  return values;
}

template <typename T>
uint32_t bits_of(T value) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
template <typename T>
T from_bits(uint32_t bits) {
  T value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// What lane `lane` of the warp gives; `value` has 4 or 8 bytes.
template <typename T>
T from_lane(T value, int lane) {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &value, sizeof(T));
  for (uint32_t& word : words) word = exchange(word)[lane];
  std::memcpy(&value, words, sizeof(T));
  return value;
}

inline std::function<void()> body;
inline std::string error;  // the first one, or empty

inline void run_fiber() {
  try {
    body();
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  current->is_done = true;
  ++progress;
  current->context.switch_to(scheduler);
}

// Lets one copy that is under way land.
inline void land() {
  const size_t i = random_number() % landings.size();
  try {
    landings[i]();
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  landings.erase(landings.begin() + i);
  ++progress;
}

// What __syncthreads_or has gathered at the last, this and the next barrier, by turns.
struct Votes {
  int true_ones[3] = {};
  uint64_t barrier = 0;
};
inline Votes votes;

// A thread block of the cluster while others run.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<std::function<void()>> landings;
  Rendezvous named_barriers[16], warp_barriers[32];
  uint32_t exchanged[32][32];
  Votes votes;
  std::unique_ptr<unsigned char[]> shared;
  bool is_done = false;  // all threads have ended
};

inline std::vector<Block> cluster;
inline unsigned rank;          // of the thread block that runs
inline long cluster_arrivals;  // of all threads

// Takes thread block `block` out of `cluster`, or puts it back. A single one stays where it is.
inline void exchange_block(Block& block) {
  if (cluster.size() == 1) return;
  std::swap(fibers, block.fibers);
  std::swap(landings, block.landings);
  std::swap(named_barriers, block.named_barriers);
  std::swap(warp_barriers, block.warp_barriers);
  std::swap(exchanged, block.exchanged);
  std::swap(votes, block.votes);
  unsigned char* const shared = kernelcat::dynamic_shared;
  std::swap_ranges(shared, shared + sizeof(kernelcat::dynamic_shared), block.shared.get());
}

// What `shared` is in thread block `cta` of the cluster.
template <typename T>
T* remote(T* shared, unsigned cta) {
  if (cta == rank) return shared;
  require(!cluster.at(cta).is_done, "a thread block ends before others have accessed its memory");
  const auto* address = reinterpret_cast<const unsigned char*>(shared);
  return reinterpret_cast<T*>(cluster[cta].shared.get() + (address - kernelcat::dynamic_shared));
}

inline void start_block(int num_threads) {
  std::memset(kernelcat::dynamic_shared, 0xff, sizeof(kernelcat::dynamic_shared));
  fibers = std::vector<Fiber>(num_threads);
  landings.clear();
  votes = {};
  for (Rendezvous& barrier : named_barriers) barrier = {};
  for (Rendezvous& barrier : warp_barriers) barrier = {};
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.thread = i;
    fiber.products.emplace_back();
    fiber.stack.reset(new char[kStackBytes]);
    fiber.context.prepare(fiber.stack.get(), kStackBytes, run_fiber);
  }
}

// Lets each fiber of the thread block go on until it waits; returns whether all have ended and no
// copy is under way.
inline bool run_round() {
  bool all_done = true;
  const int num_threads = static_cast<int>(fibers.size());
  const int first = random_number() % num_threads;
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers[(first + i) % num_threads];
    if (fiber.is_done) continue;
    all_done = false;
    current = &fiber;
    threadIdx = {static_cast<unsigned>(fiber.thread), 0, 0};
    scheduler.switch_to(fiber.context);
  }
  if (!error.empty() || (all_done && landings.empty())) return true;
  // Any number of copies lands, each number as often.
  while (!landings.empty() && (all_done || random_number() % (landings.size() + 1) != 0)) land();
  return false;
}

// The same for some rounds, or until the thread block cannot go on without others.
inline bool run_rounds(int num_rounds) {
  uint64_t before = progress - 1;
  bool is_done = false;
  for (int i = 0; i < num_rounds && !is_done && progress != before; ++i) {
    before = progress;
    is_done = run_round();
  }
  return is_done;
}

// Runs the thread blocks from `index` on, `size` along x, until they end or there is an error.
inline void run_cluster(uint3 index, unsigned size, int num_threads) {
  cluster = std::vector<Block>(size);
  cluster_arrivals = 0;
  for (Block& block : cluster) {
    if (size > 1) block.shared.reset(new unsigned char[sizeof(kernelcat::dynamic_shared)]);
    exchange_block(block);
    start_block(num_threads);
    exchange_block(block);
  }
  unsigned num_done = 0;
  int idle = 0;
  while (num_done < size) {
    const uint64_t before = progress;
    for (rank = 0; rank < size; ++rank) {
      Block& block = cluster[rank];
      if (block.is_done) continue;
      blockIdx = {index.x + rank, index.y, index.z};
      exchange_block(block);
      block.is_done = run_rounds(size == 1 ? 1 : 1 + random_number() % kRoundsAhead);
      exchange_block(block);
      if (!error.empty()) return;
      num_done += block.is_done;
    }
    idle = progress == before ? idle + 1 : 0;
    if (idle > kIdleRounds) {
      error = size == 1 ? "the thread block hangs" : "the cluster hangs";
      return;
    }
  }
}

template <typename... Args, size_t... kIndices>
void run_grid(void (*kernel)(Args...), void** params, unsigned cluster_size,
              std::index_sequence<kIndices...>) {
  body = [&] { kernel(*static_cast<std::remove_cv_t<Args>*>(params[kIndices])...); };
  for (unsigned z = 0; z < gridDim.z; ++z) {
    for (unsigned y = 0; y < gridDim.y; ++y) {
      for (unsigned x = 0; x < gridDim.x; x += cluster_size) {
        run_cluster({x, y, z}, cluster_size, blockDim.x);
        if (!error.empty()) return;
      }
    }
  }
}

// Runs a grid of clusters of `cluster_size` thread blocks; returns the error, or an empty text.
template <typename... Args>
const char* run_kernel(void (*kernel)(Args...), void** params, unsigned cluster_size) {
  error.clear();
  run_grid(kernel, params, cluster_size, std::index_sequence_for<Args...>());
  return error.c_str();
}

}  // namespace host

// ---- what CUDA C++ has, and C++ does not -------------------------------------------------------

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

inline void __syncthreads() {
  host::named_barriers[0].meet(blockDim.x);
}
inline int __syncthreads_or(bool predicate) {
  host::Votes& votes = host::votes;
  const uint64_t mine = votes.barrier;
  votes.true_ones[mine % 3] += predicate;
  __syncthreads();
  votes.barrier = mine + 1;
  votes.true_ones[(mine + 2) % 3] = 0;
  return votes.true_ones[mine % 3] != 0;
}
inline void __syncwarp(unsigned = 0xffffffff) {
  host::exchange(0);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return host::from_lane(value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return host::from_lane(value, host::current->thread % 32 ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = host::current->thread % 32;
  return host::from_lane(value, lane >= distance ? lane - distance : lane);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  unsigned ballot = 0;
  const auto values = host::exchange(predicate);
  for (int lane = 0; lane < 32; ++lane) ballot |= values[lane] << lane;
  return ballot;
}
inline int __ffs(int value) {
  return __builtin_ffs(value);
}
inline int __clz(unsigned value) {
  return value == 0 ? 32 : __builtin_clz(value);
}
inline int __any_sync(unsigned lanes, bool predicate) {
  return __ballot_sync(lanes, predicate) != 0;
}
inline unsigned __match_any_sync(unsigned, int value) {
  unsigned same = 0;
  const auto values = host::exchange(host::bits_of(value));
  for (int lane = 0; lane < 32; ++lane) {
    same |= unsigned{host::from_bits<int>(values[lane]) == value} << lane;
  }
  return same;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const auto values = host::exchange(value);
  return *std::max_element(values.begin(), values.end());
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  const auto values = host::exchange(value);
  return *std::min_element(values.begin(), values.end());
}
template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  const T old = *address;
  *address += value;
  return old;
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  const T old = *address;
  *address |= value;
  return old;
}
inline int __popcll(unsigned long long bits) {
  return __builtin_popcountll(bits);
}
inline int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcg(T* address, std::type_identity_t<T> value) {
  *address = value;
}
inline void __threadfence() {}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline float __fadd_rn(float x, float y) {
  return x + y;
}
inline float __fsqrt_rn(float x) {
  return std::sqrt(x);
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fdiv_rn(float x, float y) {
  return x / y;
}
inline int __float_as_int(float value) {
  return static_cast<int>(host::bits_of(value));
}
inline float __uint_as_float(unsigned bits) {
  return host::from_bits<float>(bits);
}
inline unsigned __float_as_uint(float value) {
  return host::bits_of(value);
}
#define __expf(x) std::exp(static_cast<float>(x))
