// Latent attention of few rows on Hopper: KV tiles of 16 tokens stream through a ring by TMA (or
// cp.async), those of a segment after its queries, which lie in a stage as the tokens of a KV tile
// do (with packed rows, queries are loaded from global memory). Work is dealt out by what it costs.
//
// The rows are the columns of mma.sync's products, the tokens their rows, so that 8 or 16 rows
// waste nothing. Four score warps take KV tiles in turn and compute their weights, with all queries
// in registers; four value warps take every KV tile and accumulate a quarter of the columns each.
// Every score warp has a row max of its own, which it passes on with the weights, so that score
// warps do not wait for each other. A warp that has no KV tile of a segment leaves it out, so that
// score warps work on several short segments at the same time.
//
// barrier                | who arrives (how many)           | who waits   | for what
// -----------------------|----------------------------------|-------------|---------------------
// full[stage]            | producer (1), bytes of TMA; with | score warps | a KV tile has landed
//                        | cp.async: kGatherThreads         |             | or queries have
// weights_full[stage]    | lanes of the score warp (32)     | value warps | weights, row max;
//                        |                                  |             | queries were read
// empty[stage]           | value threads (128), and a lane  | producer,   | values and weights
//                        | of the score warps whose turn it | score warps | were read, nobody
//                        | is not (3)                       |             | waits
// kValuesBarrier (named) | value threads (128)              | value warps | each other (merge)
//
// Every value thread arrives at empty, and a score warp looks at it before it writes weights,
// though a full stage implies it: racecheck does not follow one lane's arrival for its warp.
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/sync.cuh>

#include "dealt_list.cuh"
#include "stream_gatherer.cuh"
#include "value_warp.cuh"

namespace kernelcat {

constexpr int kValuesBarrier = 1;  // barrier 0 is __syncthreads'

// A thread block has 8 * kGroups rows; the kRowTiles thread blocks of a team have neighbouring rows
// of the same tokens.
template <typename T_, typename Cached_, int kGroups_, int kRowTiles_, int kNumStages_,
          bool kGathers_>
struct StreamTile {
  using T = T_;
  using Cached = Cached_;
  static constexpr int BLOCK_M = 8 * kGroups_, BLOCK_N = kTileTokens;
  static constexpr int kGroups = kGroups_, kRowTiles = kRowTiles_, kNumStages = kNumStages_;
  static constexpr bool kGathers = kGathers_;  // pages of one token, by cp.async; otherwise by TMA
  static constexpr int kArrivals = kGathers ? kGatherThreads : 1;  // at a full barrier
  static constexpr int kNumWarps = kScoreWarps + kValueWarps + 4;  // the last four load
  static constexpr int kScoreRegisters = 240, kValueRegisters = 224, kProducerRegisters = 40;
  static constexpr int kNumThreads = kNumWarps * kWarpThreads;
  using Keys = KvTile16<T, Cached>;
};

template <typename Tile>
struct StreamShared {
  static constexpr int kNumStages = Tile::kNumStages;
  typename Tile::Keys keys[kNumStages];
  TileWeights<Tile::kGroups> weights[kNumStages];
  Barrier full[kNumStages], weights_full[kNumStages], empty[kNumStages];
  Planner<typename Tile::List, Tile::kNumWarps> planner;
  bool is_last;
};

template <typename Tile>
struct StreamLatent {
  using T = typename Tile::T;
  using Keys = typename Tile::Keys;
  using State = PipelineState<Tile::kNumStages>;
  using WorkCursor = kernelcat::WorkCursor<typename Tile::List>;
  using PartialResults = kernelcat::PartialResults<Tile::BLOCK_M * Tile::kRowTiles>;

  StreamShared<Tile>& shared;
  const LatentArgs<T, typename Tile::Cached>& args;
  const LatentSchedule<Tile>& schedule;
  int page_bits;

