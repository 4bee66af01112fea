// The arguments of an attention, checked, in the form in which the kernels use them.
//
// The Python side has checked them, too; what is checked again here is what would otherwise read or write past the end.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "bias_tiles.h"
#include "packing.h"
#include "pairs.h"

namespace turbogr {

using OptionalTensor = std::optional<at::Tensor>;

struct AttentionArguments {
  at::Tensor q, k, v, offsets;
  double alpha, scale;
  bool causal;
  OptionalTensor num_targets, num_contextual;
  std::optional<int64_t> window;
  int64_t full_tail;
  OptionalTensor timestamps, query_timestamps, time_bias, time_borders, position_bias;
};

// Where the tokens are and who sees whom.
struct Layout {
  std::vector<int64_t> offsets;
  std::vector<Segment> segments;
  Mask mask;
  int64_t T, H, D, E, longest = 0;           // longest: of the segments
  mutable std::atomic<bool> spoiled{false};  // a segment of several rows has results that are not finite

  explicit Layout(const AttentionArguments& a) : T(a.q.size(0)), H(a.q.size(1)), D(a.q.size(2)), E(a.v.size(2)) {
    offsets = numbers("offsets", a.offsets, std::nullopt);
    TORCH_CHECK_VALUE(!offsets.empty() && offsets.front() == 0 && offsets.back() == T,
                      "offsets must run from 0 to the number of tokens ", T);
    for (size_t b = 1; b < offsets.size(); b++)
      TORCH_CHECK_VALUE(offsets[b] >= offsets[b - 1], "offsets must not decrease, but offsets[", b, "] = ", offsets[b]);
    segments = find_segments(offsets, kShort);
    for (const Segment& segment : segments) longest = std::max(longest, segment.length);
    TORCH_CHECK_VALUE(longest < kLongestRow, "a row may have up to ", kLongestRow - 1, " tokens, got ", longest);
    const int64_t rows = static_cast<int64_t>(offsets.size()) - 1;
    mask.causal = a.causal;
    mask.window = a.window.value_or(0);
    mask.full_tail = a.full_tail;
    TORCH_CHECK_VALUE(!a.window || mask.window >= 1, "window must be at least 1, got ", mask.window);
    TORCH_CHECK_VALUE(mask.full_tail >= 0, "full_tail must be at least 0, got ", mask.full_tail);
    // A window beyond every row is none; so sums with it stay small.
    if (mask.window > kLongestRow) mask.window = 0;
    if (a.num_targets) mask.targets = numbers("num_targets", *a.num_targets, rows);
    for (size_t b = 0; b < mask.targets.size(); b++)
      TORCH_CHECK_VALUE(mask.targets[b] >= 0 && mask.targets[b] <= offsets[b + 1] - offsets[b], "num_targets[", b,
                        "] must be from 0 to the row's length, got ", mask.targets[b]);
    if (a.num_contextual) mask.contextual = numbers("num_contextual", *a.num_contextual, rows);
    for (int64_t& c : mask.contextual) {
      TORCH_CHECK_VALUE(c >= 0, "num_contextual must be at least 0, got ", c);
      c = std::min(c, kLongestRow);
    }
  }

  void separate_rows() { segments = find_segments(offsets, 0); }

 private:
  static std::vector<int64_t> numbers(const char* name, const at::Tensor& x, std::optional<int64_t> n) {
    TORCH_CHECK_VALUE(
        x.dim() == 1 && (!n || x.size(0) == *n) && (x.scalar_type() == at::kLong || x.scalar_type() == at::kInt), name,
        " must be one int32 or int64 per row");
    const at::Tensor wide = x.to(at::kLong).contiguous();
    const int64_t* p = wide.const_data_ptr<int64_t>();
    return std::vector<int64_t>(p, p + wide.numel());
  }
};

// work(layout), and where rows that share a segment may have spoiled each other, again without sharing.
template <class Work>
auto with_rows_apart_if_spoiled(Layout& layout, const Work& work) {
  auto results = work(layout);
  if (!layout.spoiled) return results;
  layout.separate_rows();
  return work(layout);
}

// The tables and times that biases are made of; tables in float32, times in int64.
struct Bias {
  at::Tensor key_times_tensor, query_times_tensor, time_tensor;
  const int64_t* key_times = nullptr;
  const int64_t* query_times = nullptr;
  const float* time = nullptr;  // null: no time table
  int64_t time_entries = 0, time_stride = 0, position_entries = 0;
  bool has_position = false, position_per_head = false;
  int64_t before = 0;  // how far positions reach below 0
  TimeBuckets buckets;
  PositionTable position;

