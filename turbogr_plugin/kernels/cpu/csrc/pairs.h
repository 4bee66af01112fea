// Which pairs of tokens attend to each other, and which tiles hold any: the mask of kernels/attention_mask.py.
//
// All that a query may see is one interval of keys and itself. So the mask is two numbers per query (its reach), a tile
// is judged from the reaches of its queries, and what no query sees is never computed. Short rows that follow each
// other are laid into one segment of at most kShort tokens, in which a query's interval begins where its row does: one
// tile then serves many rows, and as no row lies across a border of tiles, no sum depends on a row's neighbours. Only
// what is not finite does: 0 times infinity is NaN. So whoever works on such a segment looks whether its results are
// finite, and if they are not, all is done again with rows apart.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace turbogr {

constexpr int64_t kShort = 32;

struct Mask {
  bool causal = true;
  int64_t window = 0;  // in ids; 0: none
  int64_t full_tail = 0;
  std::vector<int64_t> targets, contextual;  // of each row; empty: none
  bool has_contextual() const { return !contextual.empty(); }
};

// Consecutive tokens that are worked on together: one row, or several short ones.
struct Segment {
  int64_t begin, length;       // tokens
  int64_t first_row, end_row;  // some may be empty
};

// Rows of up to `together` tokens may share a segment of that many; 0: each has its own.
inline std::vector<Segment> find_segments(const std::vector<int64_t>& offsets, int64_t together) {
  std::vector<Segment> segments;
  const int64_t rows = static_cast<int64_t>(offsets.size()) - 1;
  for (int64_t b = 0; b < rows; b++) {
    const int64_t length = offsets[b + 1] - offsets[b];
    if (length == 0) continue;
    if (!segments.empty() && segments.back().length + length <= together) {
      segments.back().length += length;
      segments.back().end_row = b + 1;
    } else {
      segments.push_back({offsets[b], length, b, b + 1});
    }
  }
  return segments;
}

// The interval of keys that each query sees besides itself, in positions of the segment, for queries [from, to).
inline void find_reach(const Segment& segment, const std::vector<int64_t>& offsets, const Mask& mask, int64_t from,
                       int64_t to, int32_t* first, int32_t* end) {
  for (int64_t b = segment.first_row; b < segment.end_row; b++) {
    const int64_t origin = offsets[b] - segment.begin, L = offsets[b + 1] - offsets[b];
    const int64_t c = mask.contextual.empty() ? 0 : mask.contextual[b], n = mask.targets.empty() ? 0 : mask.targets[b];
    const int64_t shift = std::max<int64_t>(c - 1, 0), last = L - n - shift;
    // Position of the first token whose id is at least a; ids never decrease.
    const auto first_with = [=](int64_t a) { return a > last ? L : a <= 0 ? int64_t{0} : std::min(a + shift, L); };
    const int64_t targets_begin = first_with(last);
    for (int64_t x = std::max<int64_t>(from - origin, 0); x < std::min(L, to - origin); x++) {
      const int64_t a = std::min(std::max<int64_t>(x - shift, 0), last);
      const bool limited = mask.window > 0 && (mask.full_tail == 0 || a < last - mask.full_tail);
      int64_t lo = limited ? first_with(a - mask.window) : 0;
      int64_t hi = mask.causal ? first_with(a) : limited ? first_with(a + mask.window + 1) : L;
      if (a == last) hi = std::min(hi, targets_begin);  // targets never see each other
      if (c > 0 && a == 0 && a < last) {                // contextual tokens see each other and all of history
        lo = 0;
        hi = std::max(hi, targets_begin);
      }
      if (hi == x && hi > lo) hi = x + 1;  // itself, where it continues the interval
      if (hi <= lo) {
        lo = x;
        hi = x + 1;
      }
      first[origin + x - from] = static_cast<int32_t>(origin + lo);
      end[origin + x - from] = static_cast<int32_t>(origin + hi);
    }
  }
}

// Rows of a tile that hold an allowed pair: [begin, end), multiples of 16; none if they are equal.
struct TileRows {
  int64_t begin = 0, end = 0;
  bool whole = false;  // every pair of them is allowed
  bool empty() const { return begin == end; }
  int64_t count() const { return end - begin; }
};

