// Decode over a paged cache on Hopper: every warp streams pages of its own by TMA.
//
// The queries of a sequence and the heads that share a key-value head are the 8 or 16 columns of
// the products, the tokens their rows: scores are keys @ queries^T, sums values^T @ weights^T, so
// that mma.sync wastes nothing on 8 rows. A warp has its own ring of stages: a lane that owns a box
// of one looks its page up a whole round ahead and loads it, so that warps meet only once, at the
// end. Where a head's row is less than 128 bytes a block may take two neighbouring heads, whose
// rows are one piece of memory. Blocks of a cluster share the tokens of a sequence and send each
// other what they found (flash-decoding), through distributed shared memory.
#include <kernelcat/cluster.cuh>
#include <kernelcat/fragments.cuh>
#include <kernelcat/pdl.cuh>

#include "merge.cuh"
#include "stream_tile.cuh"
#include "tensor_box.cuh"

namespace kernelcat {

// 16 bytes into block `cta` of the cluster, where `shared` lies here, and counted by its barrier.
__device__ __forceinline__ void store_async(void* shared, float4 value, Barrier& barrier,
                                            uint32_t cta) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
      " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_address(shared_address(shared), cta)),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w),
      "r"(remote_address(shared_address(&barrier), cta))
      : "memory");
}

// What several have found of the same four columns of a row.
template <int kParts>
struct Parts {
  PartialSum parts[kParts];

  __device__ __forceinline__ PartialSum sum() const {
    PartialSum sum;
#pragma unroll
    for (const PartialSum& part : parts) sum.most = fmaxf(sum.most, part.most);
#pragma unroll
    for (const PartialSum& part : parts) {
      const float weight = rescale_factor(part.most, sum.most);
      sum.values.x += weight * part.values.x;
      sum.values.y += weight * part.values.y;
      sum.values.z += weight * part.values.z;
      sum.values.w += weight * part.values.w;
      sum.total += weight * part.total;
    }
    return sum;
  }
};

template <typename Kind, int kHeads, int kRowTiles, int kTokens, int kNumWarps, int kNumStages,
          int kClusterSize>
struct StreamAttention {
  using T = typename Kind::T;
  using Tile = StreamTile<Kind, kHeads, kRowTiles, kTokens>;
  static constexpr int kHeadDim = Kind::kHeadDim, kThreads = kNumWarps * kWarpThreads;
  static constexpr int kBoxTokens = Tile::kBoxTokens, kBoxes = Tile::kBoxes;
  static constexpr int kStageBytes = 2 * Tile::kTileBytes;
  static constexpr int kRingBytes = kNumStages * kStageBytes;
  static constexpr int kMaxRows = 8 * Tile::kGroups;
  static constexpr int kVectors = kHeadDim / 4;  // of a row
  static constexpr int kPitch = kHeadDim + 4;    // so that rows lie in different banks
  static constexpr int kChunk = 4;               // vectors side by side that a block stores
  static constexpr int kSlots = ceil_div(kMaxRows * kVectors, kChunk* kClusterSize) * kChunk;
  static_assert(kNumStages * kBoxes <= kWarpThreads, "a lane owns a box");
  static_assert(kMaxRows * kPitch * 4 <= kRingBytes, "a warp's sums take its stages' place");

  // Of all heads, one after the other.
  struct Rows {
    TileRows<Kind> first;
    int per_head;

    __device__ __forceinline__ int num_vectors() const { return kHeads * per_head * kVectors; }
    __device__ __forceinline__ int head(int row) const { return kHeads > 1 ? row / per_head : 0; }
    // Where among a warp's sums a row is.
    __device__ __forceinline__ int place(int row) const {
      return row + head(row) * (8 * kRowTiles - per_head);
    }
    __device__ __forceinline__ void store(const Attention<Kind>& call, int i,
                                          const PartialSum& sum) const {
      const int row = i / kVectors, of = head(row);
      first.of_head(of).store(call, row - of * per_head, i % kVectors * 4, sum);
    }
  };

  struct Received {
    float4 values, sums;  // sums: the largest score, the total
  };
  struct Shared {
    alignas(1024) uint8_t rings[kNumWarps][kRingBytes];
    Received inbox[kClusterSize > 1 ? kClusterSize : 1][kClusterSize > 1 ? kSlots : 1];
    float most[kNumWarps][kMaxRows], total[kNumWarps][kMaxRows];
    Barrier full[kNumWarps][kNumStages];
    Barrier inbox_full;
  };

  const Attention<Kind>& call;
  const TensorMap &map_k, &map_v;
  int num_slots;
  Shared& shared;
  int warp, lane, rank;

  // A sequence, and the tokens that some query of it sees.
  struct Span {
    Sequence sequence;
    int first_token, end_token;

