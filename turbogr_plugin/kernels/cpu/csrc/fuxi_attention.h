// FuXi attention: three channels side by side, [T, H, 3 E]:
//
//   scale * SiLU(alpha q_i . k_j) v_j,  bias_scale * w(i, j) v_j,  bias_scale * b_p(i - j) v_j,  summed over allowed j
//
// with w from a table of buckets of |t_i - t_j|, or the decay a * exp(-r * |t_i - t_j|^p).
#pragma once

#include <vector>

#include "attention_call.h"

namespace turbogr::fuxi {

struct Arguments {
  AttentionArguments attention;
  double bias_scale;
  OptionalTensor time_decay;
};

at::Tensor forward(const Arguments& a);

// dq, dk, dv, gradients in float32 of time_bias or time_decay, and of position_bias (undefined where not asked for)
std::vector<at::Tensor> backward(const at::Tensor& grad, const Arguments& a, bool time_gradient,
                                 bool position_gradient);

}  // namespace turbogr::fuxi
