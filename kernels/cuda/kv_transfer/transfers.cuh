// What a rank's list says, cut into tiles: which part of a page goes where.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

constexpr int kMaxRanks = 8;

// The same cache on all ranks: of[shift] is that of the rank `shift` after this one, around.
template <typename Vector>
struct MappedCaches {
  Vector* of[kMaxRanks];

  // Selected, not indexed: an index that is not a constant would put the addresses into memory.
  template <int kRanks>
  __device__ __forceinline__ Vector* at(int shift) const {
    Vector* found = of[0];
#pragma unroll
    for (int i = 1; i < kRanks; ++i) {
      if (shift == i) found = of[i];
    }
    return found;
  }
};

// Entries of the list, each of them `num_caches` pages of `page_vectors` vectors.
struct TransferList {
  const int *source_pages, *dest_ranks, *dest_pages;  // (num_entries,) each
  int num_entries, num_caches, page_vectors, rank;
};

// A tile of a page: `count` vectors from `source` to `dest`, 0 of an entry of no rank.
template <typename Vector>
struct TransferTile {
  const Vector* source;
  Vector* dest;
  int count;
};

// Tiles of `tile_vectors`, the last one of a page perhaps shorter: those of an entry's pages after
// each other, of the keys before the values.
template <int kRanks, typename Vector>
struct TransferTiles {
  TransferList list;
  MappedCaches<Vector> keys, values;
  int tile_vectors, page_tiles;

  __device__ __forceinline__ int size() const {
    return list.num_entries * list.num_caches * page_tiles;
  }

  __device__ __forceinline__ TransferTile<Vector> operator[](int tile) const {
    const int page = tile / page_tiles, first = (tile - page * page_tiles) * tile_vectors;
    const int entry = list.num_caches == 2 ? page / 2 : page;
    const bool is_key = entry * list.num_caches == page;
    const int64_t source_page = list.source_pages[entry], dest_page = list.dest_pages[entry];
    const int dest_rank = list.dest_ranks[entry];
    const int ahead = dest_rank - list.rank, shift = ahead < 0 ? ahead + kRanks : ahead;
    const Vector* own = is_key ? keys.of[0] : values.of[0];
    Vector* other = is_key ? keys.template at<kRanks>(shift) : values.template at<kRanks>(shift);
    return {own + source_page * list.page_vectors + first,
            other + dest_page * list.page_vectors + first,
            dest_rank < 0 ? 0 : min(tile_vectors, list.page_vectors - first)};
  }
};

}  // namespace kernelcat