    __device__ __forceinline__ int first_tile() const { return first_token / kTokens; }
    __device__ __forceinline__ int end_tile() const { return ceil_div(end_token, kTokens); }
  };
  __device__ __forceinline__ Span span_of(int seq) const {
    const int first_query = call.cu_q[seq];
    const int num_queries = call.cu_q[seq + 1] - first_query;
    const Sequence sequence = {first_query, num_queries, call.kv_lens[seq]};
    return {sequence, Kind::kWindow ? max(sequence.context() + 1 - call.window, 0) : 0,
            num_queries > 0 ? max(sequence.num_tokens, 0) : 0};
  }

  // The lane's box of a tile of tokens. Where no query sees the box it lies beyond the cache's end,
  // which makes zeros.
  __device__ __forceinline__ int slot_of(const int* table, int tile, const Span& span) const {
    const uint32_t token = tile * kTokens + lane % kBoxes * kBoxTokens;
    const uint32_t entry = min(token / Kind::kPageSize, call.table_width - 1u);
    const int slot = table[entry] * Kind::kPageSize + token % Kind::kPageSize;
    const bool is_seen = token < span.end_token && token + kBoxTokens > span.first_token;
    return is_seen ? slot : num_slots;
  }

  __device__ __forceinline__ uint8_t* stage(int index) const {
    return shared.rings[warp] + index * kStageBytes;
  }

  __device__ __forceinline__ void load_box(int index, int slot) const {
    uint8_t* box = stage(index) + lane % kBoxes * kBoxTokens * Tile::kSpan;
    Barrier& full = shared.full[warp][index];
    const int heads = blockIdx.y;  // as the maps count them
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      uint8_t* at = box + chunk * kTokens * Tile::kSpan;
      tensor_load_3d(at, map_k, chunk * Tile::kColumns, heads, slot, full);
      tensor_load_3d(at + Tile::kTileBytes, map_v, chunk * Tile::kColumns, heads, slot, full);
    }
  }

  // What this warp found, in place of its stages.
  __device__ __forceinline__ void leave(const Tile& own) const {
    float* sums = reinterpret_cast<float*>(shared.rings[warp]);
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = 8 * g + lane % 4 * 2 + j;
        if (lane < 4) {
          shared.most[warp][row] = own.most[g][j];
          shared.total[warp][row] = own.total[g][j];
        }
#pragma unroll
        for (int m = 0; m < kHeadDim / 16; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            sums[row * kPitch + Tile::column(m, half)] = own.sums[m][g][2 * half + j];
          }
        }
      }
    }
  }

  // Vector `i` of the rows.
  __device__ __forceinline__ PartialSum sum_of_warps(const Rows& rows, int i) const {
    const int row = rows.place(i / kVectors), vector = i % kVectors;
    Parts<kNumWarps> found;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) {
      const float* sums = reinterpret_cast<const float*>(shared.rings[w]);
      found.parts[w] = {*reinterpret_cast<const float4*>(sums + row * kPitch + 4 * vector),
                        shared.most[w][row], shared.total[w][row]};
    }
    return found.sum();
  }

  // Every block gets every kClusterSize-th chunk of vectors from all, adds up and stores it.
  __device__ __forceinline__ void exchange(const Rows& rows) const {
    cluster_wait();  // all inboxes are open
    for (int i = threadIdx.x; i < rows.num_vectors(); i += kThreads) {
      const PartialSum sum = sum_of_warps(rows, i);
      const int chunk = i / kChunk, to = chunk % kClusterSize;
      Received& place = shared.inbox[rank][chunk / kClusterSize * kChunk + i % kChunk];
      store_async(&place.values, sum.values, shared.inbox_full, to);
      store_async(&place.sums, {sum.most, sum.total, 0.0f, 0.0f}, shared.inbox_full, to);
    }
    shared.inbox_full.wait(0);
    for (int slot = threadIdx.x; slot < kSlots; slot += kThreads) {
      const int i = (slot / kChunk * kClusterSize + rank) * kChunk + slot % kChunk;
      if (i >= rows.num_vectors()) continue;
      Parts<kClusterSize> found;
#pragma unroll
      for (int from = 0; from < kClusterSize; ++from) {
        const Received& part = shared.inbox[from][slot];
        found.parts[from] = {part.values, part.sums.x, part.sums.y};
      }
      rows.store(call, i, found.sum());
    }
  }

  __device__ __forceinline__ void open_inbox() const {
    if (threadIdx.x == 0) {
      shared.inbox_full.init(1);
      fence_barrier_init();
    }
    cluster_arrive_relaxed();
  }

  __device__ __forceinline__ void expect(const Rows& rows) const {
    if (threadIdx.x != 0) return;
    const int chunks = rows.num_vectors() / kChunk;
    const int own = (chunks + kClusterSize - 1 - rank) / kClusterSize;
    shared.inbox_full.arrive_expect(own * kChunk * kClusterSize * sizeof(Received));
  }

  __device__ __forceinline__ void run() const {
    Barrier* full = shared.full[warp];
    if (lane < kNumStages) full[lane].init(1);
    fence_barrier_init();
    if constexpr (kClusterSize > 1) open_inbox();
    const int seq = blockIdx.z;
    const int* table = call.block_table + static_cast<int64_t>(seq) * call.table_width;
    prefetch_words(table, seq);
    __syncwarp();
    grid_dependency_wait();
    launch_dependents();

    const Span span = span_of(seq);
    const int end_tile = span.end_tile();
    // Tiles are dealt out in turn.
    constexpr int kStep = kClusterSize * kNumWarps;
    int tile = span.first_tile() + rank * kNumWarps + warp;
    const int owned = lane / kBoxes;  // the stage that the lane has a box of
    int next = tile + owned * kStep;  // the tile that it loads into it
    int slot = slot_of(table, next, span);
    if (owned < kNumStages && next < end_tile && lane % kBoxes == 0) {
      full[owned].arrive_expect(kStageBytes);
    }
    __syncwarp();
    const auto load = [&] {
      if (next < end_tile) load_box(owned, slot);
      next += kNumStages * kStep;
      if (next < end_tile) slot = slot_of(table, next, span);
    };
    if (owned < kNumStages) load();

    const Sequence& sequence = span.sequence;
    if (sequence.num_queries <= 0) return;  // as the whole cluster does
    const int first_head = static_cast<int>(blockIdx.y) * kHeads;
    const Rows rows = {{sequence.first_query, 0, first_head}, sequence.num_queries * call.group()};
    if constexpr (kClusterSize > 1) expect(rows);
    Tile own;
    own.begin(call, rows.first, rows.per_head, sequence);
    // What all rows see.
    const int all_begin = Kind::kWindow ? span.end_token - call.window : 0;
    const int all_end = sequence.context() + 1;
    PipelineState<kNumStages> at;
    for (; tile < end_tile; tile += kStep) {
      const int token = tile * kTokens;
      const bool hides = token + kTokens > all_end || (Kind::kWindow && token < all_begin);
      full[at.stage].wait(at.phase);
      if (hides) own.clear(stage(at.stage), token, span.first_token, span.end_token);
      own.attend(shared_address(stage(at.stage)), token, hides, call);
      __syncwarp();
      if (tile + kNumStages * kStep < end_tile) {
        if (lane == at.stage * kBoxes) full[at.stage].arrive_expect(kStageBytes);
        __syncwarp();
        if (owned == at.stage) load();
      }
      at.advance();
    }
    own.end();
    leave(own);
    __syncthreads();
    if constexpr (kClusterSize > 1) {
      exchange(rows);
    } else {
      for (int i = threadIdx.x; i < rows.num_vectors(); i += kThreads) {
        rows.store(call, i, sum_of_warps(rows, i));
      }
    }
  }

 private:
  // Into L2, where another kernel may still change it.
  static __device__ __forceinline__ void prefetch(const int* place) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(place));
  }

  __device__ __forceinline__ void prefetch_words(const int* table, int seq) const {
    constexpr int kSector = 8;  // entries
    if (threadIdx.x == 0) {
      prefetch_map(map_k);
      prefetch_map(map_v);
      prefetch(call.kv_lens + seq);
      prefetch(call.cu_q + seq);
    }
    const int entry = (rank * kThreads + static_cast<int>(threadIdx.x)) * kSector;
    if (!Kind::kWindow && entry < call.table_width) prefetch(table + entry);
  }
};

