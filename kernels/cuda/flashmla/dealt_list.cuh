// The work of a launch, dealt out by what it costs: for flashmla/wgmma in place of WorkList.
//
// WorkList counts KV tiles only. Two things then cost more than they count. Each piece of a row
// tile has a fixed cost (its queries, its first scores, its results), so a team with many short
// sequences ends last. And every row tile of a chunk of a prompt takes all tokens of its sequence,
// though its rows see half of them on average. So here a row tile ends at the last token that its
// last row sees, and each of its pieces costs as much as kPieceCost KV tiles more (after the fixed
// overhead in the scheduler of DeepSeek's FlashMLA, a kernel of its own that runs before).
//
// The row tiles of all sequences, one after another, make one line of costs, and team t has the
// part [share * t, share * (t + 1)) of it. Where a team begins and ends follows from the lengths
// alone: each thread block finds its own part, and no plan is kept between launches, so a captured
// graph may be replayed with other lengths. How many pieces a row tile will have is counted before
// by the mean number of KV tiles of a team. A boundary divides a row tile only where both pieces
// have kMinPiece KV tiles; else it moves to the nearer end of the row tile, as both of its teams
// know.
#pragma once

#include "latent_tile.cuh"

namespace kernelcat {

// By the clock of flashmla/wgmma on an H200: 3,000 cycles for a KV tile, 4,300 that the tensor
// cores wait between two sequences, 3,900 to store results.
constexpr int kPieceCost = 3;
constexpr int kMinPiece = 2;

// Unsigned divisions take fewer instructions.
__device__ __forceinline__ int quotient(int value, int divisor) {
  return static_cast<unsigned>(value) / static_cast<unsigned>(divisor);
}
__device__ __forceinline__ int quotient_up(int value, int divisor) {
  return quotient(value + divisor - 1, divisor);
}

// The row tiles of a sequence, and the KV tiles of each. With more than BLOCK_N queries they
// differ: the last row of row tile r is query (BLOCK_M * (r + 1) - 1) / heads, rounded down, and
// sees its own token and those before it. By the rules of nested divisions these are (first + r) /
// step KV tiles, where step = BLOCK_N * heads / BLOCK_M is whole. The last row tile may have fewer
// rows, and has all KV tiles of the sequence.
template <int BLOCK_M, int BLOCK_N>
struct VisibleTiles {
  int num_row_tiles, last;  // KV tiles of the last row tile
  int first, step;          // step 0: all row tiles are like the last one
  int num_pieces;           // that each row tile is expected to have

  // Row tiles are expected to be divided into pieces of up to `piece` KV tiles, all of a sequence
  // into as many as the shortest; 0: costs of pieces are left out.
  static __device__ __forceinline__ VisibleTiles of(const Sequence& sequence, int heads,
                                                    int piece) {
    VisibleTiles tiles = {.num_row_tiles = ceil_div(sequence.num_queries * heads, BLOCK_M),
                          .last = max(ceil_div(sequence.num_tokens, BLOCK_N), 1)};
    const bool grow = sequence.num_queries > BLOCK_N && sequence.context() >= 0;
    if (grow && BLOCK_N * heads % BLOCK_M == 0) {
      const int64_t rows = static_cast<int64_t>(sequence.context() + BLOCK_N) * heads;
      tiles.first = static_cast<int>((rows + BLOCK_M - 1) / BLOCK_M);
      tiles.step = BLOCK_N * heads / BLOCK_M;
    }
    const int shortest = tiles.num_kv_tiles(0);
    if (piece > 0) tiles.num_pieces = shortest <= piece ? 1 : quotient_up(shortest, piece);
    return tiles;
  }

  __device__ __forceinline__ int extra() const { return kPieceCost * num_pieces; }

  __device__ __forceinline__ int num_kv_tiles(int row_tile) const {
    return step == 0 || row_tile == num_row_tiles - 1 ? last : quotient(first + row_tile, step);
  }
  // Of row tiles 0 to `row_tile` - 1, which do not include the last one.
  __device__ __forceinline__ int cost_before(int row_tile) const {
    if (step == 0) return row_tile * (extra() + last);
    return row_tile * extra() +
           static_cast<int>(quotients_below(first + row_tile) - quotients_below(first));
  }
  __device__ __forceinline__ int cost() const {
    return num_row_tiles == 0 ? 0 : cost_before(num_row_tiles - 1) + extra() + last;
  }
  // The row tile at `offset` of the sequence's costs.
  __device__ __forceinline__ int row_tile_at(int offset) const {
    if (num_row_tiles == 1) return 0;
    if (step == 0) return quotient(offset, extra() + last);
    int low = 0, high = num_row_tiles;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (cost_before(middle) <= offset ? low : high) = middle;
    }
    return low;
  }

 private:
  // The sum of x / step, rounded down, over 0 <= x < end.
  __device__ __forceinline__ int64_t quotients_below(int end) const {
    const int64_t whole = quotient(end, step), rest = end - whole * step;
    return whole * (whole - 1) / 2 * step + whole * rest;
  }
};

