// What Python sees. Nothing here holds a lock of the simulation while it waits for the GIL.
#include "process_group.h"
#include "simnpu.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace simnpu {
namespace {

PyObject* capture = nullptr;

// The Python function answers with the index of the caller's source lines. A thread without Python (autograd's workers
// run C++ nodes) has none.
Source call_capture() {
  py::gil_scoped_acquire gil;
  if (capture == nullptr || PyEval_GetFrame() == nullptr) return kNoSource;
  return py::reinterpret_borrow<py::object>(capture)().cast<Source>();
}

py::dict use_dict(const RaceUse& use) {
  py::dict d;
  d["operator"] = use.op;
  d["device"] = use.device;
  d["stream"] = use.stream;
  d["source"] = use.source;
  d["bytes"] = use.bytes;
  d["writes"] = use.write;
  return d;
}

}  // namespace
}  // namespace simnpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simnpu;
  bind_process_group(m);
  m.def("initialize", &initialize);
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int device) { set_current_device(static_cast<c10::DeviceIndex>(device)); });
  m.def("exchange_device", [](int device) {
    return static_cast<int>(exchange_device(static_cast<c10::DeviceIndex>(device)));
  });
  m.def("check_device", [](int device) { check_device(static_cast<c10::DeviceIndex>(device)); });
  m.def("elapsed_ms", [](uintptr_t first, uintptr_t second) {
    return elapsed_ms(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second));
  });
  m.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });

  m.def("register_kernels", &register_kernels);
  m.def("set_missing_dtypes", &set_missing_dtypes);
  m.def("set_any_dtype", &set_any_dtype);
  m.def("set_policy", [](const std::string& name) {
    set_policy(name == "strict" ? Policy::strict : name == "report" ? Policy::report : Policy::permissive);
  });
  m.def("executed", &executed);
  m.def("cpu_fallbacks", &cpu_fallbacks);
  m.def("counters", [] {
    return std::make_tuple(counters.h2d.load(), counters.d2h.load(), counters.d2d.load(), counters.host_syncs.load());
  });
  m.def("reset", [] {
    counters.h2d = counters.d2h = counters.d2d = counters.host_syncs = 0;
    reset_counts();
    reset_reports();
  });

  m.def("set_check_streams", &set_check_streams);
  m.def("check_streams", &check_streams);
  m.def("trace_sources", [](const py::object& function) {
    trace_sources = !function.is_none();
    Py_XDECREF(capture);
    capture = function.is_none() ? nullptr : py::object(function).release().ptr();
    capture_source = &call_capture;
  });
  m.def("host_syncs", [] {
    py::list result;
    for (const auto& sync : host_syncs()) result.append(py::make_tuple(sync.op, sync.source, sync.count));
    return result;
  });
  m.def("races", [] {
    py::list result;
    for (const auto& race : races()) {
      const auto earlier = use_dict(race.earlier), later = use_dict(race.later);
      result.append(py::make_tuple(race.kind, earlier, later, race.block_bytes, race.count));
    }
    return result;
  });
}
