// The jagged lookup of a group of tables and its parts; kernels/lookup_call.py has the meaning of the arguments.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "row_optimizers.h"
#include "table_layout.h"

namespace turbogr {

// The rows of each block of positions [N of the block, D], or the bags [B, total_D].
std::vector<Tensor> look_up(const Call& call, const std::vector<int64_t>& block_ends,
                            const std::vector<at::ScalarType>& types);

// A state of an optimizer: float32 values with one place per weight or per row, and where each feature's begin.
struct State {
  Tensor values, begin;
};

// The gradient of the output: that of each block of rows, or of the bags.
struct OutputGradient {
  std::vector<Tensor> blocks;
  std::vector<int64_t> block_ends;
  std::optional<double> limit;  // its elements are held to this magnitude
};

// Updates every row that a position names once, with the sum of its gradients.
void update_tables(const Call& call, const OutputGradient& gradient, const Optimizer& optimizer,
                   const std::vector<State>& states);
// The gradient of the flat buffer [E] in its dtype.
Tensor tables_gradient(const Call& call, const OutputGradient& gradient);
// The gradient of indice_weights [N] float32; `wanted` [F] says for which features.
Tensor factors_gradient(const Call& call, const OutputGradient& gradient, const std::vector<int64_t>& wanted);

// Ids in ascending order without repetitions, table by table; where those of each table begin; the place of each id.
std::tuple<Tensor, Tensor, Tensor> unique_ids(const Tensor& ids, const std::vector<int64_t>& table_offsets);
// Unique ids and the sums of their rows, float32 (float64 for float64).
std::tuple<Tensor, Tensor> coalesce(const Tensor& ids, const Tensor& grads);
// Applies an optimizer to rows of one table.
void update_rows(const Tensor& weights, const std::vector<Tensor>& states, const Tensor& ids, const Tensor& rows,
                 const Optimizer& optimizer);

}  // namespace turbogr
