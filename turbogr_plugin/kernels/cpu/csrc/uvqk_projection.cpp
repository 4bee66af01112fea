// u, v, q, k = split(SiLU(norm(x) W^T + b)), forward and backward.
//
// The tiles of projection.h with the norm before and the activation after: rows are normalised as they become an operand,
// products are activated as they leave the cache. Backward reads the slope of the activation that forward kept, which
// spares it the exponentials, or, to save that memory, multiplies again.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <vector>

#include "norm_rows.h"
#include "projection.h"

namespace turbogr {
namespace {

using at::Tensor;

// What both directions know of a call. Tensors are float32 and contiguous but for the rows of x, whose elements are.
struct Call {
  const float *x, *weight, *slopes;  // slopes: what was kept, or null
  int64_t x_stride, tokens, out;
  Norm norm;
  std::vector<int64_t> widths;
  std::vector<ColumnTile> tiles;
  std::vector<float> norm_weight, norm_bias, bias;  // bias by tile, kTileColumns each

  Call(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, const std::optional<Tensor>& nw, const std::optional<Tensor>& nb, const std::vector<int64_t>& widths, bool centred, double eps)
      : x(x.const_data_ptr<float>()), weight(w.const_data_ptr<float>()), slopes(nullptr), x_stride(x.stride(0)), tokens(x.size(0)), out(w.size(0)),
        norm{centred, x.size(1), 1, static_cast<float>(eps)}, widths(widths), tiles(column_tiles(widths)),
        norm_weight(parameter(nw, x.size(1), 1.f)), norm_bias(parameter(nb, x.size(1), 0.f)), bias(tiles.size() * kTileColumns) {
    for (size_t t = 0; b && t < tiles.size(); t++)
      std::copy_n(b->const_data_ptr<float>() + tiles[t].column, tiles[t].count, &bias[t * kTileColumns]);
  }
  int64_t in() const { return norm.width; }
  // Where the slopes of a tile are kept: tile by tile, each [T, its count], so that a tile is one piece of memory.
  int64_t kept_at(int64_t t, int64_t token) const { return tiles[t].column * tokens + token * tiles[t].count; }
  // Rows of norm(x), before and after weight and bias; y may be a.
  void normalise(int64_t first, int64_t count, float* y, float* a, float* reciprocals) const {
    const float *w = norm_weight.data(), *b = norm_bias.data();
    for (int64_t r = 0; r < count; r++, y += in(), a += in()) {
      normalise_row(norm, x + (first + r) * x_stride, y, reciprocals + r);
#pragma omp simd
      for (int64_t i = 0; i < in(); i++) a[i] = y[i] * w[i] + b[i];
    }
  }
};

// f(column, number of floats) for the vectors of a tile's columns; the last may have fewer floats than a vector
template <class F>
void by_vectors(int64_t count, F&& f) {
  int64_t c = 0;
  for (; c + V::size() <= count; c += V::size()) f(c, V::size());
  if (c < count) f(c, count - c);
}

// SiLU(p), and its slope s (1 + p (1 - s)) with s = sigmoid(p)
inline V activated(V p, V s) { return p * s; }
inline V slope(V p, V s) { return s * at::vec::fmadd(p, V(1.f) - s, V(1.f)); }

class ForwardWorker {
 public:
  ForwardWorker(const Call& call, const std::vector<float*>& parts, float* slopes) : call_(call), parts_(parts), slopes_(slopes) {}
  void rows(int64_t first, int64_t count, float* a) { call_.normalise(first, count, a, a, reciprocals_); }
  void expect(int64_t t, int64_t first, int64_t count) {
    const ColumnTile& tile = call_.tiles[t];
    const int64_t width = call_.widths[tile.part];
    prefetch_rows<true>(parts_[tile.part] + first * width + tile.first, width, count, tile.count);
    if (slopes_ != nullptr) prefetch_rows<true>(slopes_ + call_.kept_at(t, first), tile.count, count, tile.count);
  }
  void store(int64_t t, int64_t first, int64_t count, const float* y) {
    const ColumnTile& tile = call_.tiles[t];
    const float* bias = &call_.bias[t * kTileColumns];
    const int64_t width = call_.widths[tile.part];
    for (int64_t r = 0; r < count; r++) {
      float* out = parts_[tile.part] + (first + r) * width + tile.first;
      float* kept = slopes_ == nullptr ? nullptr : slopes_ + call_.kept_at(t, first + r);
      by_vectors(tile.count, [&](int64_t c, int64_t n) {
        const V p = V::loadu(y + r * kTileColumns + c) + V::loadu(bias + c);
        const V s = sigmoid<false>(p);
        if (kept != nullptr) slope(p, s).store(kept + c, n);
        activated(p, s).store(out + c, n);
      });
    }
  }

 private:
  const Call& call_;
  std::vector<float*> parts_;
  float* slopes_;
  float reciprocals_[kTileTokens];
};

class BackwardWorker {
 public:
  // `weight` is there where the products are to be computed again. `sums` [token tiles, 2, in]: of weight and bias of the norm.
  BackwardWorker(const Call& call, const std::vector<const float*>& grads, const TransposedWeight* weight, float* dx, float* sums)
      : call_(call), grads_(grads), weight_(weight), dx_(dx), sums_(sums), workspace_(call.in()) {}
  void rows(int64_t first, int64_t count, float* a) { call_.normalise(first, count, (*workspace_).y, a, reciprocals_); }

