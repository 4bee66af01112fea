// Where the gradient of each position lies and how it is summed: in float32, in ascending order of positions.
//
// Of a sequence lookup it is a row of the block that the position is in, of a pooled one the gradient of its bag,
// divided by the bag's length for the mean and multiplied by the id's factor.
#pragma once

#include <limits>
#include <vector>

#include "jagged_lookup.h"
#include "row_sort.h"

namespace turbogr {

struct GradientBlock {
  const char* rows;
  int64_t begin, end;  // positions; of a pooled lookup all
  int64_t stride;      // bytes from row to row
  at::ScalarType type;
};

class GradientRows {
 public:
  GradientRows(const Call& call, const OutputGradient& gradient)
      : call_(call), bags_(call.bags()), pooled_(call.pooling != Pooling::sequence),
        limit_(static_cast<float>(gradient.limit.value_or(std::numeric_limits<double>::infinity()))),
        limited_(gradient.limit.has_value()), bag_of_(pooled_ ? call.count : 0),
        factors_(call.indice_weights ? call.indice_weights->const_data_ptr<float>() : nullptr) {
    for (size_t i = 0; i < gradient.blocks.size(); i++) {
      const Tensor& rows = gradient.blocks[i];
      const int64_t begin = i == 0 ? 0 : gradient.block_ends[i - 1];
      const int64_t item = static_cast<int64_t>(rows.itemsize());
      const int64_t end = pooled_ ? call.count : gradient.block_ends[i];
      blocks_.push_back({static_cast<const char*>(rows.const_data_ptr()), begin, end, rows.stride(0) * item, rows.scalar_type()});
    }
    if (pooled_) find_bags();
  }

  void prefetch(int64_t position, int64_t width) const {
    const GradientBlock& block = block_of(position);
    prefetch_bytes(row(block, position), width * static_cast<int64_t>(at::elementSize(block.type)));
  }

  // sum (+)= the gradient of a position; `buffer` has room for a row.
  void add(int64_t position, int64_t width, bool first, float* sum, float* buffer) const {
    const GradientBlock& block = block_of(position);
    const char* from = row(block, position);
    if (block.type == at::kFloat && !limited_ && !pooled_) {
      const auto* values = reinterpret_cast<const float*>(from);
      first ? convert_row(values, sum, width) : add_row(values, sum, width);
      return;
    }
    float* values = first ? sum : buffer;
    to_floats(block.type, from, values, width);
    if (limited_) clamp_in_place(values, limit_, width);
    if (call_.pooling == Pooling::mean) divide_in_place(values, bags_.divisor(bag_of_.get()[position]), width);
    if (factors_ != nullptr) scale_in_place(values, factors_[position], width);
    if (!first) add_row(values, sum, width);
  }

  // The gradient of a bag's sum, in float32.
  const float* of_bag(int64_t bag, float* buffer) const {
    const GradientBlock& block = blocks_[0];
    const int64_t width = call_.features[bag / call_.batch].width;
    to_floats(block.type, bag_row(block, bag), buffer, width);
    if (limited_) clamp_in_place(buffer, limit_, width);
    if (call_.pooling == Pooling::mean) divide_in_place(buffer, bags_.divisor(bag), width);
    return buffer;
  }

 private:
  static void to_floats(at::ScalarType type, const char* from, float* values, int64_t width) {
    by_float_type(type, [&](auto t) { convert_row(reinterpret_cast<const decltype(t)*>(from), values, width); });
  }
  const GradientBlock& block_of(int64_t position) const {
    size_t i = 0;
    while (i + 1 < blocks_.size() && position >= blocks_[i].end) i++;
    return blocks_[i];
  }
  const char* row(const GradientBlock& block, int64_t position) const {
    return pooled_ ? bag_row(block, bag_of_.get()[position]) : block.rows + (position - block.begin) * block.stride;
  }
  const char* bag_row(const GradientBlock& block, int64_t bag) const {
    const int64_t feature = bag / call_.batch, sample = bag - feature * call_.batch;
    const auto item = static_cast<int64_t>(at::elementSize(block.type));
    return block.rows + sample * block.stride + call_.features[feature].column * item;
  }
  // Only of positions that a bag claims; the others are absent and never asked for.
  void find_bags() {
    const int64_t bags = call_.batch * static_cast<int64_t>(call_.features.size());
    at::parallel_for(0, bags, 4096, [&](int64_t first, int64_t last) {
      for (int64_t bag = first; bag < last; bag++)
        std::fill(bag_of_.get() + bags_.begin(bag), bag_of_.get() + bags_.end(bag), bag);
    });
  }

  const Call& call_;
  const Bags bags_;
  const bool pooled_;
  const float limit_;
  const bool limited_;
  Scratch<int64_t> bag_of_;
  const float* factors_;
  std::vector<GradientBlock> blocks_;
};

}  // namespace turbogr