template <typename Kind, int kHeads, int kRowTiles, int kTokens, int kNumWarps, int kNumStages,
          int kClusterSize, int kBlocksPerSm>
__global__ void __launch_bounds__(kNumWarps* kWarpThreads, kBlocksPerSm) paged_attn_tma(
    const __grid_constant__ TensorMap map_k,  // (slots, kv_heads / kHeads, kHeads * head_dim)
    const __grid_constant__ TensorMap map_v,  // the same
    const typename Kind::T* q, const typename Kind::Cached* k_cache,
    const typename Kind::Cached* v_cache, const int* block_table, const int* kv_lens,
    const int* cu_q, const float* sinks, const float* k_scale, const float* v_scale,
    const float8_e4m3fn* k_block_scale, const float8_e4m3fn* v_block_scale, typename Kind::T* out,
    float* lse, int batch, int heads, int kv_heads, int table_width, int window, float sm_scale,
    float softcap, int num_slots) {
  using Kernel =
      StreamAttention<Kind, kHeads, kRowTiles, kTokens, kNumWarps, kNumStages, kClusterSize>;
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(dynamic_shared + padding);
  const Attention<Kind> call = {q,        k_cache, v_cache, block_table,   kv_lens,       cu_q,
                                sinks,    k_scale, v_scale, k_block_scale, v_block_scale, out,
                                lse,      batch,   heads,   kv_heads,      table_width,   window,
                                sm_scale, softcap};
  const int rank = kClusterSize > 1 ? cluster_rank() : 0;
  Kernel{call, map_k, map_v, num_slots, shared, warp_index(), lane_index(), rank}.run();
}

}  // namespace kernelcat
