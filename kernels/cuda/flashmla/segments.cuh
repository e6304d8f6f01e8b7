// A block's work, one tile of rows after the other.
#pragma once

#include "plan.cuh"

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
    const int end = shares.begin(share + 1);
    int left = end - shares.begin(share);
    while (true) {
      const int num_tiles = list.num_tiles(cursor.sequence), first_unit = end - left - cursor.tile;
      Segment segment;
      segment.sequence = cursor.sequence;
      segment.index = cursor.index;
      segment.side_row = cursor.row_tile * Tile::BLOCK_M * Tile::kRowTiles;
      segment.side_rows =
          min(list.num_rows(cursor.sequence) - segment.side_row, Tile::BLOCK_M * Tile::kRowTiles);
      segment.first_row = segment.side_row + rank * Tile::BLOCK_M;
      segment.num_rows = min(segment.side_rows - rank * Tile::BLOCK_M, Tile::BLOCK_M);
      segment.begin = cursor.tile;
      segment.end = min(num_tiles, cursor.tile + left);
      const bool is_whole = segment.end - segment.begin == num_tiles;
      segment.first_share = is_whole ? share : shares.owner(first_unit);
      segment.last_share = is_whole ? share : shares.owner(first_unit + num_tiles - 1);
      function(segment);
      left -= segment.end - segment.begin;
      if (left == 0) break;
      cursor.next_row_tile(list);
    }
  }
};

}  // namespace kernelcat
