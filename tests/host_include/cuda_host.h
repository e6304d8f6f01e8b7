// CUDA's threads on the host. Each thread of a thread block is a fiber, and the fibers of a thread
// block share one thread of the operating system, which runs them in turn. Threads exchange values
// in groups (a warp, a thread block); each thread block of a cluster has its own OS thread.
//
// Shared memory is thread_local, so each thread block has its own. Races stay invisible: a fiber
// runs until it waits for others.
#pragma once

#include <fibers.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};

namespace host {

constexpr int kWarp = 32, kMaxThreads = 1024, kStackBytes = 48 << 10, kMaxTurns = 10'000'000;
constexpr int kMaxDynamicBytes = 227 << 10;

// Threads that exchange values. A fast thread may already be in the next exchange while others read
// the values of this one, but not in the one after: hence two buffers.
struct Group {
  int num_threads = 0, num_arrived = 0;
  unsigned exchange = 0;
  uint64_t values[2][kMaxThreads];
};

struct Fiber {
  Context context;
  bool is_done = false;
  long cluster_arrivals = 0;
  std::vector<char> stack = std::vector<char>(kStackBytes);
};

// What the thread blocks of a cluster share. `anchors` has an address in the shared memory of each.
struct Cluster {
  explicit Cluster(int size) : anchors(size) {}
  std::atomic<long> num_arrivals{0};
  std::vector<std::atomic<char*>> anchors;
};

struct Block {
  unsigned index_x, index_y, index_z, grid_x, num_threads;
  int rank;
  Cluster* cluster;
  std::function<void()> kernel;
  std::vector<Fiber> fibers{num_threads};
  std::vector<Group> warps{num_threads / kWarp};
  Group all;
  Context scheduler;
  unsigned current = 0, num_waiting_for_cluster = 0;
};

static thread_local Block* block;
static thread_local char anchor;  // lies in the same thread_local memory as shared variables
alignas(1024) static thread_local char dynamic_shared[kMaxDynamicBytes];

inline void yield() {
  block->fibers[block->current].context.switch_to(block->scheduler);
}

inline void run_fiber() {
  block->kernel();
  block->fibers[block->current].is_done = true;
  yield();
}

// Runs all fibers in turn until all are done.
inline void run(Block& b) {
  block = &b;
  b.cluster->anchors[b.rank] = &anchor;
  b.all.num_threads = b.num_threads;
  for (Group& warp : b.warps) warp.num_threads = kWarp;
  for (Fiber& fiber : b.fibers) {
    fiber.context.prepare(fiber.stack.data(), fiber.stack.size(), run_fiber);
  }
  unsigned num_left = b.num_threads;
  for (int turn = 0; num_left > 0; ++turn) {
    num_left = b.num_waiting_for_cluster = 0;
    for (b.current = 0; b.current < b.num_threads; ++b.current) {
      Fiber& fiber = b.fibers[b.current];
      if (!fiber.is_done) b.scheduler.switch_to(fiber.context);
      num_left += !fiber.is_done;
    }
    if (num_left > 0 && b.num_waiting_for_cluster == num_left) usleep(50);
    if (turn == kMaxTurns) {
      std::fprintf(stderr, "deadlock: %u threads wait\n", num_left);
      std::abort();
    }
  }
}

template <typename... Args, size_t... I>
void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_const_t<Args>*>(args[I])...);
}

// Launches a kernel on a grid; `args` are the addresses of its arguments.
template <typename... Args>
void launch(void (*kernel)(Args...), void** args, unsigned grid_x, unsigned grid_y, unsigned grid_z,
            unsigned num_threads, int dynamic_bytes, int cluster_size) {
  const auto run_block = [&](unsigned x, unsigned y, unsigned z, int rank, Cluster* cluster) {
    Block b{x + rank, y, z, grid_x, num_threads, rank, cluster};
    b.kernel = [&] { call(kernel, args, std::index_sequence_for<Args...>{}); };
    std::memset(dynamic_shared, '\xff', dynamic_bytes);
    run(b);
  };
  for (unsigned z = 0; z < grid_z; ++z) {
    for (unsigned y = 0; y < grid_y; ++y) {
      for (unsigned x = 0; x < grid_x; x += cluster_size) {
        Cluster cluster(cluster_size);
        std::vector<std::thread> threads;
        for (int rank = 0; rank < cluster_size; ++rank) {
          threads.emplace_back(run_block, x, y, z, rank, &cluster);
        }
        for (std::thread& thread : threads) thread.join();
      }
    }
  }
}

