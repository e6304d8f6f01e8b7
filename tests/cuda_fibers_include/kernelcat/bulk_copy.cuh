// kernels/cuda/include/kernelcat/bulk_copy.cuh on the host: loads of spans, and of boxes of two
// dimensions.
#pragma once

#include <kernelcat/mbarrier.cuh>

namespace kernelcat {

// tests/cuda_fibers.py fills this in. Sizes are in elements, innermost first.
struct alignas(64) TensorMap {
  const uint8_t* base;
  int64_t shape[2], row_bytes, box[2], element_bytes, swizzle_bytes;
};

inline uint64_t evict_first_policy() {
  return 0;
}

inline void bulk_load(void* shared, const void* global, uint32_t num_bytes, Barrier& barrier,
                      uint64_t) {
  const auto begin = reinterpret_cast<uint64_t>(global);
  host::require(num_bytes % 16 == 0, "a bulk copy does not have whole units of 16 bytes");
  host::require(begin % 16 == 0, "the source of a bulk copy is not aligned");
  host::require(shared_address(shared) % 16 == 0, "the target of a bulk copy is not aligned");
  host::block->landings.push_back([=, &barrier] {
    std::memcpy(shared, global, num_bytes);
    barrier.complete_bytes(num_bytes);
  });
}

inline void prefetch_map(const TensorMap&) {}

template <int kSpan>
__host__ __device__ constexpr uint32_t swizzled(uint32_t offset) {
  return offset ^ ((offset >> 3) & ((kSpan / 16 - 1) << 4));
}

inline void load_box(uint8_t* shared, const TensorMap& map, int x, int y) {
  const int64_t span = map.box[0] * map.element_bytes;
  const bool is_swizzled = map.swizzle_bytes == 128;
  host::require(span == 128 || !is_swizzled && span % 16 == 0, "no box has such rows");
  host::require(shared_address(shared) % (is_swizzled ? 1024 : 128) == 0, "a box is not aligned");
  for (int64_t row = 0; row < map.box[1]; ++row) {
    for (int64_t col = 0; col < map.box[0]; ++col) {
      const uint32_t offset = row * span + col * map.element_bytes;
      uint8_t* target = shared + (is_swizzled ? swizzled<128>(offset) : offset);
      const int64_t global_row = y + row, global_col = x + col;
      const bool is_inside = global_row >= 0 && global_row < map.shape[1] && global_col >= 0 &&
                             global_col < map.shape[0];
      if (is_inside) {
        std::memcpy(target, map.base + global_row * map.row_bytes + global_col * map.element_bytes,
                    map.element_bytes);
      } else {
        std::memset(target, 0, map.element_bytes);
      }
    }
  }
}

// What happens when a box lands.
inline std::function<void()> box_landing(void* shared, const TensorMap& map, int x, int y,
                                         Barrier& barrier) {
  return [=, &map, &barrier] {
    load_box(static_cast<uint8_t*>(shared), map, x, y);
    barrier.complete_bytes(map.box[0] * map.box[1] * map.element_bytes);
  };
}

inline void tensor_load(void* shared, const TensorMap& map, int x, int y, Barrier& barrier,
                        uint64_t) {
  host::block->landings.push_back(box_landing(shared, map, x, y, barrier));
}

// Stores what lies inside of the map; the engine reads shared memory at once.
inline void tensor_store(const TensorMap& map, const void* shared, int x, int y, uint64_t) {
  const int64_t span = map.box[0] * map.element_bytes;
  host::require(span == map.swizzle_bytes && (span == 128 || span == 64 || span == 32),
                "no box of a store has such rows");
  for (int64_t row = 0; row < std::min(map.box[1], map.shape[1] - y); ++row) {
    for (int64_t col = 0; col < std::min(map.box[0], map.shape[0] - x); ++col) {
      const uint32_t offset = row * span + col * map.element_bytes;
      const uint32_t place = span == 128  ? swizzled<128>(offset)
                             : span == 64 ? swizzled<64>(offset)
                                          : swizzled<32>(offset);
      auto* target = const_cast<uint8_t*>(map.base) + (y + row) * map.row_bytes;
      std::memcpy(target + (x + col) * map.element_bytes,
                  static_cast<const uint8_t*>(shared) + place, map.element_bytes);
    }
  }
}

inline void commit_stores() {}
template <int kPending>
void wait_stores_read() {}

}  // namespace kernelcat
