// Pages go through registers: the threads of a thread block load a tile, and store it to the peer.
#include "transfers.cuh"

namespace kernelcat {

using uint128_t = uint4;

// Vectors are as wide as the bytes of a page allow: uint128_t, or less for odd sizes.
template <typename Vector, int kRanks, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads)
    kv_transfer_vectors(const int* source_pages,  // (num_entries,)
                        const int* dest_ranks,    // (num_entries,), -1 for none
                        const int* dest_pages,    // (num_entries,)
                        int num_entries, int num_caches, int page_vectors, int page_tiles, int rank,
                        Vector* keys0, Vector* keys1, Vector* keys2, Vector* keys3, Vector* keys4,
                        Vector* keys5, Vector* keys6, Vector* keys7, Vector* values0,
                        Vector* values1, Vector* values2, Vector* values3, Vector* values4,
                        Vector* values5, Vector* values6, Vector* values7) {
  const TransferTiles<kRanks, Vector> tiles{
      {source_pages, dest_ranks, dest_pages, num_entries, num_caches, page_vectors, rank},
      {{keys0, keys1, keys2, keys3, keys4, keys5, keys6, keys7}},
      {{values0, values1, values2, values3, values4, values5, values6, values7}},
      kThreads * kUnroll,
      page_tiles};
  for (int i = blockIdx.x; i < tiles.size(); i += gridDim.x) {
    const TransferTile<Vector> tile = tiles[i];
    Vector vectors[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int at = j * kThreads + threadIdx.x;
      if (at < tile.count) vectors[j] = tile.source[at];
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int at = j * kThreads + threadIdx.x;
      if (at < tile.count) tile.dest[at] = vectors[j];
    }
  }
}

}  // namespace kernelcat