// A tile whose rows are M queries from position i0 on (reaches of the first at [0]) and whose lanes are N keys from j0
// on.
inline TileRows judge_queries(const int32_t* first, const int32_t* end, int64_t i0, int64_t M, int64_t j0, int64_t N) {
  int64_t begin = M, stop = 0, whole = 0;
  for (int64_t r = 0; r < M; r++) {
    const bool any = (first[r] < j0 + N && end[r] > j0) || (i0 + r >= j0 && i0 + r < j0 + N);
    whole += first[r] <= j0 && end[r] >= j0 + N;
    begin = any ? std::min(begin, r) : begin;
    stop = any ? r + 1 : stop;
  }
  if (stop == 0) return {};
  // The rows that rounding adds are beyond the block, or not wholly allowed and then not counted.
  const int64_t low = begin / 16 * 16;
  return {low, round_up(stop, 16), whole >= std::min(round_up(stop, 16), M) - low};
}

// A tile whose rows are M keys from j0 on and whose lanes are N queries (reaches of the first at [0], its position i0).
inline TileRows judge_keys(const int32_t* first, const int32_t* end, int64_t i0, int64_t N, int64_t j0, int64_t M) {
  int64_t begin = M, stop = 0;
  bool whole = true;
  for (int64_t c = 0; c < N; c++) {
    int64_t lo = std::max<int64_t>(first[c] - j0, 0), hi = std::min<int64_t>(end[c] - j0, M);
    whole &= lo == 0 && hi == M;
    if (hi <= lo) lo = M, hi = 0;
    const int64_t self = i0 + c - j0;
    if (self >= 0 && self < M) lo = std::min(lo, self), hi = std::max(hi, self + 1);
    begin = std::min(begin, lo);
    stop = std::max(stop, hi);
  }
  if (stop <= begin) return {};
  return {begin / 16 * 16, round_up(stop, 16), whole};
}

// The keys that a block of queries reaches at all: [begin, end).
inline std::pair<int64_t, int64_t> reached_keys(const int32_t* first, const int32_t* end, int64_t i0, int64_t M) {
  int64_t lo = i0, hi = i0 + M;
  for (int64_t r = 0; r < M; r++) lo = std::min<int64_t>(lo, first[r]), hi = std::max<int64_t>(hi, end[r]);
  return {lo, hi};
}

// Reaches as floats relative to a tile, so that masks are made by comparing vectors of floats: exact below 2^24.
constexpr int64_t kLongestRow = int64_t{1} << 24;

// In a tile of queries by keys: which of the n vectors' lanes row r may see.
struct RowMask {
  V first, end, self;
  RowMask(int32_t first_, int32_t end_, int64_t self_, int64_t j0)
      : first(static_cast<float>(first_ - j0)),
        end(static_cast<float>(end_ - j0)),
        self(static_cast<float>(self_ - j0)) {}
  V operator()(V lane) const { return ((lane >= first) & (lane < end)) | (lane == self); }
};

// In a tile of keys by queries: the reaches of its lanes.
struct LaneMask {
  alignas(64) float first[kLanes], end[kLanes], self[kLanes];
  void set(const int32_t* first_, const int32_t* end_, int64_t i0, int64_t N, int64_t j0) {
    for (int64_t c = 0; c < N; c++) {
      first[c] = static_cast<float>(first_[c] - j0);
      end[c] = static_cast<float>(end_[c] - j0);
      self[c] = static_cast<float>(i0 + c - j0);
    }
    for (int64_t c = N; c < kLanes; c++) first[c] = end[c] = self[c] = -1.f;  // padding: sees nothing
  }
  V operator()(int64_t row, int64_t lane) const {
    const V r(static_cast<float>(row));
    return ((r >= V::loadu(first + lane)) & (r < V::loadu(end + lane))) | (r == V::loadu(self + lane));
  }
};

inline V lane_numbers(int64_t from) {
  alignas(64) float x[V::size()];
  for (int k = 0; k < V::size(); k++) x[k] = static_cast<float>(from + k);
  return V::loadu(x);
}

}  // namespace turbogr
