// The update of one row by a fused optimizer: kernels/fused_optimizers.py, operation by operation in the same order.
//
// Rows in fp16 and bf16 are updated in float32 and rounded once, to nearest or stochastically by keyed draws
// (kernels/lookup_call.py, StochasticRounding). Left out: max_norm, Adam's counters by row, LAMB and LARS.
#pragma once

#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "philox.h"
#include "table_rows.h"

namespace turbogr {

enum class Rule { sgd, adagrad, rowwise_adagrad, adam };

inline Rule rule_of(const std::string& name) {
  if (name == "sgd") return Rule::sgd;
  if (name == "adagrad") return Rule::adagrad;
  if (name == "rowwise_adagrad") return Rule::rowwise_adagrad;
  TORCH_CHECK(name == "adam", "no update in C++ for the optimizer ", name);
  return Rule::adam;
}

constexpr int64_t kL2 = 1, kDecoupled = 2, kDecoupledGlobal = 5;  // fbgemm's WeightDecayMode

// Settings of kernels/fused_optimizers.py. What is computed from them alone is computed in double, as in Python.
struct Optimizer {
  Rule rule;
  float rate, eps, beta1, beta2, rest1, rest2, correction1, correction2, decay;
  bool l2 = false, decoupled = false;
  float shrink = 1;  // 1 - rate * decay
  bool stochastic = false;
  uint32_t seed = 0, step = 0;

  Optimizer(const std::string& name, double learning_rate, double eps_, double beta1_, double beta2_,
            double weight_decay, int64_t weight_decay_mode, int64_t iteration)
      : rule(rule_of(name)), rate(learning_rate), eps(eps_), beta1(beta1_), beta2(beta2_), rest1(1.0 - beta1_),
        rest2(1.0 - beta2_), correction1(1.0 - std::pow(beta1_, static_cast<double>(iteration))),
        correction2(1.0 - std::pow(beta2_, static_cast<double>(iteration))), decay(weight_decay),
        l2(weight_decay_mode == kL2), decoupled(weight_decay_mode == kDecoupled || weight_decay_mode == kDecoupledGlobal),
        shrink(1.0 - learning_rate * weight_decay) {}

  int states() const { return rule == Rule::sgd ? 0 : rule == Rule::adam ? 2 : 1; }
  bool state_by_row(int) const { return rule == Rule::rowwise_adagrad; }
};

// weight, gradient and states [n] (a state by row: one value), in float32.
inline void update_sgd(const Optimizer& o, float* weight, const float* gradient, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) weight[i] -= o.rate * gradient[i];
}

inline void update_adagrad(const Optimizer& o, float* weight, const float* gradient, float* total, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    const float sum = total[i] + gradient[i] * gradient[i];
    total[i] = sum;
    weight[i] -= o.rate * gradient[i] / (std::sqrt(sum) + o.eps);
  }
}

inline void update_rowwise_adagrad(const Optimizer& o, float* weight, const float* gradient, float* total, int64_t n) {
  const float squares = o.l2 ? sum_of(n, [&](int64_t i) {
    const float decayed = gradient[i] + o.decay * weight[i];
    return decayed * decayed;
  }) : sum_of(n, [&](int64_t i) { return gradient[i] * gradient[i]; });
  *total += squares / static_cast<float>(n);
  const float rate = 1.f / (std::sqrt(*total) + o.eps) * o.rate;
  const bool shrinks = o.l2 || o.decoupled;
  const float shrink = o.l2 ? 1.f - rate * o.decay : o.shrink;
  if (shrinks) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) weight[i] = shrink * weight[i] - rate * gradient[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) weight[i] -= rate * gradient[i];
  }
}

inline void update_adam(const Optimizer& o, float* weight, const float* gradient, float* first, float* second, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    const float m = o.beta1 * first[i] + o.rest1 * gradient[i];
    const float v = o.beta2 * second[i] + o.rest2 * (gradient[i] * gradient[i]);
    first[i] = m, second[i] = v;
    const float step = m / o.correction1 / (std::sqrt(v / o.correction2) + o.eps) + o.decay * weight[i];
    weight[i] -= o.rate * step;
  }
}

// The draws of a row of the tables: Purpose.ROUNDING of kernels/keyed_random.py, lane 0.
inline PhiloxRow rounding_draws(const Optimizer& o, int64_t row) {
  constexpr uint32_t purpose = 4;
  return {0, static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32) | purpose << 24, o.seed, o.step};
}

// Adds a draw to the bits below those that the type keeps, and cuts them off.
template <class T>
inline void round_stochastically(const Optimizer& o, int64_t row, float* values, uint32_t* words, int64_t n) {
  constexpr uint32_t kExponent = 0x7F800000;
  constexpr uint32_t dropped = (1u << (std::is_same_v<T, Half> ? 13 : 16)) - 1;
  philox_words(0, (n + 3) / 4, rounding_draws(o, row), words);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    const uint32_t rounded = (bits + (words[i] & dropped)) & ~dropped;
    bits = (bits & kExponent) == kExponent ? bits : rounded;  // a draw would carry some NaN (0x7FFFFFFF) over to -0
    std::memcpy(values + i, &bits, 4);
  }
}

// Buffers of one thread for rows of up to `width` values.
struct UpdateBuffers {
  std::vector<float> weight;
  std::vector<uint32_t> words;
  explicit UpdateBuffers(int64_t width)
      : weight(width), words((width + 4 * kPhiloxGroup - 1) / (4 * kPhiloxGroup) * 4 * kPhiloxGroup) {}
};

// One row in place. `row` is its number for the draws.
template <class T>
void update_row(const Optimizer& o, T* weight, float* const* states, const float* gradient, int64_t n, int64_t row,
                UpdateBuffers& buffers) {
  float* values;
  if constexpr (std::is_same_v<T, float>) {
    values = weight;
  } else {
    values = buffers.weight.data();
    convert_row(weight, values, n);
  }
  switch (o.rule) {
    case Rule::sgd: update_sgd(o, values, gradient, n); break;
    case Rule::adagrad: update_adagrad(o, values, gradient, states[0], n); break;
    case Rule::rowwise_adagrad: update_rowwise_adagrad(o, values, gradient, states[0], n); break;
    case Rule::adam: update_adam(o, values, gradient, states[0], states[1], n); break;
  }
  if constexpr (!std::is_same_v<T, float>) {
    if (o.stochastic) round_stochastically<T>(o, row, values, buffers.words.data(), n);
    round_row(values, weight, n);
  }
}

}  // namespace turbogr
