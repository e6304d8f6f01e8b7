// The work of a thread block as segments: one row tile each, against the KV tiles that its team
// takes.
#pragma once

#include "work_list.cuh"

namespace kernelcat {

// A row tile of a thread block, and KV tiles [begin, end). An empty range says that there is no
// more work.
struct Segment {
  Sequence sequence;
  int sequence_idx;
  int first_row, num_rows;      // among the sequence's rows; num_rows <= 0 if there are none
  int team_row, num_team_rows;  // rows of the whole team
  int begin, end;
  int first_team, last_team;  // teams that have parts of these rows

  // The last token that row `row` of the thread block sees.
  __device__ __forceinline__ int last_visible(int row, int heads) const {
    return sequence.context() + (first_row + min(row, num_rows - 1)) / heads;
  }
};

// The segments of a thread block, which is number `rank` of those of its team that have other rows.
template <typename Tile>
struct LatentSchedule {
  using List = typename Tile::List;
  List list;
  WorkPartition partition;
  int team, rank;

  // Calls `function(segment)` for each segment; `cursor` is the team's first item.
  template <typename Function>
  __device__ __forceinline__ void for_each(WorkCursor<List> cursor, Function function) const {
    constexpr int kTeamRows = Tile::BLOCK_M * Tile::kRowTiles;
    const int end = partition.begin(team + 1);
    int remaining = end - partition.begin(team);
    while (true) {
      const int num_tiles = list.num_kv_tiles(cursor.sequence);
      const int first_item = end - remaining - cursor.kv_tile;  // of the row tile
      Segment segment;
      segment.sequence = cursor.sequence;
      segment.sequence_idx = cursor.sequence_idx;
      segment.team_row = cursor.row_tile * Tile::BLOCK_M * Tile::kRowTiles;
      segment.num_team_rows = min(list.num_rows(cursor.sequence) - segment.team_row, kTeamRows);
      segment.first_row = segment.team_row + rank * Tile::BLOCK_M;
      segment.num_rows = min(segment.num_team_rows - rank * Tile::BLOCK_M, Tile::BLOCK_M);
      segment.begin = cursor.kv_tile;
      segment.end = min(num_tiles, cursor.kv_tile + remaining);
      const bool is_whole = segment.end - segment.begin == num_tiles;
      segment.first_team = is_whole ? team : partition.owner(first_item);
      segment.last_team = is_whole ? team : partition.owner(first_item + num_tiles - 1);
      function(segment);
      remaining -= segment.end - segment.begin;
      if (remaining == 0) break;
      cursor.next_row_tile(list);
    }
  }
};

}  // namespace kernelcat
