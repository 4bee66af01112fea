// What Python sees of HSTU attention in C++.
#include "jagged_attention.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

#include "gemm.h"

namespace turbogr {
namespace {

// What multiplies matrices of each type in this process.
std::map<std::string, std::string> matrix_products() {
  const std::string floats = generated_float32() ? "float32 products (brgemm)" : "float32 products (BLAS)";
  return {
      {"float32", floats}, {"bfloat16", packed_bf16() ? "packed bf16 products (brgemm)" : floats}, {"float16", floats}};
}

}  // namespace
}  // namespace turbogr

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace turbogr;
  using Arguments = AttentionArguments;
  py::class_<Arguments>(m, "Arguments")
      .def(py::init([](at::Tensor q, at::Tensor k, at::Tensor v, at::Tensor offsets, double alpha, double scale,
                       bool causal, OptionalTensor num_targets, OptionalTensor num_contextual,
                       std::optional<int64_t> window, int64_t full_tail, OptionalTensor timestamps,
                       OptionalTensor query_timestamps, OptionalTensor time_bias, OptionalTensor time_borders,
                       OptionalTensor position_bias) {
        return Arguments{q,
                         k,
                         v,
                         offsets,
                         alpha,
                         scale,
                         causal,
                         num_targets,
                         num_contextual,
                         window,
                         full_tail,
                         timestamps,
                         query_timestamps,
                         time_bias,
                         time_borders,
                         position_bias};
      }));
  m.def("forward", &hstu::forward, py::call_guard<py::gil_scoped_release>());
  m.def("backward", &hstu::backward, py::call_guard<py::gil_scoped_release>());
  m.def("matrix_products", &matrix_products);
  m.def("brgemm_rate", [](bool packed) {
    TORCH_CHECK_VALUE(!packed || packed_bf16(),
                      "bfloat16 is multiplied as float32 here: this machine has no packed bf16 product");
    py::gil_scoped_release release;
    return packed ? multiply_rate<BFloat16>() : multiply_rate<float>();
  });
  m.def("take_workspace_peak", [] { return workspace_count.peak.exchange(workspace_count.now); });
}
