// CUDA on the host: the threads of the thread blocks of one cluster are fibers, which run one after
// the other.
//
// A fiber that has to wait gives way to the others, in a random order that the seed determines.
// Copies by TMA land at random times, and products of wgmma are computed when they are waited for,
// i.e. as late as possible. If no fiber can go on, the thread block hangs, and run() reports that.
// The shared memory of the thread block that runs is `dynamic_shared`; those of the others rest.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <ucontext.h>
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
constexpr int kIdleRounds = 2000;  // without progress, until the thread block is said to hang

constexpr int kMaxRounds = 100;  // by which a thread block of a cluster runs ahead of the others

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int thread;
  bool is_done = false;
  std::vector<std::function<void()>> copies;  // cp.async that have not landed: the open group
  std::vector<std::vector<std::function<void()>>> copy_groups;  // and the groups before
  std::vector<std::vector<std::function<void()>>> products;  // committed groups, then the open one
  int num_operands = 0;             // operands in registers that were given to wgmma
  int num_arrivals = 0;             // at barriers of other thread blocks, under way
  uint64_t cluster_generation = 0;  // of the cluster's barrier, when the fiber arrived at it
};

inline ucontext_t scheduler;
inline Fiber* current = nullptr;
inline uint64_t progress = 0, random_state = 1;

inline uint32_t random_number() {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<uint32_t>(random_state >> 33);
}