  // The first slot of a KV tile. A tile beyond the sequence begins beyond the end of the cache,
  // where TMA loads zeros.
  __device__ __forceinline__ int slot_of(const Segment& segment, int tile, int num_slots) const {
    const int token = tile * kTileTokens;
    if (token >= segment.sequence.num_tokens) return num_slots;
    const int64_t entry =
        static_cast<int64_t>(segment.sequence_idx) * args.table_width + (token >> page_bits);
    return (__ldg(args.block_table + entry) << page_bits) + (token & ((1 << page_bits) - 1));
  }

  // Loads the segment's queries; the rotated part is a chunk like the others.
  __device__ __forceinline__ void load_queries(const Segment& segment, const TensorMap& map_q,
                                               const State& at) const {
    constexpr int kColumns = kSpan / 2;
    const int row = segment.sequence.first_query * args.heads + segment.first_row;
    const int lane = lane_index();
    Keys& keys = shared.keys[at.stage];
    Barrier& full = shared.full[at.stage];
    shared.empty[at.stage].wait(at.phase ^ 1);
    if (lane == 0) full.arrive_expect(Tile::BLOCK_M * kRowElements * 2);
    __syncwarp();
    if (lane <= Keys::kChunks) {
      uint8_t* target = lane < Keys::kChunks ? keys.chunks[lane] : keys.tail;
      tensor_load(target, map_q, lane * kColumns, row, full, kDefaultPolicy);
    }
    __syncwarp();
  }

  // The producer warp: each lane looks up one of 32 KV tiles, and loads one box of every stage.
  __device__ __forceinline__ void produce(const WorkCursor& first, const TensorMap& map_q,
                                          const TensorMap& map_latents, const TensorMap& map_tails,
                                          int num_slots) const {
    constexpr int kColumns = kSpan / (Keys::kPacked ? 1 : 2);
    constexpr int kBytes = kTileTokens * (Keys::kChunks * kSpan + Keys::kTailBytes);
    const uint64_t policy = evict_first_policy();
    const int lane = lane_index();
    State at;
    schedule.for_each(first, [&](const Segment& segment) {
      int slot = slot_of(segment, segment.begin + lane, num_slots);
      if constexpr (!Keys::kPacked) {
        load_queries(segment, map_q, at);
        at.advance();
      }
      for (int begin = segment.begin; begin < segment.end; begin += kWarpThreads) {
        const int next = slot_of(segment, begin + kWarpThreads + lane, num_slots);
        const int count = min(segment.end - begin, kWarpThreads);
        for (int i = 0; i < count; ++i) {
          const int first_slot = __shfl_sync(0xffffffff, slot, i);
          Keys& keys = shared.keys[at.stage];
          Barrier& full = shared.full[at.stage];
          shared.empty[at.stage].wait(at.phase ^ 1);
          if (lane == 0) full.arrive_expect(kBytes);
          __syncwarp();
          if (lane < Keys::kChunks) {
            tensor_load(keys.chunks[lane], map_latents, lane * kColumns, first_slot, full, policy);
          } else if (lane == Keys::kChunks) {
            constexpr int kColumn = Keys::kPacked ? PackedRow::kScalesAt : kLatent;
            tensor_load(keys.tail, map_tails, kColumn, first_slot, full, policy);
          }
          __syncwarp();
          at.advance();
        }
        slot = next;
      }
    });
  }

  // A score warp is done with a stage. The one whose turn it is has left its weights there, or the
  // queries to the others, and value warps release the stage after it.
  __device__ __forceinline__ void pass_on(int stage, bool is_turn) const {
    __syncwarp();
    if (is_turn) {
      shared.weights_full[stage].arrive();
    } else if (lane_index() == 0) {
      shared.empty[stage].arrive();
    }
  }

