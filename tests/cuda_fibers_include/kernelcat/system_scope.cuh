// kernels/cuda/include/kernelcat/system_scope.cuh on the host, where other ranks are processes that
// share the windows. A thread that waits for another process gives way, to its own thread block
// and to the other processes.
#pragma once

#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include <kernelcat/types.cuh>

namespace kernelcat {

inline void store_release_system(uint64_t* address, uint64_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

// Loads between two times that this process gives way. Each can cost it a time slice of several
// milliseconds on a busy machine, and most loads find what they wait for.
constexpr unsigned kLoadsOfTurn = 256;

inline uint64_t load_acquire_system(const uint64_t* address) {
  static unsigned num_loads = 0;
  ++host::progress;  // of another process, perhaps
  host::give_way();
  if (++num_loads % kLoadsOfTurn == 0) sched_yield();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

struct alignas(16) FlaggedWord {
  uint32_t low, low_flag, high, high_flag;
};

inline void store_flagged(FlaggedWord* address, uint2 data, uint32_t flag) {
  const uint64_t flag_bits = static_cast<uint64_t>(flag) << 32;
  store_release_system(reinterpret_cast<uint64_t*>(address), flag_bits | data.x);
  store_release_system(reinterpret_cast<uint64_t*>(address) + 1, flag_bits | data.y);
}

inline void store_flagged_half(FlaggedWord* address, int half, uint32_t data, uint32_t flag) {
  store_release_system(reinterpret_cast<uint64_t*>(address) + half,
                       static_cast<uint64_t>(flag) << 32 | data);
}

inline FlaggedWord load_flagged(const FlaggedWord* address) {
  const uint64_t low = load_acquire_system(reinterpret_cast<const uint64_t*>(address));
  const uint64_t high = load_acquire_system(reinterpret_cast<const uint64_t*>(address) + 1);
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
          static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)};
}

inline void store_words(uint4* address, const uint4& words) {
  const uint32_t parts[4] = {words.x, words.y, words.z, words.w};
  for (int i = 0; i < 4; ++i) {
    __atomic_store_n(reinterpret_cast<uint32_t*>(address) + i, parts[i], __ATOMIC_RELAXED);
  }
}

inline uint4 load_words(const uint4* address) {
  const uint64_t low = load_acquire_system(reinterpret_cast<const uint64_t*>(address));
  const uint64_t high = load_acquire_system(reinterpret_cast<const uint64_t*>(address) + 1);
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
          static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)};
}

// Time in which this rank's process ran, over $HOST_SLOWDOWN: on a busy machine other ranks may be
// late.
inline uint64_t global_nanoseconds() {
  static const char* const slowdown = getenv("HOST_SLOWDOWN");
  static const uint64_t divisor = slowdown == nullptr ? 1 : strtoull(slowdown, nullptr, 10);
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (now.tv_sec * 1000000000ull + now.tv_nsec) / divisor;
}

}  // namespace kernelcat
