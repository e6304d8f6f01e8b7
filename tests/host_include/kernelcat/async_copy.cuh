// Asynchronous copies on the host: a thread's copies are made when it waits for them, no earlier.
#pragma once

#include <deque>
#include <kernelcat/mbarrier.cuh>

namespace kernelcat {

struct AsyncCopy {
  uint32_t shared_address;
  const void* global;
  bool valid;
};
struct AsyncCopies {
  std::vector<AsyncCopy> open;
  std::deque<std::vector<AsyncCopy>> groups;
};
inline AsyncCopies& async_copies() {  // of this thread
  static thread_local std::vector<AsyncCopies> of_threads(host::kMaxThreads);
  return of_threads[host::block->current];
}

inline void async_copy_16(uint32_t shared_address, const void* global, bool valid) {
  if ((reinterpret_cast<uint64_t>(shared_pointer(shared_address)) |
       reinterpret_cast<uint64_t>(global)) %
          16 !=
      0) {
    std::fprintf(stderr, "an asynchronous copy is not aligned to 16 bytes\n");
    std::abort();
  }
  async_copies().open.push_back({shared_address, global, valid});
}
inline void commit_async_copies() {
  AsyncCopies& copies = async_copies();
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}
template <int kPending>
void wait_async_copies() {
  for (auto& groups = async_copies().groups; groups.size() > kPending; groups.pop_front()) {
    for (const AsyncCopy& copy : groups.front()) {
      char* target = shared_pointer(copy.shared_address);
      if (copy.valid) {
        std::memcpy(target, copy.global, 16);
      } else {
        std::memset(target, 0, 16);
      }
    }
  }
}

}  // namespace kernelcat
