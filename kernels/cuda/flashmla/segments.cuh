// A block's work, one tile of rows after the other.
#pragma once

#include "../paged_attn/schedule.cuh"

namespace kernelcat {

// A block's rows, and tiles of tokens [begin, end) of what they see; none: there is no more work.
struct Segment {
  Sequence sequence;
  int index;                // of the sequence
  int first_row, num_rows;  // of the sequence's; none if num_rows <= 0
  int side_row, side_rows;  // those of all blocks side by side
  int begin, end;
  int first_share, last_share;  // that have parts of these rows

  // The last token that row `row` of the block sees.
  __device__ __forceinline__ int limit(int row, int heads) const {
    return sequence.context() + (first_row + min(row, num_rows - 1)) / heads;
  }
};

// For each of `num_blocks` one, but for those that would have less than `least` units.
__device__ __forceinline__ Shares shares_of(int64_t total, int num_blocks, int least) {
  const int64_t most = min(static_cast<int64_t>(num_blocks), total);
  const int64_t one = min(most, static_cast<int64_t>(1));
  return {total, static_cast<int>(max(min(total / least, most), one))};
}

// A share of the list's units, the same for all blocks side by side.
template <typename Tile>
struct LatentSchedule {
  using List = typename Tile::List;
  List list;
  Shares shares;
  int share, rank;

  // `cursor` is where the share begins.
  template <typename Function>
  __device__ __forceinline__ void for_each(Cursor<List> cursor, Function function) const {
    const int64_t begin = shares.begin(share);
    int left = static_cast<int>(shares.begin(share + 1) - begin);
    int64_t first_unit = begin - (cursor.tile - cursor.range.begin);  // of the tile of rows
    while (true) {
      Segment segment;
      segment.sequence = cursor.sequence;
      segment.index = cursor.index;
      segment.side_row = cursor.row_tile * Tile::BLOCK_M * Tile::kRowTiles;
      segment.side_rows =
          min(list.num_rows(cursor.sequence) - segment.side_row, Tile::BLOCK_M * Tile::kRowTiles);
      segment.first_row = segment.side_row + rank * Tile::BLOCK_M;
      segment.num_rows = min(segment.side_rows - rank * Tile::BLOCK_M, Tile::BLOCK_M);
      segment.begin = cursor.tile;
      segment.end = min(cursor.range.end, cursor.tile + left);
      segment.first_share = shares.owner(first_unit);
      first_unit += cursor.range.size();
      segment.last_share = shares.owner(first_unit - 1);
      function(segment);
      left -= segment.end - segment.begin;
      if (left == 0) break;
      cursor.next_row_tile(list);
    }
  }
};

}  // namespace kernelcat
