// residual + y W^T + b, forward and backward, in the tiles of projection.h.

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <vector>

#include "projection.h"

namespace turbogr {
namespace {

using at::Tensor;

// Tensors are float32; those of rows may have any stride between them.
struct Rows {
  const float* data;
  int64_t stride, width;
  explicit Rows(const Tensor& x) : data(x.const_data_ptr<float>()), stride(x.stride(0)), width(x.size(1)) {}
  void copy(int64_t first, int64_t count, float* to) const {
    for (int64_t r = 0; r < count; r++) convert_row(data + (first + r) * stride, to + r * width, width);
  }
};

class ForwardWorker {
 public:
  ForwardWorker(const std::vector<ColumnTile>& tiles, const Rows& y, const Rows& residual, const float* bias, float* out)
      : tiles_(tiles), y_(y), residual_(residual), bias_(bias), out_(out) {}
  void rows(int64_t first, int64_t count, float* a) { y_.copy(first, count, a); }
  void expect(int64_t t, int64_t first, int64_t count) {
    const int64_t column = tiles_[t].column;
    prefetch_rows<false>(residual_.data + first * residual_.stride + column, residual_.stride, count, tiles_[t].count);
    prefetch_rows<true>(out_ + first * residual_.width + column, residual_.width, count, tiles_[t].count);
  }
  void store(int64_t t, int64_t first, int64_t count, const float* products) {
    const int64_t column = tiles_[t].column, n = tiles_[t].count;
    for (int64_t r = 0; r < count; r++, products += kTileColumns) {
      const float* residual = residual_.data + (first + r) * residual_.stride + column;
      float* out = out_ + (first + r) * residual_.width + column;
#pragma omp simd
      for (int64_t c = 0; c < n; c++) out[c] = products[c] + bias_[column + c] + residual[c];
    }
  }

 private:
  const std::vector<ColumnTile>& tiles_;
  Rows y_, residual_;
  const float* bias_;
  float* out_;
};

class BackwardWorker {
 public:
  BackwardWorker(const std::vector<ColumnTile>& tiles, const Rows& grad, const Rows& y, float* dy) : tiles_(tiles), grad_(grad), y_(y), dy_(dy) {}
  void rows(int64_t first, int64_t count, float* a) { y_.copy(first, count, a); }
  void expect(int64_t t, int64_t first, int64_t count) {
    prefetch_rows<false>(grad_.data + first * grad_.stride + tiles_[t].column, grad_.stride, count, tiles_[t].count);
  }
  void gradient(int64_t t, int64_t first, int64_t count, const float*, float* dout) {
    const int64_t n = tiles_[t].count;
    for (int64_t r = 0; r < count; r++, dout += kTileColumns) {
      convert_row(grad_.data + (first + r) * grad_.stride + tiles_[t].column, dout, n);
      std::fill(dout + n, dout + kTileColumns, 0.f);
    }
  }
  void inputs(int64_t first, int64_t count, const float* da) { std::copy_n(da, count * y_.width, dy_ + first * y_.width); }

 private:
  const std::vector<ColumnTile>& tiles_;
  Rows grad_, y_;
  float* dy_;
};

Tensor forward(const Tensor& y, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& residual) {
  const int64_t tokens = y.size(0), in = y.size(1), out = weight.size(0);
  Tensor result = result_tensor({tokens, out}, y.options());
  std::vector<float> b(out);
  if (bias) std::copy_n(bias->const_data_ptr<float>(), out, b.data());
  const auto tiles = column_tiles({out});
  const TransposedWeight transposed(tiles, weight.const_data_ptr<float>(), in);
  auto made = workers([&] { return std::make_unique<ForwardWorker>(tiles, Rows(y), Rows(residual), b.data(), result.mutable_data_ptr<float>()); });
  project(tiles, transposed, tokens, in, made);
  return result;
}

// Gradients of y, weight and bias (empty without one).
std::vector<Tensor> backward(const Tensor& grad, const Tensor& y, const Tensor& weight, bool with_bias) {
  const int64_t tokens = y.size(0), in = y.size(1), out = weight.size(0);
  Tensor dy = result_tensor({tokens, in}, y.options()), dweight = at::empty({out, in}, y.options());
  Tensor dbias = at::empty({with_bias ? out : 0}, y.options());
  if (tokens == 0) return {dy, dweight.zero_(), dbias.zero_()};
  const auto tiles = column_tiles({out});
  auto made = workers([&] { return std::make_unique<BackwardWorker>(tiles, Rows(grad), Rows(y), dy.mutable_data_ptr<float>()); });
  project_backward(tiles, weight.const_data_ptr<float>(), tokens, in, made, {dweight.mutable_data_ptr<float>(), with_bias ? dbias.mutable_data_ptr<float>() : nullptr});
  return {dy, dweight, dbias};
}

}  // namespace
}  // namespace turbogr

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("forward", &turbogr::forward, py::call_guard<py::gil_scoped_release>());
  module.def("backward", &turbogr::backward, py::call_guard<py::gil_scoped_release>());
  module.def("memory", [] { return turbogr::ReusedMemory::get().bytes(); });
}