inline void give_way() {
  swapcontext(&current->context, &scheduler);
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

struct ThreadBlock {
  std::vector<Fiber> fibers;
  std::vector<std::function<void()>> landings;  // TMA copies, and arrivals of others, under way
  Rendezvous named_barriers[16], warp_barriers[32];
  uint32_t exchanged[32][32];         // [warp][lane]
  std::vector<unsigned char> shared;  // while another thread block runs
  bool has_begun = false, is_done = false;
};

inline std::vector<ThreadBlock> cluster;
inline ThreadBlock* block = nullptr;  // the one that runs
inline Rendezvous cluster_barrier;    // of all threads of the cluster, in two steps

inline uint32_t rank() {
  return block - cluster.data();
}

inline void arrive_at_cluster() {
  ++progress;
  current->cluster_generation = cluster_barrier.generation;
  if (++cluster_barrier.arrived == cluster.size() * blockDim.x) {
    cluster_barrier.arrived = 0;
    ++cluster_barrier.generation;
  }
}
inline void wait_for_cluster() {
  wait_until([] { return cluster_barrier.generation != current->cluster_generation; });
}

// Does `action` in thread block `cta` of the cluster, at a random time from now on.
inline void land_in(uint32_t cta, std::function<void()> action) {
  cluster.at(cta).landings.push_back([action = std::move(action)] {
    require(!block->is_done, "a thread block has ended before others stopped to access it");
    action();
  });
}

// What all lanes of the warp give, by lane.
inline std::vector<uint32_t> exchange(uint32_t value) {
  const int warp = current->thread / 32, lane = current->thread % 32;
  auto& exchanged = block->exchanged[warp];
  exchanged[lane] = value;
  block->warp_barriers[warp].meet(32);
  std::vector<uint32_t> values(exchanged, exchanged + 32);
  block->warp_barriers[warp].meet(32);
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
  swapcontext(&current->context, &scheduler);
}

// Lets one copy that is under way land.
inline void land() {
  auto& landings = block->landings;
  const size_t i = random_number() % landings.size();
  try {
    landings[i]();
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  landings.erase(landings.begin() + i);
  ++progress;
}

// Makes `next` the thread block that runs.
inline void enter(ThreadBlock& next) {
  if (block == &next) return;
  auto& memory = kernelcat::dynamic_shared;
  if (block != nullptr) block->shared.assign(memory, memory + sizeof(memory));
  std::copy(next.shared.begin(), next.shared.end(), memory);
  blockIdx.x += &next - cluster.data() - (block == nullptr ? 0 : rank());
  block = &next;
}

inline void start(ThreadBlock& started, int num_threads) {
  started.shared.assign(sizeof(kernelcat::dynamic_shared), 0xff);
  started.fibers = std::vector<Fiber>(num_threads);
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = started.fibers[i];
    fiber.thread = i;
    fiber.products.emplace_back();
    fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
}

// Lets some copies land, all those that others sent before the thread block began, then runs each
// of its threads until it waits.
inline void run_threads() {
  const bool lands_all = block->is_done || !block->has_begun;
  while (error.empty() && !block->landings.empty() && (lands_all || random_number() % 2 == 0)) {
    land();
  }
  block->has_begun = true;
  const int num_threads = block->fibers.size(), first = random_number() % num_threads;
  block->is_done = true;
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = block->fibers[(first + i) % num_threads];
    if (fiber.is_done) continue;
    block->is_done = false;
    current = &fiber;
    threadIdx = {static_cast<unsigned>(fiber.thread), 0, 0};
    swapcontext(&scheduler, &fiber.context);
  }
}

// Runs the thread block for so many rounds, or until it cannot go on without others.
inline void run_ahead(int num_rounds) {
  uint64_t before = progress - 1;
  for (int i = 0; i < num_rounds && error.empty() && progress != before; ++i) {
    before = progress;
    run_threads();
  }
}

// Runs the cluster whose first thread block is blockIdx, until it ends or there is an error.
inline void run_cluster(int num_threads, unsigned size) {
  cluster = std::vector<ThreadBlock>(size);
  cluster_barrier = {};
  block = nullptr;
  for (ThreadBlock& started : cluster) start(started, num_threads);
  int idle = 0;
  while (error.empty()) {
    const uint64_t before = progress;
    bool all_done = true;
    for (ThreadBlock& next : cluster) {
      enter(next);
      run_ahead(size == 1 ? 1 : 1 + random_number() % kMaxRounds);
      if (!error.empty()) return;
      all_done = all_done && next.is_done && next.landings.empty();
    }
    if (all_done) return;
    idle = progress == before ? idle + 1 : 0;
    if (idle > kIdleRounds) error = "the thread block hangs";
  }
}

template <typename... Args, size_t... kIndices>
void run_grid(void (*kernel)(Args...), void** params, unsigned cluster_size,
              std::index_sequence<kIndices...>) {
  for (unsigned z = 0; z < gridDim.z; ++z) {
    for (unsigned y = 0; y < gridDim.y; ++y) {
      for (unsigned x = 0; x < gridDim.x; x += cluster_size) {
        blockIdx = {x, y, z};
        body = [&] { kernel(*static_cast<std::remove_cv_t<Args>*>(params[kIndices])...); };
        run_cluster(blockDim.x, cluster_size);
        if (!error.empty()) return;
      }
    }
  }
}

// Runs a grid of clusters along x; returns the error, or an empty text.
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
  host::block->named_barriers[0].meet(blockDim.x);
}
inline int __syncthreads_or(bool predicate) {
  static int true_ones[3];  // of the last, this and the next barrier, by turns
  static uint64_t barrier;
  const uint64_t mine = barrier;
  true_ones[mine % 3] += predicate;
  __syncthreads();
  barrier = mine + 1;
  true_ones[(mine + 2) % 3] = 0;
  return true_ones[mine % 3] != 0;
}
inline void __syncwarp(unsigned = 0xffffffff) {
  host::exchange(0);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return host::from_bits<T>(host::exchange(host::bits_of(value))[lane]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return host::from_bits<T>(
      host::exchange(host::bits_of(value))[host::current->thread % 32 ^ mask]);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = host::current->thread % 32;
  return host::from_bits<T>(
      host::exchange(host::bits_of(value))[lane >= distance ? lane - distance : lane]);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  unsigned ballot = 0;
  const auto values = host::exchange(predicate);
  for (int lane = 0; lane < 32; ++lane) ballot |= values[lane] << lane;
  return ballot;
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
