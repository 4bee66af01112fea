#pragma once

#include <torch/extension.h>

namespace simnpu {

// Adds hccl_over(gloo) to the Python module.
void bind_process_group(pybind11::module& module);

}  // namespace simnpu
