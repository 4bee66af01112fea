// What a lookup reads: where the table of each feature lies, which positions are its ids, which bag a position is in.
//
// Ids are grouped by feature, bags by feature and then by row of the batch. A position before the first or behind the
// last bag, and an id that its table does not have, are absent. Offsets are held to the positions that there are, so
// that no offsets, however wrong, lead outside of the tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "table_rows.h"

namespace turbogr {

using at::Tensor;

enum class Pooling : int64_t { sum = 0, mean = 1, sequence = 2 };  // fbgemm's PoolingMode

struct Feature {
  int64_t begin;      // element of the flat buffer where its table begins
  int64_t width;      // D
  int64_t height;     // rows of its table
  int64_t first_row;  // rows of all tables before it
  int64_t column;     // of the pooled output
};

// Bags and their positions, held to those that there are.
struct Bags {
  const int64_t* offsets;
  int64_t count;
  int64_t begin(int64_t bag) const { return std::clamp<int64_t>(offsets[bag], 0, count); }
  int64_t end(int64_t bag) const { return std::clamp<int64_t>(offsets[bag + 1], begin(bag), count); }
  // What the mean of a bag divides by: its length, absent ids included, at least 1.
  float divisor(int64_t bag) const { return static_cast<float>(std::max<int64_t>(offsets[bag + 1] - offsets[bag], 1)); }
};

// Lookup of kernels/lookup_call.py.
struct Call {
  Tensor weights;
  Tensor indices, offsets;               // int64
  std::optional<Tensor> indice_weights;  // float32
  Pooling pooling;
  int64_t count = 0, batch = 0, rows = 0, total_d = 0, max_d = 0;
  std::vector<Feature> features;
  std::vector<int64_t> ends;  // [F + 1]: positions of feature f are in [ends[f], ends[f + 1])

  Call(const Tensor& weights_, const Tensor& begin, const Tensor& d_offsets, const Tensor& first_row, int64_t total_d_,
       int64_t max_d_, const Tensor& indices_, const Tensor& offsets_, int64_t pooling_,
       const std::optional<Tensor>& indice_weights_)
      : weights(weights_), indices(indices_.to(at::kLong)), offsets(offsets_.to(at::kLong)), indice_weights(indice_weights_),
        pooling(static_cast<Pooling>(pooling_)), count(indices_.numel()), total_d(total_d_), max_d(max_d_) {
    const int64_t f = d_offsets.numel() - 1;
    const std::vector<int64_t> d = numbers(d_offsets), r = numbers(first_row), b = numbers(begin);
    rows = r[f];
    std::vector<int64_t> sorted(r);
    std::sort(sorted.begin(), sorted.end());
    for (int64_t i = 0; i < f; i++) {
      // A table ends where the next greater one begins.
      const auto next = std::upper_bound(sorted.begin(), sorted.end(), r[i]);
      const int64_t width = d[i + 1] - d[i], height = next == sorted.end() ? 0 : *next - r[i];
      const bool inside = height == 0 || (b[i] >= 0 && b[i] + height * width <= weights.numel());
      TORCH_CHECK_VALUE(inside, "weights has ", weights.numel(), " elements, the table of feature ", i, " ends at ", b[i] + height * width);
      features.push_back({b[i], width, height, r[i], d[i]});
    }
    batch = f == 0 ? 0 : (offsets.numel() - 1) / f;
    const int64_t* at = offsets.const_data_ptr<int64_t>();
    for (int64_t i = 0, last = 0; i <= f; i++) ends.push_back(last = std::clamp<int64_t>(at[i * batch], last, count));
    if (batch == 0) std::fill(ends.begin(), ends.end(), 0);
  }

  static std::vector<int64_t> numbers(const Tensor& values) {
    const Tensor wide = values.to(at::kLong).contiguous();
    return {wide.const_data_ptr<int64_t>(), wide.const_data_ptr<int64_t>() + wide.numel()};
  }

  const int64_t* ids() const { return indices.const_data_ptr<int64_t>(); }
  Bags bags() const { return {offsets.const_data_ptr<int64_t>(), count}; }

  // body(feature, begin, end) for the positions in [begin, end) of each feature, and (-1, ...) for those of none.
  template <class F>
  void by_feature(int64_t begin, int64_t end, F&& body) const {
    const int64_t n = static_cast<int64_t>(features.size());
    int64_t f = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin() - 1;
    while (begin < end) {
      const int64_t next = std::min(end, f + 1 <= n ? ends[f + 1] : end);
      if (next > begin) body(f == n ? -1 : f, begin, next);
      begin = std::max(begin, next);
      f++;
    }
  }
};

inline bool has_row(const Feature& feature, int64_t id) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(feature.height);
}

}  // namespace turbogr
