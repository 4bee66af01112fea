// How a backward is cut: a unit is a block of keys of one segment and a group of heads; it goes over tiles of queries.
//
// The gradient of a tile of queries is added up by the blocks that touch it, in their order (streams.h): no atomics,
// and the same bits for any number of threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "attention_call.h"
#include "gemm.h"
#include "streams.h"

namespace turbogr {

// What the queries of a segment see, and the same for whole tiles of queries; a thread keeps it while it stays with a
// stream.
struct SegmentReach {
  int32_t *first, *end, *tile_first, *tile_end;
  SegmentReach() = default;
  SegmentReach(Cutter& cut, int64_t longest)
      : first(cut.take<int32_t>(longest)),
        end(cut.take<int32_t>(longest)),
        tile_first(cut.take<int32_t>(longest / kLanes + 1)),
        tile_end(cut.take<int32_t>(longest / kLanes + 1)) {}
  void find(const Layout& layout, const Segment& segment) {
    find_reach(segment, layout.offsets, layout.mask, 0, segment.length, first, end);
    for (int64_t x = 0; x * kLanes < segment.length; x++) {
      const int64_t i0 = x * kLanes, i1 = std::min(i0 + kLanes, segment.length);
      tile_first[x] = *std::min_element(first + i0, first + i1);
      tile_end[x] = *std::max_element(end + i0, end + i1);
    }
  }
};

// A block's turn to add to the gradient of a tile of queries.
class Turn {
 public:
  Turn(const Streams& streams, std::atomic<int32_t>& counter, int64_t before)
      : streams_(streams), counter_(counter), value_(static_cast<int32_t>(before + 1)) {}
  bool first() const { return value_ == 0; }
  void wait() {
    if (!waited_) streams_.wait(counter_, value_);
    waited_ = true;
  }

 private:
  const Streams& streams_;
  std::atomic<int32_t>& counter_;
  int32_t value_;
  bool waited_ = false;
};

class KeyBlocks {
 public:
  const Layout& layout;
  const int64_t block, group;
  Streams streams;

  KeyBlocks(const Layout& layout_, int64_t block_, int64_t group_) : layout(layout_), block(block_), group(group_) {
    std::vector<int64_t> order(layout.segments.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int64_t>(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t x, int64_t y) { return layout.segments[x].length > layout.segments[y].length; });
    for (int64_t i : order) {
      const int64_t L = layout.segments[i].length;
      for (int64_t h = 0; h < layout.H; h += group)
        streams.add(i, h, (L + block - 1) / block, (L + kLanes - 1) / kLanes);
    }
    streams.start();
  }

  // unit(buffers, stream, block) for all blocks, on all threads. Buffers have a SegmentReach named `reach`.
  template <class Buffers, class Sizes, class Unit>
  void run(const Sizes& sizes, bool packed, const Unit& unit) {
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
      Stream* stream = nullptr;
      int64_t number;
      if (!streams.pick(stream, number)) return;
      try {
        Workspace<Buffers> workspace(sizes);
        const Stream* prepared = nullptr;
        do {
          if (stream != prepared) (*workspace).reach.find(layout, layout.segments[stream->segment]);
          prepared = stream;
          unit(*workspace, *stream, number);
        } while (streams.pick(stream, number));
        release_multiply(packed);
      } catch (...) {
        streams.fail();
        throw;
      }
    });
  }

  // tile(i0, N, rows, turn) for all tiles of queries that see keys of a block of M from j0 on, in ascending order; and
  // zero(i0, N) for queries whose gradient starts with this block although they see none of its keys.
  template <class Tile, class Zero>
  void for_query_tiles(const SegmentReach& reach, Stream& stream, int64_t number, int64_t M, const Tile& tile,
                       const Zero& zero) const {
    const int64_t L = layout.segments[stream.segment].length, j0 = number * block;
    for (int64_t x = 0; x * kLanes < L; x++) {
      if (!touches(reach, number, x)) continue;
      int64_t before = number - 1;
      while (before >= 0 && !touches(reach, before, x)) before--;
      Turn turn(streams, stream.turns[x], before);
      const auto part = [&](int64_t i0, int64_t N, const TileRows& rows) {
        if (!rows.empty())
          tile(i0, N, rows, turn);
        else if (turn.first())
          zero(i0, N);
      };
      const int64_t i0 = x * kLanes, N = std::min(kLanes, L - i0);
      const TileRows rows = judge_keys(reach.first + i0, reach.end + i0, i0, N, j0, M);
      if (rows.whole || rows.empty() || N <= kHalfLanes) {
        part(i0, N, rows);
      } else {
        for (int64_t half = i0; half < i0 + N; half += kHalfLanes) {
          const int64_t n = std::min(kHalfLanes, i0 + N - half);
          part(half, n, judge_keys(reach.first + half, reach.end + half, half, n, j0, M));
        }
      }
      turn.wait();
      stream.turns[x].store(static_cast<int32_t>(number + 1), std::memory_order_release);
    }
  }

 private:
  // Whether a block adds to the gradient of a tile of queries: judged alike by all blocks of a segment.
  bool touches(const SegmentReach& reach, int64_t number, int64_t x) const {
    const int64_t j0 = number * block, j1 = j0 + block, i0 = x * kLanes;
    return (reach.tile_first[x] < j1 && reach.tile_end[x] > j0) || (i0 < j1 && i0 + kLanes > j0);
  }
};

}  // namespace turbogr