  __device__ __forceinline__ void score(const WorkCursor& first, int warp) const {
    int turn = 0;
    State at;
    schedule.for_each(first, [&](const Segment& segment) {
      ScoreWarp<T, typename Tile::Cached, Tile::kGroups> score_warp;
      const int own_tile = segment.begin + (warp + kScoreWarps - turn) % kScoreWarps;
      const bool has_tiles = own_tile < segment.end;
      if (has_tiles) score_warp.begin(args, segment);
      if constexpr (Keys::kPacked) {
        if (has_tiles) score_warp.load_queries(args, segment);
      } else {
        shared.full[at.stage].wait(at.phase);
        if (has_tiles) score_warp.take_queries(shared.keys[at.stage]);
        pass_on(at.stage, turn == warp);
        at.advance();
      }
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        // Also for the KV tiles of other warps: copies may land out of order, and a warp that skips
        // a phase of a barrier would take the phase before for the one that it waits for. The
        // producer waits for all of them: with a KV tile or two in a segment, a warp that still
        // loads queries would find the phase after next, and wait for ever.
        shared.full[at.stage].wait(at.phase);
        if (turn == warp) {
          Keys& keys = shared.keys[at.stage];
          const int token = tile * kTileTokens, remaining = segment.sequence.num_tokens - token;
          if (remaining < kTileTokens) score_warp.clear(keys, max(remaining, 0));
          shared.empty[at.stage].wait(at.phase ^ 1);
          score_warp.attend(keys, token, shared.weights[at.stage]);
        }
        pass_on(at.stage, turn == warp);
        turn = turn + 1 == kScoreWarps ? 0 : turn + 1;
        at.advance();
      }
    });
  }

  // Stores the rows, or this thread block's part of them. The last thread block that stores a part
  // adds up all parts if there are up to max_inline_parts; otherwise flashmla_merge does.
  template <typename Warp>
  __device__ __forceinline__ void finish(Warp& warp, const Segment& segment,
                                         const PartialResults& partials, uint32_t* counters,
                                         CombineTask* tasks, int max_inline_parts) const {
    const int first = segment.sequence.first_query * args.heads;  // among all (token, head)
    const int num_parts = segment.last_team - segment.first_team + 1;
    const int rank = schedule.rank, first_part_row = rank * Tile::BLOCK_M;
    const bool is_first_thread = threadIdx.x == kScoreWarps * kWarpThreads;
    if (num_parts > 1) {
      const bool begins_here = segment.first_team == schedule.team;
      warp.store_part(partials, PartialResults::slot(schedule.team, begins_here), first_part_row,
                      segment.num_rows);
      if (num_parts > max_inline_parts) {
        if (begins_here && rank == 0 && is_first_thread) {
          tasks[schedule.team] = {num_parts, first + segment.team_row, segment.num_team_rows};
        }
        return;
      }
      uint32_t* counter = counters + segment.first_team * Tile::kRowTiles + rank;
      const auto sync = [] { named_barrier_sync(kValuesBarrier, kValueWarps * kWarpThreads); };
      if (!is_last_part(counter, num_parts, is_first_thread, &shared.is_last, sync)) return;
      warp.begin();
      for (int part_team = segment.first_team; part_team <= segment.last_team; ++part_team) {
        warp.add_part(partials, PartialResults::slot(part_team, part_team == segment.first_team),
                      first_part_row, segment.num_rows);
      }
    }
    const int64_t row = first + segment.first_row;
    warp.store(args.out + row * kLatent, args.lse + row, segment.num_rows);
  }

  __device__ __forceinline__ void accumulate(const WorkCursor& first, int warp, float* slots,
                                             uint32_t* counters, CombineTask* tasks,
                                             int max_inline_parts) const {
    using Warp = ValueWarp<T, typename Tile::Cached, Tile::kGroups>;
    const PartialResults partials = {.slots = slots};
    State at;
    schedule.for_each(first, [&](const Segment& segment) {
      Warp value_warp;
      value_warp.first_column = warp * kWarpColumns;
      value_warp.begin();
      if constexpr (!Keys::kPacked) {  // the queries' stage
        shared.weights_full[at.stage].wait(at.phase);
        shared.empty[at.stage].arrive();
        at.advance();
      }
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        shared.weights_full[at.stage].wait(at.phase);
        value_warp.attend(shared.keys[at.stage], shared.weights[at.stage]);
        fence_async_shared();  // the arrival does not overtake loads in flight
        shared.empty[at.stage].arrive();
        at.advance();
      }
      value_warp.reduce_row_sums();
      finish(value_warp, segment, partials, counters, tasks, max_inline_parts);
    });
  }
};

