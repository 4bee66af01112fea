// Weights of FuXi's temporal and positional channels on a tile: operands of the product with V, like the activated
// scores.
#pragma once

#include <vector>

#include "attention_call.h"

namespace turbogr::fuxi {

constexpr int64_t kDecayParameters = 3;  // amplitude, rate, power

// Times and tables of both channels. The decay's parameters stand in for the time table: 3 per head, or for all heads.
struct Channels {
  Bias bias;
  std::vector<float> decay;  // empty: the time table
  bool decay_per_head = false;

  Channels(const AttentionArguments& a, const OptionalTensor& time_decay, const Layout& layout) : bias(a, layout) {
    TORCH_CHECK_VALUE(bias.has_position, "the positional channel needs position_bias");
    TORCH_CHECK_VALUE((bias.time != nullptr) != time_decay.has_value(),
                      "the temporal channel needs either time_bias or time_decay");
    if (!time_decay) return;
    TORCH_CHECK_VALUE(bias.key_times_tensor.defined(), "time_decay needs timestamps");
    decay_per_head = time_decay->dim() == 2;
    TORCH_CHECK_VALUE(time_decay->size(-1) == kDecayParameters &&
                          (time_decay->dim() == 1 || (decay_per_head && time_decay->size(0) == layout.H)),
                      "time_decay must be [3] or [H, 3]");
    const at::Tensor parameters = time_decay->to(at::kFloat).contiguous();
    decay.assign(parameters.const_data_ptr<float>(), parameters.const_data_ptr<float>() + parameters.numel());
  }
  bool decays() const { return !decay.empty(); }
  bool time_per_head() const { return decay_per_head || bias.time_stride > 0; }
  const float* decay_of(int64_t head) const { return decay.data() + (decay_per_head ? head * kDecayParameters : 0); }
  int64_t time_entries() const { return decays() ? kDecayParameters : bias.time_entries; }
};

// |row time - lane time| as floats.
inline void find_gaps(int64_t R, int64_t lanes, const int64_t* row_times, const int64_t* lane_times, float* to) {
  for (int64_t r = 0; r < R; r++)
    for (int64_t c = 0; c < lanes; c++) {
      const uint64_t gap = static_cast<uint64_t>(row_times[r]) - static_cast<uint64_t>(lane_times[c]);
      to[r * kLanes + c] = static_cast<float>(std::max(static_cast<int64_t>(gap), static_cast<int64_t>(0 - gap)));
    }
}

// Parts of the decay at a vector of gaps. At gap 0 its weight is the amplitude, whatever the power, without a slope in
// rate and power. Gaps are whole numbers, so that the logarithm may be held at 0 from below.
struct Decay {
  V log, raised, exponential;
  Decay(V gap, float rate, float power) {
    log = at::vec::maximum(gap, V(1.f)).log();
    raised = (V(power) * log).exp() & (gap > V(0.f));
    exponential = (V(-rate) * raised).exp();
  }
};

inline void fill_decay(int64_t R, int64_t lanes, const float* gaps, const float* parameters, float* to) {
  const V amplitude(parameters[0]);
  for (int64_t r = 0; r < R; r++)
    for (int64_t c = 0; c < lanes; c += V::size())
      (amplitude * Decay(V::loadu(gaps + r * kLanes + c), parameters[1], parameters[2]).exponential)
          .store(to + r * kLanes + c);
}

// Adds a tile of gradients of the weights to those of the parameters, [3][kRun]: each lane of a run has its own column.
inline void add_to_decay(int64_t R, int64_t lanes, const float* gradient, const float* gaps, const float* parameters,
                         float* to) {
  const V minus_amplitude(-parameters[0]), rate(parameters[1]);
  for (int64_t r = 0; r < R; r++)
    for (int64_t c = 0; c < lanes; c += V::size()) {
      const V g = V::loadu(gradient + r * kLanes + c);
      const Decay decay(V::loadu(gaps + r * kLanes + c), parameters[1], parameters[2]);
      const V by_amplitude = g * decay.exponential, by_rate = by_amplitude * minus_amplitude * decay.raised;
      float* lane = to + c % kRun;
      (V::loadu(lane) + by_amplitude).store(lane);
      (V::loadu(lane + kRun) + by_rate).store(lane + kRun);
      (V::loadu(lane + 2 * kRun) + by_rate * rate * decay.log).store(lane + 2 * kRun);
    }
}

// Weights as an operand: zero where not allowed, rounded to C. mask(r) gives that of a row, called with a vector's
// first lane.
template <class C, class Mask>
void store_weights(int64_t R, int64_t lanes, const float* values, bool masked, const Mask& mask, C* to) {
  by_lanes(lanes, [&](auto count) {
    constexpr int n = decltype(count)::value;
    for (int64_t r = 0; r < R; r++) {
      V x[n];
      for (int c = 0; c < n; c++) x[c] = V::loadu(values + r * kLanes + c * V::size());
      if (masked) {
        const auto of_row = mask(r);
        for (int c = 0; c < n; c++) x[c] = x[c] & of_row(c * V::size());
      }
      store_row(to + r * kLanes, x, n);
    }
  });
}

}  // namespace turbogr::fuxi