  void expect(int64_t t, int64_t first, int64_t count) {
    const ColumnTile& tile = call_.tiles[t];
    const int64_t width = call_.widths[tile.part];
    prefetch_rows<false>(grads_[tile.part] + first * width + tile.first, width, count, tile.count);
    if (weight_ == nullptr) prefetch_rows<false>(call_.slopes + call_.kept_at(t, first), tile.count, count, tile.count);
  }
  void gradient(int64_t t, int64_t first, int64_t count, const float* a, float* dy) {
    const ColumnTile& tile = call_.tiles[t];
    const int64_t width = call_.widths[tile.part];
    const float *grad = grads_[tile.part] + first * width + tile.first, *bias = &call_.bias[t * kTileColumns];
    const float *products = (*workspace_).products, *slopes = weight_ == nullptr ? call_.slopes + call_.kept_at(t, first) : nullptr;
    if (weight_ != nullptr)
      multiply(round_up(count, 16), tile.padded(), call_.in(), a, call_.in(), weight_->tile(t), kTileColumns, (*workspace_).products, kTileColumns, false);
    for (int64_t r = 0; r < count; r++, dy += kTileColumns, grad += width) {
      by_vectors(tile.count, [&](int64_t c, int64_t n) {
        V s;
        if (weight_ == nullptr) {
          s = V::loadu(slopes + r * tile.count + c, n);
        } else {
          const V p = V::loadu(products + r * kTileColumns + c) + V::loadu(bias + c);
          s = slope(p, sigmoid<false>(p));
        }
        (V::loadu(grad + c, n) * s).store(dy + c);
      });
      std::fill(dy + round_up(tile.count, V::size()), dy + kTileColumns, 0.f);
    }
  }

  void inputs(int64_t first, int64_t count, float* da) {
    const int64_t in = call_.in();
    const float *w = call_.norm_weight.data(), *y = (*workspace_).y;
    float *dweight = sums_ + first / kTileTokens * 2 * in, *dbias = dweight + in;
    for (int64_t r = 0; r < count; r++, da += in, y += in) {
#pragma omp simd
      for (int64_t i = 0; i < in; i++) {
        dweight[i] += da[i] * y[i], dbias[i] += da[i];
        da[i] *= w[i];
      }
      normalise_row_backward(call_.norm, da, y, reciprocals_ + r, dx_ + (first + r) * in);
    }
  }

 private:
  struct Buffers {
    float *y, *products;
    Buffers(Cutter& cut, int64_t in) : y(cut.take<float>(kTileTokens * in)), products(cut.take<float>(kTileTokens * kTileColumns)) {}
  };
  const Call& call_;
  std::vector<const float*> grads_;
  const TransposedWeight* weight_;
  float *dx_, *sums_;
  float reciprocals_[kTileTokens];
  Workspace<Buffers> workspace_;
};

// The parts [T, widths[i]], then the slopes of the activation (`keep`: T * out numbers as Call::kept_at has them) or an
// empty tensor.
std::vector<Tensor> forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, const std::vector<int64_t>& widths, bool centred, double eps, bool keep) {
  const Call call(x, weight, bias, norm_weight, norm_bias, widths, centred, eps);
  std::vector<Tensor> outputs;
  std::vector<float*> parts;
  for (const int64_t width : widths) {
    outputs.push_back(result_tensor({call.tokens, width}, x.options()));
    parts.push_back(outputs.back().mutable_data_ptr<float>());
  }
  outputs.push_back(result_tensor({keep ? call.tokens : 0, keep ? call.out : 0}, x.options()));
  float* slopes = keep ? outputs.back().mutable_data_ptr<float>() : nullptr;
  const TransposedWeight transposed(call.tiles, call.weight, call.in());
  auto made = workers([&] { return std::make_unique<ForwardWorker>(call, parts, slopes); });
  project(call.tiles, transposed, call.tokens, call.in(), made);
  return outputs;
}

// Gradients of x, weight, bias (empty without one), and [2, in]: those of weight and bias of the norm.
std::vector<Tensor> backward(const std::vector<Tensor>& grads, const std::optional<Tensor>& slopes, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, const std::vector<int64_t>& widths, bool centred, double eps) {
  Call call(x, weight, bias, norm_weight, norm_bias, widths, centred, eps);
  call.slopes = slopes ? slopes->const_data_ptr<float>() : nullptr;
  std::vector<const float*> pointers;
  for (const Tensor& grad : grads) pointers.push_back(grad.const_data_ptr<float>());
  Tensor dx = result_tensor(x.sizes(), x.options()), dweight = result_tensor(weight.sizes(), x.options());
  Tensor dbias = at::empty({bias ? call.out : 0}, x.options()), dnorm = at::empty({2, call.in()}, x.options());
  const int64_t blocks = token_tiles(call.tokens);
  if (blocks == 0) return {dx, dweight.zero_(), dbias.zero_(), dnorm.zero_()};
  SharedArray<float> sums(blocks * 2 * call.in());
  std::optional<TransposedWeight> transposed;
  if (!slopes) transposed.emplace(call.tiles, call.weight, call.in());
  auto made = workers([&] {
    return std::make_unique<BackwardWorker>(call, pointers, transposed ? &*transposed : nullptr, dx.mutable_data_ptr<float>(), sums.get());
  });
  project_backward(call.tiles, call.weight, call.tokens, call.in(), made, {dweight.mutable_data_ptr<float>(), bias ? dbias.mutable_data_ptr<float>() : nullptr});
  add_blocks(sums.get(), blocks, 2 * call.in(), dnorm.mutable_data_ptr<float>());
  return {dx, dweight, dbias, dnorm};
}

}  // namespace
}  // namespace turbogr

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("forward", &turbogr::forward, py::call_guard<py::gil_scoped_release>());
  module.def("backward", &turbogr::backward, py::call_guard<py::gil_scoped_release>());
  module.def("memory", [] { return turbogr::ReusedMemory::get().bytes(); });
}
