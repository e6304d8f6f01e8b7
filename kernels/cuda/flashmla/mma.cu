// Latent attention of few rows on Hopper: 16 tokens at a time stream through a ring by TMA.
//
// The rows are the columns of mma.sync's products, the tokens their rows, so that 8 or 16 rows
// waste nothing. Four warps take the units by turns and have their scores, with all queries in
// registers; four more take every unit and have the sums of a quarter of the columns. Each score
// warp has a largest score of its own, which it tells along with the weights: nobody waits for
// anything but units.
#include <kernelcat/pdl.cuh>

#include "stream_gatherer.cuh"
#include "stream_sums.cuh"

namespace kernelcat {

constexpr int kValuesBarrier = 1;  // barrier 0 is __syncthreads'

// A block has 8 * kEights rows; kRowTiles blocks side by side have neighbouring ones of the same
// tokens.
template <typename T_, typename Cached_, int kEights_, int kRowTiles_, int kNumStages_,
          bool kGathers_>
struct StreamTile {
  using T = T_;
  using Cached = Cached_;
  static constexpr int BLOCK_M = 8 * kEights_, BLOCK_N = kUnitTokens;
  static constexpr int kEights = kEights_, kRowTiles = kRowTiles_, kNumStages = kNumStages_;
  static constexpr bool kGathers = kGathers_;  // pages of one token, by cp.async; else by TMA
  static constexpr int kArrivals = kGathers ? kGatherThreads : 1;  // when keys have landed
  static constexpr int kNumWarps = kScoreWarps + kValueWarps + 4;  // the last four load
  static constexpr int kScoreRegisters = 240, kValueRegisters = 224, kProducerRegisters = 40;
  static constexpr int kNumThreads = kNumWarps * kWarpThreads;
  using List = WorkList<BLOCK_M * kRowTiles, BLOCK_N>;
  using Keys = Unit<T, Cached>;
};

template <typename Tile>
struct StreamShared {
  static constexpr int kNumStages = Tile::kNumStages;
  typename Tile::Keys keys[kNumStages];
  UnitWeights<Tile::kEights> weights[kNumStages];
  Barrier full[kNumStages], told[kNumStages], empty[kNumStages];
  Planner<typename Tile::List, Tile::kNumWarps> planner;
  bool is_last;
};

template <typename Tile>
struct StreamLatent {
  using T = typename Tile::T;
  using Keys = typename Tile::Keys;
  using Position = PipelineState<Tile::kNumStages>;
  using Cursor = kernelcat::Cursor<typename Tile::List>;
  using Partials = kernelcat::Partials<Tile::BLOCK_M * Tile::kRowTiles>;

  StreamShared<Tile>& shared;
  const LatentAttention<T, typename Tile::Cached>& call;
  const LatentSchedule<Tile>& schedule;
  int page_bits;

  // Where in the cache a unit begins: beyond its end, which makes zeros, where the sequence has no
  // tokens.
  __device__ __forceinline__ int slot_of(const Segment& segment, int unit, int num_slots) const {
    const int token = unit * kUnitTokens;
    if (token >= segment.sequence.num_tokens) return num_slots;
    const int64_t entry =
        static_cast<int64_t>(segment.index) * call.table_width + (token >> page_bits);
    return (__ldg(call.block_table + entry) << page_bits) + (token & ((1 << page_bits) - 1));
  }

  // A lane looks up one of 32 units, and loads one box of each.
  __device__ __forceinline__ void produce(const Cursor& first, const TensorMap& map_latents,
                                          const TensorMap& map_tails, int num_slots) const {
    constexpr int kColumns = kSpan / (Keys::kPacked ? 1 : 2);
    constexpr int kBytes = kUnitTokens * (Keys::kChunks * kSpan + Keys::kTailBytes);
    const uint64_t policy = evict_first_policy();
    const int lane = lane_index();
    Position at;
    schedule.for_each(first, [&](const Segment& segment) {
      int slot = slot_of(segment, segment.begin + lane, num_slots);
      for (int begin = segment.begin; begin < segment.end; begin += kWarpThreads) {
        const int next = slot_of(segment, begin + kWarpThreads + lane, num_slots);
        const int count = min(segment.end - begin, kWarpThreads);
        for (int i = 0; i < count; ++i) {
          const int own = __shfl_sync(0xffffffff, slot, i);
          Keys& keys = shared.keys[at.stage];
          Barrier& full = shared.full[at.stage];
          shared.empty[at.stage].wait(at.phase ^ 1);
          if (lane == 0) full.arrive_expect(kBytes);
          __syncwarp();
          if (lane < Keys::kChunks) {
            tensor_load(keys.chunks[lane], map_latents, lane * kColumns, own, full, policy);
          } else if (lane == Keys::kChunks) {
            constexpr int kColumn = Keys::kPacked ? PackedRow::kScalesAt : kLatent;
            tensor_load(keys.tail, map_tails, kColumn, own, full, policy);
          }
          __syncwarp();
          at.advance();
        }
        slot = next;
      }
    });
  }

  __device__ __forceinline__ void score(const Cursor& first, int warp) const {
    int turn = 0;
    Position at;
    schedule.for_each(first, [&](const Segment& segment) {
      ScoreWarp<T, typename Tile::Cached, Tile::kEights> own;
      own.begin(call, segment);
      for (int unit = segment.begin; unit < segment.end; ++unit) {
        // For others' units, too: copies may land out of order, and a warp that misses a phase of
        // a barrier takes the one before for the one that it waits for.
        shared.full[at.stage].wait(at.phase);
        if (turn == warp) {
          Keys& keys = shared.keys[at.stage];
          const int token = unit * kUnitTokens, left = segment.sequence.num_tokens - token;
          if (left < kUnitTokens) own.clear(keys, max(left, 0));
          own.attend(keys, token, shared.weights[at.stage]);
          shared.told[at.stage].arrive();
        }
        turn = turn + 1 == kScoreWarps ? 0 : turn + 1;
        at.advance();
      }
    });
  }