// A row tile on the line of costs: as many equal pieces as are expected, each of which begins with
// its cost, and then has its KV tiles.
struct RowTileCost {
  int begin, num_tiles, num_pieces;

  __device__ __forceinline__ int end() const { return begin + num_tiles + kPieceCost * num_pieces; }
  // The KV tile before which a boundary at `at` divides the row tile; 0 or num_tiles where a piece
  // would be too small.
  __device__ __forceinline__ int kv_tile(int at) const {
    const int offset = at - begin;
    int tile = max(offset - kPieceCost, 0);
    if (num_pieces > 1) {
      const int pieces_before = quotient(offset * num_pieces, end() - begin);
      tile = max(quotient(pieces_before * num_tiles, num_pieces),
                 offset - kPieceCost * (pieces_before + 1));
    }
    return tile < kMinPiece ? 0 : num_tiles - tile < kMinPiece ? num_tiles : tile;
  }
  // The first and the last boundary that divide the row tile, of those at multiples of `share`.
  __device__ __forceinline__ int first_boundary(int share) const {
    int boundary = quotient_up(begin, share);
    while (kv_tile(boundary * share) == 0) ++boundary;
    return boundary;
  }
  __device__ __forceinline__ int last_boundary(int share) const {
    int boundary = quotient(end() - 1, share);
    while (kv_tile(boundary * share) == num_tiles) --boundary;
    return boundary;
  }
};

template <int BLOCK_M_, int BLOCK_N_>
struct DealtList {
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_;
  using Rows = WorkList<BLOCK_M, BLOCK_N>;

  const int* kv_lens;  // (batch,)
  const int* cu_q;     // (batch + 1,)
  int batch, heads;

  __device__ __forceinline__ Rows rows() const { return {kv_lens, cu_q, batch, heads}; }
  __device__ __forceinline__ void prefetch(const int* block_table, int table_width) const {
    rows().prefetch(block_table, table_width);
  }
  __device__ __forceinline__ Sequence sequence(int index) const { return rows().sequence(index); }
  __device__ __forceinline__ VisibleTiles<BLOCK_M, BLOCK_N> tiles(const Sequence& sequence,
                                                                  int piece) const {
    return VisibleTiles<BLOCK_M, BLOCK_N>::of(sequence, heads, piece);
  }
};

// Before KV tile `kv_tile` of a row tile, or at its end.
struct DealtPlace {
  Sequence sequence;
  int sequence_idx, row_tile, kv_tile;
  int cost;  // of all row tiles before
};

// The part of a team; `share` and `piece` are those of all teams.
struct DealtPart {
  DealtPlace begin, end;
  int share, piece;
};

template <int BLOCK_M, int BLOCK_N>
struct WorkCursor<DealtList<BLOCK_M, BLOCK_N>> {
  const DealtPart* part;  // in shared memory
};

// Lies in shared memory; all threads call its functions together.
template <int BLOCK_M, int BLOCK_N, int kNumWarps>
struct Planner<DealtList<BLOCK_M, BLOCK_N>, kNumWarps> {
  using List = DealtList<BLOCK_M, BLOCK_N>;
  static constexpr int kThreads = kNumWarps * kWarpThreads;

  int warp_sums[2][kNumWarps];  // used in turn, so that one barrier is enough
  DealtPart part;

  // Costs of the thread's sequence: the thread block looks at kThreads sequences at a time.
  struct Costs {
    Sequence sequence;
    int before, cost, all;  // of those before the thread's, of the thread's, of all
  };

  // `round` counts the calls.
  __device__ __forceinline__ Costs count(const List& list, int first_sequence, int piece,
                                         int& round) {
    const int s = first_sequence + static_cast<int>(threadIdx.x);
    Costs costs = {};
    if (s < list.batch) {
      costs.sequence = list.sequence(s);
      costs.cost = list.tiles(costs.sequence, piece).cost();
    }
    const int lane = lane_index(), warp = threadIdx.x / kWarpThreads;
    int inclusive = costs.cost;
#pragma unroll
    for (int step = 1; step < kWarpThreads; step *= 2) {
      const int below = __shfl_up_sync(0xffffffff, inclusive, step);
      if (lane >= step) inclusive += below;
    }
    int (&sums)[kNumWarps] = warp_sums[round++ % 2];
    if (lane == kWarpThreads - 1) sums[warp] = inclusive;
    __syncthreads();
    costs.before = inclusive - costs.cost;
#pragma unroll
    for (int i = 0; i < kNumWarps; ++i) {
      if (i < warp) costs.before += sums[i];
      costs.all += sums[i];
    }
    return costs;
  }

  // The costs of the first sequences; `all` is that of all sequences.
  __device__ __forceinline__ Costs count_all(const List& list, int piece, int& all, int& round) {
    const Costs first = count(list, 0, piece, round);
    all = first.all;
    for (int s = kThreads; s < list.batch; s += kThreads) all += count(list, s, piece, round).all;
    return first;
  }

