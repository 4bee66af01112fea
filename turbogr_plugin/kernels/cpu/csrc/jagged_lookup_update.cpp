// An optimizer on given rows of one table.
#include "jagged_lookup.h"
#include "take_turns.h"

namespace turbogr {
namespace {

constexpr int64_t kRowsPerTurn = 256, kRowsAhead = 8;

}  // namespace

// ids are all different, so that no two threads meet in a row; those outside of the table are left out.
void update_rows(const Tensor& weights, const std::vector<Tensor>& states, const Tensor& given, const Tensor& rows,
                 const Optimizer& optimizer) {
  const Tensor ids = given.to(at::kLong), gradients = rows.to(at::kFloat);
  const int64_t height = weights.size(0), width = weights.size(1), n = ids.numel(), stride = gradients.stride(0);
  const int64_t turns = (n + kRowsPerTurn - 1) / kRowsPerTurn;
  const int64_t* data = ids.const_data_ptr<int64_t>();
  const float* gradient = gradients.const_data_ptr<float>();
  std::vector<float*> state;
  for (const Tensor& values : states) state.push_back(values.mutable_data_ptr<float>());
  const auto present = [&](int64_t i) { return static_cast<uint64_t>(data[i]) < static_cast<uint64_t>(height); };
  const auto size = [&](size_t s) { return optimizer.state_by_row(s) ? 1 : width; };
  by_float_type(weights.scalar_type(), [&](auto weight) {
    using W = decltype(weight);
    W* table = weights.mutable_data_ptr<W>();
    take_turns(turns, [&](auto&& next) {
      UpdateBuffers buffers(width);
      for (int64_t turn; (turn = next()) < turns;) {
        for (int64_t i = turn * kRowsPerTurn; i < std::min(n, (turn + 1) * kRowsPerTurn); i++) {
          if (i + kRowsAhead < n && present(i + kRowsAhead)) {
            const int64_t ahead = data[i + kRowsAhead];
            prefetch_bytes<true>(table + ahead * width, width * sizeof(W));
            for (size_t s = 0; s < state.size(); s++)
              prefetch_bytes<true>(state[s] + ahead * size(s), size(s) * sizeof(float));
          }
          if (!present(i)) continue;
          const int64_t row = data[i];
          float* at[2] = {};
          for (size_t s = 0; s < state.size(); s++) at[s] = state[s] + row * size(s);
          update_row(optimizer, table + row * width, at, gradient + i * stride, width, row, buffers);
        }
      }
    });
  });
}

}  // namespace turbogr