  // Stores the rows, or what this block has of them. Up to `few` parts are put together by the last
  // block that has any, more by a kernel that follows.
  template <typename Warp>
  __device__ __forceinline__ void finish(Warp& own, const Segment& segment,
                                         const Partials& partials, uint32_t* counters, Task* tasks,
                                         int few) const {
    const int first = segment.sequence.first_query * call.heads;  // among all (token, head)
    const int num_parts = segment.last_share - segment.first_share + 1;
    const int rank = schedule.rank, first_part_row = rank * Tile::BLOCK_M;
    const bool is_first_thread = threadIdx.x == kScoreWarps * kWarpThreads;
    if (num_parts > 1) {
      const bool begins_here = segment.first_share == schedule.share;
      own.put(partials, Partials::slot(schedule.share, begins_here), first_part_row);
      if (num_parts > few) {
        if (begins_here && rank == 0 && is_first_thread) {
          tasks[schedule.share] = {num_parts, first + segment.side_row, segment.side_rows};
        }
        return;
      }
      uint32_t* counter = counters + segment.first_share * Tile::kRowTiles + rank;
      const auto sync = [] { named_barrier_sync(kValuesBarrier, kValueWarps * kWarpThreads); };
      if (!is_last_part(counter, num_parts, is_first_thread, &shared.is_last, sync)) return;
      own.begin();
      for (int from = segment.first_share; from <= segment.last_share; ++from) {
        own.take(partials, Partials::slot(from, from == segment.first_share), first_part_row);
      }
    }
    const int64_t row = first + segment.first_row;
    own.store(call.out + row * kLatent, call.lse + row, segment.num_rows);
  }

  __device__ __forceinline__ void sum(const Cursor& first, int warp, float* memory,
                                      uint32_t* counters, Task* tasks, int few) const {
    using Warp = ValueWarp<T, typename Tile::Cached, Tile::kEights>;
    const Partials partials = {memory};
    Position at;
    schedule.for_each(first, [&](const Segment& segment) {
      Warp own;
      own.first_column = warp * kWarpColumns;
      own.begin();
      for (int unit = segment.begin; unit < segment.end; ++unit) {
        shared.told[at.stage].wait(at.phase);
        own.attend(shared.keys[at.stage], shared.weights[at.stage]);
        shared.empty[at.stage].arrive();
        at.advance();
      }
      own.end();
      finish(own, segment, partials, counters, tasks, few);
    });
  }
};

template <typename T, typename Cached, int kEights, int kRowTiles, int kNumStages, bool kGathers,
          typename Tile = StreamTile<T, Cached, kEights, kRowTiles, kNumStages, kGathers>>
__global__ void __launch_bounds__(Tile::kNumThreads, 1)
    flashmla_mma(const __grid_constant__ TensorMap map_latents,  // (slots, a row)
                 const __grid_constant__ TensorMap map_tails,    // the same
                 const T* q, const Cached* kv_cache, const int* block_table, const int* kv_lens,
                 const int* cu_q, T* out, float* lse, float* memory, uint32_t* counters,
                 Task* tasks, int batch, int heads, int table_width, float sm_scale, int page_bits,
                 int num_slots, int least, int few) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<StreamShared<Tile>*>(dynamic_shared + padding);
  if (threadIdx.x == 0) {
    prefetch_map(map_latents);
    prefetch_map(map_tails);
    for (int i = 0; i < kNumStages; ++i) {
      shared.full[i].init(Tile::kArrivals);
      shared.told[i].init(kWarpThreads);
      shared.empty[i].init(kValueWarps * kWarpThreads);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const typename Tile::List list = {kv_lens, cu_q, batch, heads};
  list.prefetch(block_table, table_width);
  grid_dependency_wait();
  launch_dependents();

  const int share = blockIdx.x / kRowTiles, rank = blockIdx.x % kRowTiles;
  Cursor<typename Tile::List> first;
  const Shares shares = shared.planner.deal(list, gridDim.x / kRowTiles, least, share, first);
  if (rank == 0 && threadIdx.x == 0) tasks[share].num_parts = 0;
  if (share >= shares.num_blocks) return;
  const LatentAttention<T, Cached> call = {q,   kv_cache, block_table, kv_lens,     cu_q,    out,
                                           lse, batch,    heads,       table_width, sm_scale};
  const LatentSchedule<Tile> schedule = {list, shares, share, rank};
  const StreamLatent<Tile> kernel = {shared, call, schedule, page_bits};
  const int warp = warp_index(), warpgroup = warp / 4;
  if (warpgroup == 0) {
    increase_registers<Tile::kScoreRegisters>();
    kernel.score(first, warp);
  } else if (warpgroup == 1) {
    increase_registers<Tile::kValueRegisters>();
    kernel.sum(first, warp - kScoreWarps, memory, counters, tasks, few);
  } else {
    decrease_registers<Tile::kProducerRegisters>();
    if constexpr (kGathers) {
      StreamGatherer<Tile, StreamShared<Tile>>{shared, call}.produce(schedule, first);
    } else if (warp % 4 == 0) {
      kernel.produce(first, map_latents, map_tails, num_slots);
    }
  }
}

}  // namespace kernelcat