  // Sets the rest of a place at `cost`, of which sequence and `cost` before the sequence are known.
  // The last place is the end of the list.
  static __device__ __forceinline__ void complete(const List& list, int piece, int cost,
                                                  bool is_last, DealtPlace& place) {
    const auto tiles = list.tiles(place.sequence, piece);
    const int row_tile = tiles.row_tile_at(cost - place.cost);
    const int begin = place.cost + tiles.cost_before(row_tile);
    const RowTileCost row_cost = {begin, tiles.num_kv_tiles(row_tile), tiles.num_pieces};
    place.row_tile = row_tile;
    place.cost = begin;
    place.kv_tile = is_last ? row_cost.num_tiles : row_cost.kv_tile(cost);
  }

  // Divides the list among up to `max_teams`, of which each gets at least `min_tiles` KV tiles (or
  // what costs as much), and sets `cursor` to the part of `team`, if the team has one.
  __device__ __forceinline__ WorkPartition partition(const List& list, int max_teams, int min_tiles,
                                                     int team, WorkCursor<List>& cursor) {
    int round = 0, num_tiles, all;
    count_all(list, 0, num_tiles, round);
    const int piece = max(quotient_up(num_tiles, max_teams), min_tiles);
    Costs costs = count_all(list, piece, all, round);
    const int share = max(quotient_up(all, max_teams), min_tiles + kPieceCost);
    const WorkPartition partition = {.num_teams = quotient_up(all, share)};
    if (team >= partition.num_teams) return partition;
    const int begin = share * team, end = min(begin + share, all), last = min(end, all - 1);
    for (int first = 0, before = 0;;) {
      const int offset = before + costs.before;
      DealtPlace place = {};
      place.sequence = costs.sequence;
      place.sequence_idx = first + static_cast<int>(threadIdx.x);
      place.cost = offset;
      if (offset <= begin && begin < offset + costs.cost) part.begin = place;
      if (offset <= last && last < offset + costs.cost) part.end = place;
      before += costs.all;
      if (last < before) break;
      first += kThreads;
      costs = count(list, first, piece, round);
    }
    __syncthreads();
    if (lane_index() == 0 && threadIdx.x < 2 * kWarpThreads) {  // each place by a warp of its own
      const bool is_end = threadIdx.x > 0;
      complete(list, piece, is_end ? last : begin, is_end && end == all,
               is_end ? part.end : part.begin);
      if (is_end) part.share = share, part.piece = piece;
    }
    __syncthreads();
    cursor.part = &part;
    return partition;
  }
};

// A tile (LatentTile) whose work is dealt out by what it costs.
template <typename Base>
struct DealtTile : Base {
  static constexpr bool kAlwaysWaits = true, kPadsParts = false;
  using List = DealtList<Base::BLOCK_M * Base::kRowTiles, Base::BLOCK_N>;
};

// The segments of a thread block, which is number `rank` of those of its team that have other rows.
template <typename Base>
struct LatentSchedule<DealtTile<Base>> {
  using Tile = DealtTile<Base>;
  using List = typename Tile::List;
  List list;
  WorkPartition partition;
  int team, rank;

  // Calls `function(segment)` for each segment of the team's part.
  template <typename Function>
  __device__ __forceinline__ void for_each(const WorkCursor<List>& cursor,
                                           Function function) const {
    const DealtPart& part = *cursor.part;
    DealtPlace at = part.begin;
    while (true) {
      const auto tiles = list.tiles(at.sequence, part.piece);
      const int num_tiles = tiles.num_kv_tiles(at.row_tile);
      const RowTileCost cost = {at.cost, num_tiles, tiles.num_pieces};
      const bool is_last =
          at.sequence_idx == part.end.sequence_idx && at.row_tile == part.end.row_tile;
      const int end = is_last ? part.end.kv_tile : num_tiles;
      if (at.kv_tile < end) function(segment(at, end, cost, part.share));
      if (is_last) break;
      at.cost = cost.end();
      at.kv_tile = 0;
      if (++at.row_tile == tiles.num_row_tiles) {
        at.row_tile = 0;
        do {
          at.sequence = list.sequence(++at.sequence_idx);
        } while (at.sequence.num_queries == 0);
      }
    }
  }

 private:
  __device__ __forceinline__ Segment segment(const DealtPlace& at, int end, const RowTileCost& cost,
                                             int share) const {
    Segment segment;
    segment.sequence = at.sequence;
    segment.sequence_idx = at.sequence_idx;
    segment.team_row = at.row_tile * List::BLOCK_M;
    segment.num_team_rows =
        min(at.sequence.num_queries * list.heads - segment.team_row, List::BLOCK_M);
    segment.first_row = segment.team_row + rank * Tile::BLOCK_M;
    segment.num_rows = min(segment.num_team_rows - rank * Tile::BLOCK_M, Tile::BLOCK_M);
    segment.begin = at.kv_tile;
    segment.end = end;
    const bool is_whole = end - at.kv_tile == cost.num_tiles;
    segment.first_team = is_whole ? team : cost.first_boundary(share) - 1;
    segment.last_team = is_whole ? team : cost.last_boundary(share);
    return segment;
  }
};

}  // namespace kernelcat
