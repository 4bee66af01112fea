// out = keep * (norm(x) * weight + bias) * gate / (1 - p), forward and backward, one pass over the rows each.
//
// Everything of a row happens while it is in the first-level cache: statistics, the random words of its dropout
// (philox.h), products, and in backward all gradients. Nothing is kept between forward and backward but the inputs.
// Gradients of weight and bias are summed over blocks of rows that depend on T alone, then over the blocks in order, so
// that they are the same bits for any number of threads.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <vector>

#include "reused_memory.h"
#include "norm_rows.h"
#include "ordered_sums.h"
#include "philox.h"

namespace turbogr {
namespace {

using at::Tensor;

struct Dropout {
  const int64_t* samples = nullptr;  // null: nothing is dropped
  const int64_t* positions = nullptr;
  uint32_t seed = 0, step = 0, layer = 0;
  uint32_t last_dropped = 0;  // the largest word that drops its element
  float factor = 1;
};

// As Python hands them over: samples and positions are int64 and contiguous, threshold is in [0, 2^32].
Dropout dropout_of(const std::optional<Tensor>& samples, const std::optional<Tensor>& positions, int64_t seed,
                   int64_t step, int64_t layer, int64_t threshold, double factor) {
  Dropout result;
  result.factor = static_cast<float>(factor);
  if (!samples || threshold == 0) return result;
  result.samples = samples->const_data_ptr<int64_t>(), result.positions = positions->const_data_ptr<int64_t>();
  result.seed = static_cast<uint32_t>(seed), result.step = static_cast<uint32_t>(step);
  result.layer = static_cast<uint32_t>(layer), result.last_dropped = static_cast<uint32_t>(threshold - 1);
  return result;
}

// out = values * factor where the word of the element keeps it, else 0 (also where the value is not finite).
template <class T>
void drop_row(const Dropout& dropout, int64_t row, const float* values, uint32_t* words, T* out, int64_t width) {
  const float factor = dropout.factor;
  if (!dropout.samples) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = static_cast<T>(values[i] * factor);
    return;
  }
  const int64_t blocks = (width + 3) / 4;
  philox_words(static_cast<uint32_t>(dropout.positions[row] * blocks), blocks,
               philox_row(dropout.samples[row], dropout.layer, dropout.seed, dropout.step), words);
  const uint32_t last = dropout.last_dropped;
#pragma omp simd
  for (int64_t i = 0; i < width; i++) out[i] = static_cast<T>(words[i] > last ? values[i] * factor : 0.f);
}

// What the row of a thread needs beside its operands.
struct RowBuffers {
  std::vector<float> x, gate, grad, y, products, reciprocals;
  std::vector<uint32_t> words;
  explicit RowBuffers(const Norm& norm)
      : x(norm.width), gate(norm.width), grad(norm.width), y(norm.width), products(norm.width),
        reciprocals(norm.groups), words((norm.width + 4 * kPhiloxGroup - 1) / (4 * kPhiloxGroup) * 4 * kPhiloxGroup) {}
};

template <class T>
void forward_rows(const Tensor& x, const Tensor& gate, const std::vector<float>& weight, const std::vector<float>& bias,
                  const Norm& norm, const Dropout& dropout, Tensor& out) {
  const T *xs = x.const_data_ptr<T>(), *gates = gate.const_data_ptr<T>();
  T* outs = out.mutable_data_ptr<T>();
  const int64_t width = norm.width, x_stride = x.stride(0), gate_stride = gate.stride(0);
  const float *w = weight.data(), *b = bias.data();
  at::parallel_for(0, x.size(0), 32, [&](int64_t begin, int64_t end) {
    RowBuffers buffers(norm);
    float *y = buffers.y.data(), *products = buffers.products.data();
    for (int64_t row = begin; row < end; row++) {
      normalise_row(norm, as_floats(xs + row * x_stride, buffers.x.data(), width), y, buffers.reciprocals.data());
      const float* g = as_floats(gates + row * gate_stride, buffers.gate.data(), width);
#pragma omp simd
      for (int64_t i = 0; i < width; i++) products[i] = (y[i] * w[i] + b[i]) * g[i];
      drop_row(dropout, row, products, buffers.words.data(), outs + row * width, width);
    }
  });
}

// Rows per block of the sums over rows: few enough blocks that their partial sums stay small, whatever T is.
int64_t rows_per_block(int64_t rows) { return std::max<int64_t>(32, (rows + 511) / 512); }

template <class T>
void backward_rows(const Tensor& grad, const Tensor& x, const Tensor& gate, const std::vector<float>& weight,
                   const std::vector<float>& bias, const Norm& norm, const Dropout& dropout, Tensor& dx, Tensor& dgate,
                   Tensor& partial) {
  const T *grads = grad.const_data_ptr<T>(), *xs = x.const_data_ptr<T>(), *gates = gate.const_data_ptr<T>();
  T *dxs = dx.mutable_data_ptr<T>(), *dgates = dgate.mutable_data_ptr<T>();
  float* partials = partial.mutable_data_ptr<float>();
  const int64_t rows = x.size(0), width = norm.width, block_rows = rows_per_block(rows);
  const int64_t x_stride = x.stride(0), gate_stride = gate.stride(0), grad_stride = grad.stride(0);
  const float *w = weight.data(), *b = bias.data();
  at::parallel_for(0, partial.size(0), 1, [&](int64_t begin, int64_t end) {
    RowBuffers buffers(norm);
    std::vector<float> dy_buffer(width);
    float *y = buffers.y.data(), *kept = buffers.products.data(), *dy = dy_buffer.data();
    for (int64_t block = begin; block < end; block++) {
      float *dweight = partials + block * 2 * width, *dbias = dweight + width;
      std::fill(dweight, dweight + 2 * width, 0.f);
      for (int64_t row = block * block_rows; row < std::min(rows, (block + 1) * block_rows); row++) {
        normalise_row(norm, as_floats(xs + row * x_stride, buffers.x.data(), width), y, buffers.reciprocals.data());
        const float* g = as_floats(gates + row * gate_stride, buffers.gate.data(), width);
        drop_row(dropout, row, as_floats(grads + row * grad_stride, buffers.grad.data(), width), buffers.words.data(),
                 kept, width);
        T* dgate_row = dgates + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
          const float d = kept[i] * g[i];
          dgate_row[i] = static_cast<T>(kept[i] * (y[i] * w[i] + b[i]));
          dweight[i] += d * y[i], dbias[i] += d;
          dy[i] = d * w[i];
        }
        normalise_row_backward(norm, dy, y, buffers.reciprocals.data(), dxs + row * width);
      }
    }
  });
}

