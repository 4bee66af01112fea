// The jagged lookup and its parts for Python.
#include "jagged_lookup.h"

#include <torch/csrc/utils/pybind.h>

#include "reused_memory.h"

namespace py = pybind11;

namespace {

using namespace turbogr;

// weights, begin, d_offsets, first_row, total_d, max_d
using Tables = std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t>;
using Ids = std::tuple<Tensor, Tensor, int64_t, std::optional<Tensor>>;  // indices, offsets, pooling, indice_weights
using Gradient = std::tuple<std::vector<Tensor>, std::vector<int64_t>, std::optional<double>>;
// name, learning_rate, eps, beta1, beta2, weight_decay, weight_decay_mode, iteration, (seed, step)
using Key = std::optional<std::pair<uint32_t, uint32_t>>;
using Settings = std::tuple<std::string, double, double, double, double, double, int64_t, int64_t, Key>;

Call call_of(const Tables& t, const Ids& i) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t), std::get<4>(t), std::get<5>(t),
          std::get<0>(i), std::get<1>(i), std::get<2>(i), std::get<3>(i)};
}

OutputGradient gradient_of(const Gradient& given) {
  return {std::get<0>(given), std::get<1>(given), std::get<2>(given)};
}

Optimizer optimizer_of(const Settings& given) {
  const auto& [name, rate, eps, beta1, beta2, decay, mode, iteration, rounding] = given;
  Optimizer optimizer(name, rate, eps, beta1, beta2, decay, mode, iteration);
  if (rounding) optimizer.stochastic = true, optimizer.seed = rounding->first, optimizer.step = rounding->second;
  return optimizer;
}

std::vector<Tensor> forward(const Tables& tables, const Ids& ids, const std::vector<int64_t>& block_ends,
                            const std::vector<at::ScalarType>& types) {
  return look_up(call_of(tables, ids), block_ends, types);
}

void fused_backward(const Tables& tables, const Ids& ids, const Gradient& gradient, const Settings& settings,
                    const std::vector<std::pair<Tensor, Tensor>>& given) {
  std::vector<State> states;
  for (const auto& [values, begin] : given) states.push_back({values, begin});
  update_tables(call_of(tables, ids), gradient_of(gradient), optimizer_of(settings), states);
}

Tensor dense_backward(const Tables& tables, const Ids& ids, const Gradient& gradient) {
  return tables_gradient(call_of(tables, ids), gradient_of(gradient));
}

Tensor indice_weights_gradient(const Tables& tables, const Ids& ids, const Gradient& gradient,
                               const std::vector<int64_t>& wanted) {
  return factors_gradient(call_of(tables, ids), gradient_of(gradient), wanted);
}

void fused_update(const Tensor& weights, const std::vector<Tensor>& states, const Tensor& ids, const Tensor& rows,
                  const Settings& settings) {
  update_rows(weights, states, ids, rows, optimizer_of(settings));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("forward", &forward, Release());
  module.def("fused_backward", &fused_backward, Release());
  module.def("dense_backward", &dense_backward, Release());
  module.def("indice_weights_gradient", &indice_weights_gradient, Release());
  module.def("unique", &unique_ids, Release());
  module.def("coalesce", &coalesce, Release());
  module.def("fused_update", &fused_update, Release());
  module.def("memory", [] { return ReusedMemory::get().bytes(); });
}
