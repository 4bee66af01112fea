// Gradients of the tables of biases, from the threads' own sums to the result, in an order that nothing changes.
//
// A unit adds up its tiles in memory of its thread; its sums go to those of its stream after the blocks before it; at
// the end the streams are added up one after the other, in float64.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "bias_tiles.h"
#include "key_blocks.h"

namespace turbogr {

// One table, or none (no entries): entries per head, kept for one head where all share it.
struct TableShape {
  int64_t entries = 0;
  bool per_head = false;
};

class TableGradients {
 public:
  // `before`: how far positions reach below 0.
  TableGradients(const KeyBlocks& blocks, TableShape time, TableShape position, int64_t before)
      : blocks_(blocks),
        time_(time),
        position_(position),
        before_(before),
        span_(before + blocks.layout.longest + 2 * kLanes) {
    int64_t times = 0, positions = 0;
    for (int64_t i = 0; i < blocks.streams.size(); i++) {
      time_begin_.push_back(times);
      position_begin_.push_back(positions);
      times += heads(time_) * time_.entries;
      if (position_.entries > 0)
        positions += heads(position_) * blocks.layout.segments[blocks.streams[i].segment].length;
    }
    time_sums_ = SharedArray<float>(times);
    position_sums_ = SharedArray<float>(positions);
  }
  bool any() const { return time_.entries > 0 || position_.entries > 0; }
  bool per_head() const { return time_.per_head || position_.per_head; }

  // Floats of a thread's own sums.
  int64_t time_floats() const { return heads(time_) * time_.entries * kRun; }
  int64_t position_floats() const { return position_.entries > 0 ? heads(position_) * span_ : 0; }
  // Where a tile of the g-th head of a group adds: [entry][kRun]; and distances from d on. Null where there is no
  // table.
  float* time_of(float* own, int64_t g) const {
    return time_.entries == 0 ? nullptr : own + (time_.per_head ? g : 0) * time_.entries * kRun;
  }
  float* position_of(float* own, int64_t g, int64_t d) const {
    return position_.entries == 0 ? nullptr : own + (position_.per_head ? g : 0) * span_ + before_ + d;
  }

  // A thread's own sums at the beginning of a unit, and to its stream's at its end.
  void clear(const Stream& stream, int64_t number, float* own_time, float* own_position) const {
    std::fill_n(own_time, time_floats(), 0.f);
    if (position_.entries > 0)
      for (int64_t g = 0; g < heads(position_); g++) std::fill_n(own_position + g * span_, used(stream, number), 0.f);
  }
  void add(const Stream& stream, int64_t number, const float* own_time, const float* own_position) {
    const int64_t i = blocks_.streams.index(&stream), L = length(stream);
    blocks_.streams.wait(*stream.done, static_cast<int32_t>(number));
    for (int64_t n = 0; n < heads(time_) * time_.entries; n++) {
      float sum = 0;
      for (int64_t c = 0; c < kRun; c++) sum += own_time[n * kRun + c];
      time_sums_[time_begin_[i] + n] += sum;
    }
    for (int64_t g = 0; position_.entries > 0 && g < heads(position_); g++) {
      const float* from = own_position + g * span_ + before_;
      float* to = position_sums_.get() + position_begin_[i] + g * L;
      for (int64_t d = -before_; d < 0; d++) to[0] += from[d];  // looking ahead takes the first entry
      for (int64_t d = 0; d < std::min(L, used(stream, number) - before_); d++) to[d] += from[d];
    }
    stream.done->store(static_cast<int32_t>(number + 1), std::memory_order_release);
  }

  // The gradients times `factor`, [entries] or [H, entries] in float32; undefined where there is no table.
  at::Tensor time_total(double factor) const {
    if (time_.entries == 0) return {};
    std::vector<double> sums((time_.per_head ? blocks_.layout.H : 1) * time_.entries);
    for (int64_t i = 0; i < blocks_.streams.size(); i++)
      for (int64_t g = 0; g < kept(blocks_.streams[i], time_); g++)
        for (int64_t n = 0; n < time_.entries; n++)
          sums[row(blocks_.streams[i], time_, g) * time_.entries + n] +=
              time_sums_[time_begin_[i] + g * time_.entries + n];
    return scaled(sums, time_, factor);
  }
  at::Tensor position_total(double factor) const {
    if (position_.entries == 0) return {};
    std::vector<double> sums((position_.per_head ? blocks_.layout.H : 1) * position_.entries);
    for (int64_t i = 0; i < blocks_.streams.size(); i++) {
      const int64_t L = length(blocks_.streams[i]);
      for (int64_t g = 0; g < kept(blocks_.streams[i], position_); g++) {
        double* to = sums.data() + row(blocks_.streams[i], position_, g) * position_.entries;
        for (int64_t d = 0; d < L; d++)
          to[std::min(d, position_.entries - 1)] += position_sums_[position_begin_[i] + g * L + d];
      }
    }
    return scaled(sums, position_, factor);
  }

 private:
  const KeyBlocks& blocks_;
  TableShape time_, position_;
  int64_t before_, span_;
  std::vector<int64_t> time_begin_, position_begin_;  // of each stream's sums
  SharedArray<float> time_sums_, position_sums_;

  int64_t heads(const TableShape& table) const { return table.per_head ? blocks_.group : 1; }
  int64_t kept(const Stream& stream, const TableShape& table) const {
    return std::min(heads(table), blocks_.layout.H - stream.head);
  }
  int64_t row(const Stream& stream, const TableShape& table, int64_t g) const {
    return table.per_head ? stream.head + g : 0;
  }
  int64_t length(const Stream& stream) const { return blocks_.layout.segments[stream.segment].length; }
  // Distances of a block's keys: from -before up to the end of the segment.
  int64_t used(const Stream& stream, int64_t number) const {
    return std::min(span_, before_ + length(stream) - number * blocks_.block + 2 * kLanes);
  }
  at::Tensor scaled(const std::vector<double>& sums, const TableShape& table, double factor) const {
    at::Tensor total = table.per_head ? at::empty({blocks_.layout.H, table.entries}, at::kFloat)
                                      : at::empty({table.entries}, at::kFloat);
    float* to = total.mutable_data_ptr<float>();
    for (size_t x = 0; x < sums.size(); x++) to[x] = static_cast<float>(sums[x] * factor);
    return total;
  }
};

}  // namespace turbogr
