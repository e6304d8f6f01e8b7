// CUDA on a CPU: each thread of a thread block is a thread of the host, and a warp exchanges values
// through slots between two barriers. Thread blocks run one after another. It takes the place of
// cuda_bf16.h and cuda_fp16.h, and has what the kernels of test_cuda_host.py need.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct Dim3 {
  unsigned x, y, z;
};

// ---- threads -----------------------------------------------------------------------------------

struct Warp {
  std::barrier<> barrier{32};
  alignas(16) char slots[32][64];
};

inline thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;
inline thread_local Warp* warp;
inline std::barrier<>* block_barrier;
alignas(1024) inline char shared_memory[1 << 18];  // dynamic shared memory

template <typename Kernel>
void launch(Dim3 grid, unsigned threads, Kernel kernel) {
  for (unsigned block = 0; block < grid.x * grid.y; ++block) {
    std::memset(shared_memory, 0xFF, sizeof(shared_memory));
    std::vector<Warp> warps(threads / 32);
    std::barrier<> barrier(threads);
    block_barrier = &barrier;
    std::vector<std::thread> running;
    for (unsigned i = 0; i < threads; ++i) {
      running.emplace_back([&, i] {
        threadIdx = {i, 0, 0}, blockIdx = {block % grid.x, block / grid.x, 0};
        blockDim = {threads, 1, 1}, gridDim = grid, warp = &warps[i / 32];
        kernel();
      });
    }
    for (std::thread& thread : running) thread.join();
  }
}

inline void __syncthreads() {
  block_barrier->arrive_and_wait();
}

// Calls read(slots) when every lane has put its value into its slot.
template <typename Value, typename Read>
void exchange(const Value& value, Read read) {
  static_assert(sizeof(Value) <= sizeof(warp->slots[0]));
  std::memcpy(warp->slots[threadIdx.x % 32], &value, sizeof(value));
  warp->barrier.arrive_and_wait();
  read([](int lane) { return reinterpret_cast<const Value*>(warp->slots[lane]); });
  warp->barrier.arrive_and_wait();
}

template <typename Value>
Value __shfl_sync(uint32_t, Value value, int lane) {
  exchange(value, [&](auto slot) { value = *slot(lane); });
  return value;
}
template <typename Value>
Value __shfl_xor_sync(uint32_t, Value value, int mask) {
  return __shfl_sync(0, value, threadIdx.x % 32 ^ mask);
}
template <typename Value>
Value __shfl_up_sync(uint32_t, Value value, int delta) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(0, value, lane >= delta ? lane - delta : lane);
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  uint32_t votes = 0;
  exchange(vote, [&](auto slot) {
    for (int lane = 0; lane < 32; ++lane) votes |= uint32_t{*slot(lane)} << lane;
  });
  return votes;
}

// ---- memory and arithmetic ---------------------------------------------------------------------

inline void __threadfence() {}
inline uint32_t atomicAdd(uint32_t* address, uint32_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
template <typename Value>
Value __ldg(const Value* address) {
  return *address;
}
template <typename Value>
Value __ldcg(const Value* address) {
  return *address;
}
template <typename Value>
Value __ldcs(const Value* address) {
  return *address;
}
template <typename Value>
Value min(Value a, Value b) {
  return a < b ? a : b;
}
inline int __ffs(uint32_t value) {
  return __builtin_ffs(value);
}
inline uint64_t __cvta_generic_to_shared(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __log2f(float x) {
  return std::log2(x);
}

// ---- 16-bit types ------------------------------------------------------------------------------

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 low, high;
};
struct __half {
  _Float16 value;
};
struct __half2 {
  __half low, high;
};
inline float __bfloat162float(__nv_bfloat16 value) {
  return __builtin_bit_cast(float, uint32_t{value.bits} << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline float __half2float(__half value) {
  return static_cast<float>(value.value);
}
inline __half __float2half_rn(float value) {
  return {static_cast<_Float16>(value)};
}
inline __half2 __floats2half2_rn(float low, float high) {
  return {__float2half_rn(low), __float2half_rn(high)};
}