template <
    typename T, typename Cached, int kGroups, int kRowTiles, int kNumStages, bool kGathers,
    typename Tile = DealtTile<StreamTile<T, Cached, kGroups, kRowTiles, kNumStages, kGathers>>>
__global__ void __launch_bounds__(Tile::kNumThreads, 1)
    flashmla_mma(const __grid_constant__ TensorMap map_q,        // (tokens * heads, 576)
                 const __grid_constant__ TensorMap map_latents,  // (slots, 576 or 656 bytes)
                 const __grid_constant__ TensorMap map_tails,    // (slots, 576 or 656 bytes)
                 const T* q,                                     // (tokens, heads, 576)
                 const Cached* kv_cache,  // (pages, page_size, 576), or PackedRows
                 const int* block_table,  // (batch, table_width)
                 const int* kv_lens,      // (batch,)
                 const int* cu_q,         // (batch + 1,)
                 T* out,                  // (tokens, heads, 512)
                 float* lse,              // (tokens, heads)
                 float* partials,         // PartialResults::slots
                 uint32_t* counters,      // (teams, thread blocks of a team), zero before and after
                 CombineTask* tasks,      // (teams,)
                 int batch, int heads, int table_width, float sm_scale, int page_bits,
                 int num_slots, int min_tiles, int max_inline_parts) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;  // to a swizzle atom
  auto& shared = *reinterpret_cast<StreamShared<Tile>*>(dynamic_shared + padding);
  if (threadIdx.x == 0) {
    prefetch_map(map_q);
    prefetch_map(map_latents);
    prefetch_map(map_tails);
    for (int i = 0; i < kNumStages; ++i) {
      shared.full[i].init(Tile::kArrivals);
      shared.weights_full[i].init(kWarpThreads);
      shared.empty[i].init(kValueWarps * kWarpThreads + kScoreWarps - 1);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const typename Tile::List list = {
      .kv_lens = kv_lens, .cu_q = cu_q, .batch = batch, .heads = heads};
  list.prefetch(block_table, table_width);
  grid_dependency_wait();
  launch_dependents();

  const int team = blockIdx.x / kRowTiles, rank = blockIdx.x % kRowTiles;
  WorkCursor<typename Tile::List> first;
  const WorkPartition partition =
      shared.planner.partition(list, gridDim.x / kRowTiles, min_tiles, team, first);
  if (rank == 0 && threadIdx.x == 0) tasks[team].num_parts = 0;
  if (team >= partition.num_teams) return;
  const LatentArgs<T, Cached> args = {.q = q,
                                      .kv_cache = kv_cache,
                                      .block_table = block_table,
                                      .kv_lens = kv_lens,
                                      .cu_q = cu_q,
                                      .out = out,
                                      .lse = lse,
                                      .batch = batch,
                                      .heads = heads,
                                      .table_width = table_width,
                                      .sm_scale = sm_scale};
  const LatentSchedule<Tile> schedule = {
      .list = list, .partition = partition, .team = team, .rank = rank};
  const StreamLatent<Tile> kernel = {
      .shared = shared, .args = args, .schedule = schedule, .page_bits = page_bits};
  const int warp = warp_index(), warpgroup = warp / 4;
  if (warpgroup == 0) {
    increase_registers<Tile::kScoreRegisters>();
    kernel.score(first, warp);
  } else if (warpgroup == 1) {
    increase_registers<Tile::kValueRegisters>();
    kernel.accumulate(first, warp - kScoreWarps, partials, counters, tasks, max_inline_parts);
  } else {
    decrease_registers<Tile::kProducerRegisters>();
    if constexpr (kGathers) {
      StreamGatherer<Tile, StreamShared<Tile>>{shared, args}.produce(schedule, first);
    } else if (warp % 4 == 0) {
      kernel.produce(first, map_q, map_latents, map_tails, num_slots);
    }
  }
}

}  // namespace kernelcat
