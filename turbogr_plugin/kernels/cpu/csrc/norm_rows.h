// LayerNorm, RMSNorm and group norm of one row of floats, forward and backward.
//
// Loops are plain and marked for the compiler's vectoriser: a row is in the first-level cache, what costs is to get it
// there. Sums are taken in an order that depends on the row's length and the vectors of the build alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

namespace turbogr {

struct Norm {
  bool centred;  // whether the mean is taken off: RMSNorm does not
  int64_t width, groups;
  float eps;
};

// A row as floats: itself, or converted into `buffer`.
inline const float* as_floats(const float* row, float*, int64_t) { return row; }
template <class T>
inline const float* as_floats(const T* row, float* buffer, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; i++) buffer[i] = static_cast<float>(row[i]);
  return buffer;
}

// weight or bias, a float32 tensor; `missing` everywhere where there is none.
inline std::vector<float> parameter(const std::optional<at::Tensor>& given, int64_t width, float missing) {
  if (!given) return std::vector<float>(width, missing);
  const float* values = given->const_data_ptr<float>();
  return std::vector<float>(values, values + width);
}

inline float sum_of(const float* x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += x[i];
  return sum;
}

// y = (x - mean) * reciprocal; y may be x. Returns the reciprocal of each group in `reciprocals`.
inline void normalise_row(const Norm& norm, const float* x, float* y, float* reciprocals) {
  const int64_t size = norm.width / norm.groups;
  for (int64_t group = 0; group < norm.groups; group++, x += size, y += size) {
    const float mean = norm.centred ? sum_of(x, size) / static_cast<float>(size) : 0.f;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float reciprocal = 1.f / std::sqrt(squares / static_cast<float>(size) + norm.eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) y[i] = (x[i] - mean) * reciprocal;
    reciprocals[group] = reciprocal;
  }
}

// dx from the gradient of y (weight already applied) and y as normalise_row left them.
template <class T>
inline void normalise_row_backward(const Norm& norm, const float* dy, const float* y, const float* reciprocals, T* dx) {
  const int64_t size = norm.width / norm.groups;
  for (int64_t group = 0; group < norm.groups; group++, dy += size, y += size, dx += size) {
    float sum = 0, along = 0;
#pragma omp simd reduction(+ : sum, along)
    for (int64_t i = 0; i < size; i++) sum += dy[i], along += dy[i] * y[i];
    const float mean = norm.centred ? sum / static_cast<float>(size) : 0.f;
    along /= static_cast<float>(size);
    const float reciprocal = reciprocals[group];
#pragma omp simd
    for (int64_t i = 0; i < size; i++) dx[i] = static_cast<T>((dy[i] - mean - y[i] * along) * reciprocal);
  }
}

}  // namespace turbogr
