// What Python sees of FuXi attention in C++.
#include "fuxi_attention.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace turbogr;
  py::class_<fuxi::Arguments>(m, "Arguments")
      .def(py::init([](at::Tensor q, at::Tensor k, at::Tensor v, at::Tensor offsets, double alpha, double scale,
                       bool causal, OptionalTensor num_targets, OptionalTensor num_contextual,
                       std::optional<int64_t> window, int64_t full_tail, OptionalTensor timestamps,
                       OptionalTensor query_timestamps, OptionalTensor time_bias, OptionalTensor time_borders,
                       OptionalTensor position_bias, double bias_scale, OptionalTensor time_decay) {
        return fuxi::Arguments{{q, k, v, offsets, alpha, scale, causal, num_targets, num_contextual, window, full_tail,
                                timestamps, query_timestamps, time_bias, time_borders, position_bias},
                               bias_scale,
                               time_decay};
      }));
  m.def("forward", &fuxi::forward, py::call_guard<py::gil_scoped_release>());
  m.def("backward", &fuxi::backward, py::call_guard<py::gil_scoped_release>());
  m.def("take_workspace_peak", [] { return workspace_count.peak.exchange(workspace_count.now); });
}
