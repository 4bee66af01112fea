// HSTU attention: out_i = scale * sum over allowed j of SiLU(alpha q_i . k_j + bias(i, j)) v_j.
#pragma once

#include <vector>

#include "attention_call.h"

namespace turbogr::hstu {

at::Tensor forward(const AttentionArguments& a);

// dq, dk, dv, gradients of the two tables in float32 (undefined where not asked for)
std::vector<at::Tensor> backward(const at::Tensor& grad, const AttentionArguments& a, bool time_gradient,
                                 bool position_gradient);

}  // namespace turbogr::hstu
