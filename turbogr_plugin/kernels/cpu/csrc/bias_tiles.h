// Relative biases of a tile, and the gradients of their tables from a tile of gradients.
//
// The bucket of a time gap is the number of borders that are at most the gap as a float: exact for any ascending
// borders, no logarithm. The top bits of the float find its place in a table of {borders below it, the next border}.
// Times of a row are usually sorted, so of kRun neighbouring lanes only the two ends are looked up: if their buckets
// agree, so do those between. The position bias is read as contiguous vectors from a copy of the table (and its mirror
// image), expanded by its first and last entries; its gradient is added as vectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "vectors.h"
#include "workspace.h"

namespace turbogr {

constexpr int64_t kRun = 16;  // lanes whose bucket may be found from the two ends

// Buckets of |a - b| by ascending borders.
class TimeBuckets {
 public:
  TimeBuckets() = default;
  TimeBuckets(const float* borders, int64_t n) : borders_(borders, borders + n) {
    // The coarsest table in which no place holds two borders; 2^-11 relative is the finest. Where even that holds two,
    // a coarse table and a search.
    for (shift_ = 20; shift_ >= 12; shift_--)
      if (fill()) return;
    shift_ = 18;
    fill();
    search_ = true;
  }

  int32_t of(float gap) const {
    const int64_t i = place(gap);
    int32_t k = below_[i];
    if (search_) {
      while (k < static_cast<int32_t>(borders_.size()) && borders_[k] <= gap) k++;
      return k;
    }
    return k + (gap >= next_[i]);
  }

  // of |a[k] - b[k]| for 16 lanes
  void of_gaps(const int64_t* a, const int64_t* b, int32_t* to) const {
#if defined(CPU_CAPABILITY_AVX512)
    if (!search_) {
      const auto half = [&](int o) {
        return _mm512_cvtepi64_ps(
            _mm512_abs_epi64(_mm512_sub_epi64(_mm512_loadu_si512(a + o), _mm512_loadu_si512(b + o))));
      };
      const __m512 gap = _mm512_insertf32x8(_mm512_castps256_ps512(half(0)), half(8), 1);
      const __m512i zero = _mm512_set1_epi32(kOne - (1 << shift_));
      const __m512i bits = _mm512_max_epi32(_mm512_castps_si512(gap), zero);
      const __m512i i = _mm512_srli_epi32(_mm512_sub_epi32(bits, zero), shift_);
      const __m512 next = _mm512_i32gather_ps(i, next_.data(), 4);
      const __m512i k = _mm512_i32gather_epi32(i, below_.data(), 4);
      _mm512_storeu_si512(to,
                          _mm512_mask_add_epi32(k, _mm512_cmp_ps_mask(gap, next, _CMP_GE_OQ), k, _mm512_set1_epi32(1)));
      return;
    }
#endif
    for (int k = 0; k < 16; k++) {  // unsigned: times may lie further apart than int64 reaches
      const uint64_t gap = static_cast<uint64_t>(a[k]) - static_cast<uint64_t>(b[k]);
      to[k] = of(static_cast<float>(std::max<int64_t>(static_cast<int64_t>(gap), static_cast<int64_t>(0 - gap))));
    }
  }

 private:
  static constexpr int32_t kOne = 0x3F800000;  // bits of 1.f, the smallest gap that is not 0
  std::vector<float> borders_, next_;
  std::vector<int32_t> below_;
  int shift_ = 20;
  bool search_ = false;

  static float from_bits(int64_t bits) {
    const uint32_t u = static_cast<uint32_t>(bits);
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
  // 0 for a gap of 0; 1 and more for the floats from 1 on, up to 2^64.
  int64_t place(float gap) const {
    int32_t bits;
    std::memcpy(&bits, &gap, 4);
    const int32_t zero = kOne - (1 << shift_);
    return (std::max(bits, zero) - zero) >> shift_;
  }
  bool fill() {
    const int64_t n = borders_.size(), places = (int64_t{64} << (23 - shift_)) + 1;
    below_.assign(places, 0);
    next_.assign(places, std::numeric_limits<float>::infinity());
    int64_t k = 0;
    bool alone = true;
    for (int64_t i = 0; i < places; i++) {
      const float low = i == 0 ? 0.f : from_bits(kOne + ((i - 1) << shift_)),
                  high = i == 0 ? std::numeric_limits<float>::min() : from_bits(kOne + (i << shift_));
      while (k < n && borders_[k] <= low) k++;
      below_[i] = static_cast<int32_t>(k);
      if (i > 0 && k < n && borders_[k] < high) {
        next_[i] = borders_[k];
        alone &= !(k + 1 < n && borders_[k + 1] < high);
      }
    }
    return alone;
  }
};

// The position table of one head (or of all), expanded: at(d) = table[clamp(d, 0, N - 1)] for d in [-before, after).
class PositionTable {
 public:
  PositionTable() = default;
  PositionTable(const float* table, int64_t heads, int64_t entries, int64_t before, int64_t after)
      : before_(before), size_(before + after), ascending_(heads * size_), mirrored_(heads * size_) {
    for (int64_t h = 0; h < heads; h++)
      for (int64_t x = 0; x < size_; x++) {
        const float value = table[h * entries + std::clamp<int64_t>(x - before, 0, entries - 1)];
        ascending_[h * size_ + x] = value;
        mirrored_[h * size_ + size_ - 1 - x] = value;
      }
  }
  // [k] is at(d + k)
  const float* ascending(int64_t head, int64_t d) const { return ascending_.get() + head * size_ + before_ + d; }
  // [k] is at(d - k)
  const float* descending(int64_t head, int64_t d) const {
    return mirrored_.get() + head * size_ + size_ - 1 - before_ - d;
  }