template <class F>
void by_type(const Tensor& x, F&& f) {
  switch (x.scalar_type()) {
    case at::kFloat: f(float()); break;
    case at::kBFloat16: f(c10::BFloat16()); break;
    case at::kHalf: f(c10::Half()); break;
    default: TORCH_CHECK(false, "gated_norm serves float32, bfloat16 and float16, got ", x.scalar_type());
  }
}

Tensor forward(const Tensor& x, const Tensor& gate, const std::optional<Tensor>& weight,
               const std::optional<Tensor>& bias, bool centred, int64_t groups, double eps,
               const std::optional<Tensor>& samples, const std::optional<Tensor>& positions, int64_t seed, int64_t step,
               int64_t layer, int64_t threshold, double factor) {
  const Norm norm{centred, x.size(1), groups, static_cast<float>(eps)};
  const auto dropout = dropout_of(samples, positions, seed, step, layer, threshold, factor);
  Tensor out = result_tensor(x.sizes(), x.options());
  const auto w = parameter(weight, norm.width, 1.f), b = parameter(bias, norm.width, 0.f);
  by_type(x, [&](auto type) { forward_rows<decltype(type)>(x, gate, w, b, norm, dropout, out); });
  return out;
}

// Gradients of x, gate, and [2, W] float32: those of weight and bias.
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& gate,
                                            const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                            bool centred, int64_t groups, double eps,
                                            const std::optional<Tensor>& samples,
                                            const std::optional<Tensor>& positions, int64_t seed, int64_t step,
                                            int64_t layer, int64_t threshold, double factor) {
  const Norm norm{centred, x.size(1), groups, static_cast<float>(eps)};
  const auto dropout = dropout_of(samples, positions, seed, step, layer, threshold, factor);
  Tensor dx = result_tensor(x.sizes(), x.options()), dgate = result_tensor(x.sizes(), x.options());
  const int64_t block_rows = rows_per_block(x.size(0)), blocks = (x.size(0) + block_rows - 1) / block_rows;
  Tensor partial = at::empty({blocks, 2 * norm.width}, x.options().dtype(at::kFloat));
  const auto w = parameter(weight, norm.width, 1.f), b = parameter(bias, norm.width, 0.f);
  by_type(x, [&](auto type) {
    backward_rows<decltype(type)>(grad, x, gate, w, b, norm, dropout, dx, dgate, partial);
  });
  Tensor sums = at::empty({2, norm.width}, partial.options());
  add_blocks(partial.const_data_ptr<float>(), blocks, 2 * norm.width, sums.mutable_data_ptr<float>());
  return {dx, dgate, sums};
}

}  // namespace
}  // namespace turbogr

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("forward", &turbogr::forward, py::call_guard<py::gil_scoped_release>());
  module.def("backward", &turbogr::backward, py::call_guard<py::gil_scoped_release>());
  module.def("memory", [] { return turbogr::ReusedMemory::get().bytes(); });
}
