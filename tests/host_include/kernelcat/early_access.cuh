// What happens before grid_dependency_wait() on the host: prefetches are written down, and a test
// may say what hints read in place of what memory holds.
#pragma once

#include <kernelcat/types.cuh>
#include <mutex>

namespace kernelcat {

struct Span {
  uint64_t address, num_bytes;
};
static std::mutex spans_mutex;
static std::vector<Span> spans;
struct Hints {
  const int* memory;
  int64_t count;
  const int* values;
};
static std::vector<Hints> all_hints;

inline int load_hint(const int* address) {
  for (const Hints& hints : all_hints) {
    const int64_t i = address - hints.memory;
    if (i >= 0 && i < hints.count) return hints.values[i];
  }
  return *address;
}
inline void prefetch_span_l2(const void* address, uint32_t num_bytes) {
  const std::lock_guard<std::mutex> lock(spans_mutex);
  spans.push_back({reinterpret_cast<uint64_t>(address), num_bytes});
}

}  // namespace kernelcat

// From now on hints read `values` in place of `memory`, both (count,).
extern "C" void set_hints(const int* memory, long count, const int* values) {
  kernelcat::all_hints.push_back({memory, count, values});
}

// Copies up to `max_spans` of what was prefetched, and forgets all of it, and all hints. Returns
// how many spans there were.
extern "C" long take_prefetched(kernelcat::Span* target, long max_spans) {
  const long count = kernelcat::spans.size();
  std::copy_n(kernelcat::spans.begin(), std::min(count, max_spans), target);
  kernelcat::spans.clear(), kernelcat::all_hints.clear();
  return count;
}