 private:
  int64_t before_ = 0, size_ = 0;
  SharedArray<float> ascending_, mirrored_;
};

// The buckets of a tile. `uniform` of a row has bit c set where the lanes from c * kRun on share a bucket, which then
// stands in the first of them only.
struct BucketTile {
  int32_t* buckets;  // [rows][kLanes]
  uint8_t* uniform;  // [rows]
};

// Of |row time - lane time|; lane times are given for all kLanes.
inline void find_buckets(const TimeBuckets& by, int64_t R, int64_t lanes, const int64_t* row_times,
                         const int64_t* lane_times, const BucketTile& tile) {
  // Along a row gaps go one way if the lanes' times do and none of the rows' times lies between them.
  int64_t low = row_times[0], high = row_times[0];
  for (int64_t r = 1; r < R; r++) low = std::min(low, row_times[r]), high = std::max(high, row_times[r]);
  bool runs = lane_times[kLanes - 1] <= low || high <= lane_times[0];
  for (int64_t c = 1; c < kLanes; c++) runs &= lane_times[c - 1] <= lane_times[c];
  alignas(64) int64_t ends[16], times[16];
  alignas(64) int32_t found[16];
  if (runs)
    for (int k = 0; k < 16; k++) ends[k] = lane_times[((k & 7) >> 1) * kRun + ((k & 1) != 0 ? kRun - 1 : 0)];
  for (int64_t r = 0; r < R; r++) {
    int32_t* to = tile.buckets + r * kLanes;
    uint8_t uniform = 0;
    if (runs && (r & 1) == 0) {  // the ends of two rows at once
      for (int k = 0; k < 16; k++) times[k] = row_times[std::min(r + (k >> 3), R - 1)];
      by.of_gaps(ends, times, found);
    }
    const int32_t* mine = found + (r & 1) * 8;
    alignas(64) int64_t own[16];
    for (int k = 0; k < 16; k++) own[k] = row_times[r];
    for (int64_t c = 0; c < lanes / kRun; c++) {
      if (runs && mine[2 * c] == mine[2 * c + 1]) {
        uniform |= 1 << c;
        to[c * kRun] = mine[2 * c];
      } else {
        by.of_gaps(lane_times + c * kRun, own, to + c * kRun);
      }
    }
    tile.uniform[r] = uniform;
  }
}

// to[r][c] = time[bucket] + position[c - r], either may be missing (null). `position` is that of row 0: in tiles of
// queries by keys it descends along the lanes, in tiles of keys by queries it ascends, and a row further is one value
// back in both.
inline void fill_bias(int64_t R, int64_t lanes, const BucketTile& tile, const float* time, const float* position,
                      float* to) {
  for (int64_t r = 0; r < R; r++) {
    float* o = to + r * kLanes;
    const float* p = position == nullptr ? nullptr : position - r;
    if (time == nullptr) {
      for (int64_t c = 0; c < lanes; c++) o[c] = p[c];
      continue;
    }
    const int32_t* b = tile.buckets + r * kLanes;
    for (int64_t c = 0; c < lanes; c += kRun) {
      if ((tile.uniform[r] >> (c / kRun) & 1) != 0) {
        const float x = time[b[c]];
        if (p != nullptr)
          for (int64_t k = 0; k < kRun; k++) o[c + k] = x + p[c + k];
        else
          for (int64_t k = 0; k < kRun; k++) o[c + k] = x;
      } else if (p != nullptr) {
        for (int64_t k = 0; k < kRun; k++) o[c + k] = time[b[c + k]] + p[c + k];
      } else {
        for (int64_t k = 0; k < kRun; k++) o[c + k] = time[b[c + k]];
      }
    }
  }
}

// Adds a tile of gradients to those of the tables. `time` is [buckets][kRun]: each lane has its own column, so lanes
// never meet; `position` is that of row 0, as in fill_bias. Either may be null.
inline void add_to_tables(int64_t R, int64_t lanes, const float* gradient, const BucketTile& tile, float* time,
                          float* position) {
  for (int64_t r = 0; r < R; r++) {
    const float* d = gradient + r * kLanes;
    if (position != nullptr) {
      float* h = position - r;
      for (int64_t c = 0; c < lanes; c += V::size()) (V::loadu(h + c) + V::loadu(d + c)).store(h + c);
    }
    if (time == nullptr) continue;
    const int32_t* b = tile.buckets + r * kLanes;
    for (int64_t c = 0; c < lanes; c += kRun) {
      if ((tile.uniform[r] >> (c / kRun) & 1) != 0) {
        float* h = time + b[c] * kRun;
        for (int64_t k = 0; k < kRun; k++) h[k] += d[c + k];
      } else {
        for (int64_t k = 0; k < kRun; k++) time[b[c + k] * kRun + k] += d[c + k];
      }
    }
  }
}

}  // namespace turbogr