  Bias(const AttentionArguments& a, const Layout& layout) {
    if (a.timestamps) {
      key_times_tensor = times("timestamps", a.timestamps, layout.T);
      query_times_tensor = times("query_timestamps", a.query_timestamps, layout.T);
      key_times = key_times_tensor.const_data_ptr<int64_t>();
      query_times = query_times_tensor.const_data_ptr<int64_t>();
    }
    if (a.time_bias) {
      TORCH_CHECK_VALUE(key_times_tensor.defined() && a.time_borders, "time_bias needs timestamps and borders");
      time_tensor = table("time_bias", *a.time_bias, layout.H);
      time_entries = time_tensor.size(-1);
      const at::Tensor borders = a.time_borders->to(at::kFloat).contiguous();
      TORCH_CHECK_VALUE(borders.dim() == 1 && borders.size(0) == time_entries - 1, "there must be ", time_entries - 1,
                        " borders of time, got ", borders.sizes());
      const float* b = borders.const_data_ptr<float>();
      for (int64_t i = 1; i < borders.numel(); i++)
        TORCH_CHECK_VALUE(b[i] >= b[i - 1], "the borders of time must ascend");
      buckets = TimeBuckets(b, borders.numel());
      time = time_tensor.const_data_ptr<float>();
      time_stride = time_tensor.dim() == 2 ? time_entries : 0;
    }
    if (a.position_bias) {
      TORCH_CHECK_VALUE(layout.mask.causal, "position_bias is defined for causal attention only");
      const at::Tensor entries = table("position_bias", *a.position_bias, layout.H);
      has_position = true;
      position_per_head = entries.dim() == 2;
      position_entries = entries.size(-1);
      // Tiles at the border of what is allowed look kLanes + 16 ahead; contextual queries look ahead over their row.
      before = 2 * kLanes + (layout.mask.has_contextual() ? layout.longest : 0);
      position = PositionTable(entries.const_data_ptr<float>(), position_per_head ? layout.H : 1, position_entries,
                               before, layout.longest + 2 * kLanes);
    }
  }
  bool any() const { return time != nullptr || has_position; }
  bool per_head() const { return time_stride > 0 || position_per_head; }
  const float* time_of(int64_t head) const { return time == nullptr ? nullptr : time + head * time_stride; }
  int64_t position_head(int64_t head) const { return position_per_head ? head : 0; }

 private:
  static at::Tensor times(const char* name, const OptionalTensor& x, int64_t T) {
    TORCH_CHECK_VALUE(
        x && x->dim() == 1 && x->size(0) == T && (x->scalar_type() == at::kLong || x->scalar_type() == at::kInt), name,
        " must be int32 or int64 of shape [", T, "]");
    return x->to(at::kLong).contiguous();
  }
  static at::Tensor table(const char* name, const at::Tensor& x, int64_t H) {
    TORCH_CHECK_VALUE((x.dim() == 1 || (x.dim() == 2 && x.size(0) == H)) && x.size(-1) > 0, name, " must be [N] or [",
                      H, ", N]");
    return x.to(at::kFloat).contiguous();
  }
};

// An input whose rows can be read as they lie: its last dimension is contiguous.
inline at::Tensor readable(const at::Tensor& x) { return x.stride(2) == 1 || x.numel() == 0 ? x : x.contiguous(); }

template <class T>
Operand<const T> operand(const at::Tensor& x) {
  return {x.const_data_ptr<T>(), x.stride(0), x.stride(1)};
}

inline void check_operands(const AttentionArguments& a, const OptionalTensor& grad) {
  const auto type = a.q.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                    "q must be float32, bfloat16 or float16, got ", type);
  TORCH_CHECK_VALUE(a.q.dim() == 3 && a.k.sizes() == a.q.sizes() && a.v.dim() == 3 && a.v.size(0) == a.q.size(0) &&
                        a.v.size(1) == a.q.size(1),
                    "q and k must be [T, H, D], v [T, H, E]");
  TORCH_CHECK_VALUE(a.q.size(1) > 0 && a.q.size(2) > 0 && a.v.size(2) > 0, "heads and dims must be at least 1");
  TORCH_CHECK_VALUE(a.k.scalar_type() == type && a.v.scalar_type() == type && (!grad || grad->scalar_type() == type),
                    "q, k, v and the gradient must be of one type");
  for (const at::Tensor* x : {&a.q, &a.k, &a.v}) TORCH_CHECK_VALUE(x->device().is_cpu(), "tensors must be on the CPU");
}

// How the work is cut. Blocks of 256 rows: 64 costs 10 to 15 %, 512 gains 1 to 3 % but leaves no room in the L2 cache
// at 128 dims. One bias tile serves a group of heads: 8 heads against 1 is 1.25 (float32) to 1.5 times (bf16) as fast
// in the backward; without biases there is nothing to share. Wide heads are fewer at a time, so that a group's blocks
// stay cached.
constexpr int64_t kBlock = 256;
constexpr int64_t kGroupedHeads = 8;
constexpr int64_t kGroupedDims = kGroupedHeads * 5 * 64;

inline int64_t heads_at_once(const Layout& layout, bool shares_tiles) {
  const int64_t fit = std::max<int64_t>(1, kGroupedDims / (3 * layout.D + 2 * layout.E));
  return std::min({layout.H, fit, shares_tiles ? kGroupedHeads : int64_t{2}});
}

}  // namespace turbogr