// The values of all threads of the group; `index` is that of this thread.
inline const uint64_t* exchange(Group& group, int index, uint64_t value) {
  const unsigned number = group.exchange;
  group.values[number % 2][index] = value;
  if (++group.num_arrived == group.num_threads) {
    group.num_arrived = 0;
    ++group.exchange;
  }
  while (group.exchange == number) yield();
  return group.values[number % 2];
}

inline int lane() {
  return block->current % kWarp;
}
inline const uint64_t* exchange_in_warp(uint64_t value) {
  return exchange(block->warps[block->current / kWarp], lane(), value);
}
inline const uint64_t* exchange_in_block(uint64_t value) {
  return exchange(block->all, block->current, value);
}

template <typename T>
uint64_t pack(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T, typename Bits>
T bit_cast(Bits bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T, typename Function>
T reduce(T value, Function function) {
  const uint64_t* values = exchange_in_warp(pack(value));
  T result = bit_cast<T>(values[0]);
  for (int i = 1; i < kWarp; ++i) result = function(result, bit_cast<T>(values[i]));
  return result;
}

struct ThreadIdx {
  struct {
    operator unsigned() const { return block->current; }
  } x;
};
struct BlockIdx {
  struct {
    operator unsigned() const { return block->index_x; }
  } x;
  struct {
    operator unsigned() const { return block->index_y; }
  } y;
  struct {
    operator unsigned() const { return block->index_z; }
  } z;
};
struct BlockDim {
  struct {
    operator unsigned() const { return block->num_threads; }
  } x;
};
struct GridDim {
  struct {
    operator unsigned() const { return block->grid_x; }
  } x;
};

}  // namespace host

static host::ThreadIdx threadIdx;
static host::BlockIdx blockIdx;
static host::BlockDim blockDim;
static host::GridDim gridDim;

inline void __syncthreads() {
  host::exchange_in_block(0);
}
inline int __syncthreads_or(int predicate) {
  const uint64_t* values = host::exchange_in_block(predicate != 0);
  return std::any_of(values, values + host::block->num_threads, [](uint64_t v) { return v; });
}
inline void __syncwarp() {
  host::exchange_in_warp(0);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return host::bit_cast<T>(host::exchange_in_warp(host::pack(value))[lane % host::kWarp]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return host::bit_cast<T>(host::exchange_in_warp(host::pack(value))[host::lane() ^ mask]);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int source = host::lane() < distance ? host::lane() : host::lane() - distance;
  return host::bit_cast<T>(host::exchange_in_warp(host::pack(value))[source]);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const uint64_t* values = host::exchange_in_warp(predicate != 0);
  unsigned bits = 0;
  for (int i = 0; i < host::kWarp; ++i) bits |= static_cast<unsigned>(values[i]) << i;
  return bits;
}
inline int __any_sync(unsigned lanes, int predicate) {
  return __ballot_sync(lanes, predicate) != 0;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return host::reduce(value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return host::reduce(value, [](unsigned a, unsigned b) { return std::min(a, b); });
}

// Another thread block of a cluster is another OS thread, so atomics are real.
template <typename T, typename U>
T atomicAdd(T* address, U value) {
  return __atomic_fetch_add(address, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
template <typename T, typename U>
T atomicOr(T* address, U value) {
  return __atomic_fetch_or(address, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
inline void __threadfence() {}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcg(T* address, T value) {
  *address = value;
}

inline int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}
inline int __ffs(int bits) {
  return __builtin_ffs(bits);
}
inline int __float_as_int(float value) {
  return host::bit_cast<int>(value);
}
inline unsigned __float_as_uint(float value) {
  return host::bit_cast<unsigned>(value);
}
inline float __uint_as_float(unsigned bits) {
  return host::bit_cast<float>(bits);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float value) {
  return 1 / value;
}
inline float __fsqrt_rn(float value) {
  return std::sqrt(value);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned shift = 8 * (selector >> 4 * i & 7);
    result |= static_cast<unsigned>(bytes >> shift & 0xff) << 8 * i;
  }
  return result;
}
inline float __fdividef(float a, float b) {
  return a / b;
}
template <typename A, typename B>
auto min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}
template <typename A, typename B>
auto max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}
