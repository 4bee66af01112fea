// How a forward is cut: a unit is a block of queries of one segment and a group of heads; it goes over tiles of keys.
//
// Units are taken by the threads from one list, the costliest first; each writes its own part of the output.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention_call.h"
#include "gemm.h"

namespace turbogr {

struct QueryUnit {
  int64_t segment, head, i0;
  double cost;
};

inline std::vector<QueryUnit> query_units(const Layout& layout, int64_t block, int64_t group) {
  std::vector<QueryUnit> units;
  for (size_t s = 0; s < layout.segments.size(); s++) {
    const int64_t L = layout.segments[s].length;
    for (int64_t i0 = 0; i0 < L; i0 += block) {
      int64_t keys = layout.mask.causal ? std::min(L, i0 + block) : L;
      if (layout.mask.window > 0) keys = std::min(keys, 2 * layout.mask.window + block);
      for (int64_t h = 0; h < layout.H; h += group)
        units.push_back(
            {static_cast<int64_t>(s), h, i0,
             static_cast<double>(keys) * static_cast<double>(std::min(block, L - i0) * std::min(group, layout.H - h))});
    }
  }
  std::stable_sort(units.begin(), units.end(), [](const QueryUnit& x, const QueryUnit& y) { return x.cost > y.cost; });
  return units;
}

// work(buffers, unit) for all units, on all threads.
template <class Buffers, class Sizes, class Work>
void run_query_units(const std::vector<QueryUnit>& units, const Sizes& sizes, bool packed, const Work& work) {
  std::atomic<size_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    if (next.load() >= units.size()) return;
    Workspace<Buffers> workspace(sizes);
    for (size_t u; (u = next.fetch_add(1)) < units.size();) work(*workspace, units[u]);
    release_multiply(packed);
  });
}

// tile(j0, N, rows, end of keys) for all tiles of keys that a block of M queries from i0 on sees, in ascending order.
// Tiles that are seen in part are halved.
template <class Tile>
void for_key_tiles(const int32_t* first, const int32_t* end, int64_t i0, int64_t M, int64_t L, const Tile& tile) {
  const auto [keys_begin, keys_end] = reached_keys(first, end, i0, M);
  for (int64_t j0 = keys_begin / kLanes * kLanes; j0 < keys_end; j0 += kLanes) {
    const int64_t N = std::min(kLanes, L - j0);
    const TileRows rows = judge_queries(first, end, i0, M, j0, N);
    if (rows.empty()) continue;
    if (rows.whole || N <= kHalfLanes) {
      tile(j0, N, rows, keys_end);
      continue;
    }
    for (int64_t half = j0; half < j0 + N; half += kHalfLanes) {
      const int64_t n = std::min(kHalfLanes, j0 + N - half);
      const TileRows part = judge_queries(first, end, i0, M, half, n);
      if (!part.empty()) tile(half, n, part, keys_end);
    }
  }
}

}  // namespace turbogr
