// Backward: the positions of a batch sorted by row once, then each row's gradients summed and the row updated at once.
//
// A thread takes blocks of sorted positions and works on the rows that begin there, so that every row is one thread's.
// The gradients of a row are summed in the first-level cache; its weights and states are fetched meanwhile and written
// once. What comes next is fetched ahead by the sorted positions.
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "gradient_rows.h"
#include "jagged_lookup.h"
#include "row_sort.h"
#include "take_turns.h"

namespace turbogr {
namespace {

constexpr int64_t kAhead = 16;  // positions by which gradients and rows are fetched ahead

// The tables themselves, each once, in ascending order of their rows.
struct Table {
  int64_t first_row, end, begin, width;
  int64_t feature;  // one that reads it
};

std::vector<Table> tables_of(const Call& call) {
  std::vector<Table> tables;
  for (size_t f = 0; f < call.features.size(); f++) {
    const Feature& at = call.features[f];
    if (at.height == 0) continue;
    tables.push_back({at.first_row, at.first_row + at.height, at.begin, at.width, static_cast<int64_t>(f)});
  }
  std::sort(tables.begin(), tables.end(), [](const Table& a, const Table& b) {
    return a.first_row != b.first_row ? a.first_row < b.first_row : a.feature < b.feature;
  });
  const auto same = [](const Table& a, const Table& b) { return a.first_row == b.first_row; };
  tables.erase(std::unique(tables.begin(), tables.end(), same), tables.end());
  return tables;
}

// Finds the table of rows that come in ascending order.
class TableCursor {
 public:
  explicit TableCursor(const std::vector<Table>& tables) : tables_(tables) {}
  const Table& at(int64_t row) {
    while (row >= tables_[i_].end) i_++;
    return tables_[i_];
  }

 private:
  const std::vector<Table>& tables_;
  size_t i_ = 0;
};

template <class E>
void fill_entries(const Call& call, E* entries) {
  const int64_t* ids = call.ids();
  const auto absent = static_cast<uint64_t>(call.rows);  // behind all rows
  at::parallel_for(0, call.count, kSortGrain, [&](int64_t first, int64_t last) {
    call.by_feature(first, last, [&](int64_t f, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const bool present = f >= 0 && has_row(call.features[f], ids[i]);
        entries[i] = E::of(present ? call.features[f].first_row + ids[i] : absent, i);
      }
    });
  });
}

// body(table, row over all tables, sum of its gradients, what make() gave the thread) for every row that a position names, once;
// fetch(table, row) some positions before.
template <class Make, class Fetch, class Body>
void for_each_row(const Call& call, const OutputGradient& gradient, Make&& make, Fetch&& fetch, Body&& body) {
  const std::vector<Table> tables = tables_of(call);
  if (call.count == 0 || tables.empty()) return;
  const GradientRows gradients(call, gradient);
  const int bits = bits_of(call.rows);
  by_entry(bits, [&](auto kind) {
    using E = decltype(kind);
    const Scratch<E> entries(call.count), spare(call.count);
    fill_entries(call, entries.get());
    const E* sorted = sort_by_row(entries.get(), spare.get(), call.count, bits);
    const auto absent = [&](const E& entry) { return entry.row() < static_cast<uint64_t>(call.rows); };
    const int64_t n = std::partition_point(sorted, sorted + call.count, absent) - sorted;
    const int64_t blocks = row_blocks(n);
    take_turns(blocks, [&](auto&& next) {
      std::vector<float> sum(call.max_d), buffer(call.max_d);
      auto state = make();
      for (int64_t block; (block = next()) < blocks;) {
        TableCursor current(tables), ahead(tables);
        const int64_t first = block * kRowBlock, limit = std::min(n, first + kRowBlock);
        // Rows are fetched when their first position comes near, gradients position by position.
        const auto fetch_position = [&](int64_t i) {
          const auto row = static_cast<int64_t>(sorted[i].row());
          const Table& table = ahead.at(row);
          gradients.prefetch(sorted[i].position(), table.width);
          if (i < limit && (i == 0 || sorted[i].row() != sorted[i - 1].row())) fetch(table, row);
        };
        for (int64_t i = first; i < std::min(n, first + kAhead); i++) fetch_position(i);
        rows_of_block(sorted, n, block, [&](int64_t begin, int64_t end) {
          const auto row = static_cast<int64_t>(sorted[begin].row());
          const Table& table = current.at(row);
          for (int64_t i = begin; i < end; i++) {
            if (i + kAhead < n) fetch_position(i + kAhead);
            gradients.add(sorted[i].position(), table.width, i == begin, sum.data(), buffer.data());
          }
          body(table, row, sum.data(), state);
        });
      }
    });
  });
}

// A state by table: where its values of the table begin, and how many a row has.
struct StatePlace {
  float* values;
  std::vector<int64_t> begin;  // by feature
  bool by_row;
  float* of(const Table& table, int64_t row) const {
    return values + begin[table.feature] + (row - table.first_row) * (by_row ? 1 : table.width);
  }
};

}  // namespace

void update_tables(const Call& call, const OutputGradient& gradient, const Optimizer& optimizer,
                   const std::vector<State>& states) {
  std::vector<StatePlace> places;
  for (size_t i = 0; i < states.size(); i++) {
    const std::vector<int64_t> at = Call::numbers(states[i].begin);
    places.push_back({states[i].values.mutable_data_ptr<float>(), at, optimizer.state_by_row(i)});
    for (const Table& table : tables_of(call)) {
      const int64_t end = at[table.feature] + (table.end - table.first_row) * (places[i].by_row ? 1 : table.width);
      TORCH_CHECK_VALUE(at[table.feature] >= 0 && end <= states[i].values.numel(), "state ", i, " has ",
                        states[i].values.numel(), " elements, that of feature ", table.feature, " ends at ", end);
    }
  }
  by_float_type(call.weights.scalar_type(), [&](auto type) {
    using W = decltype(type);
    W* weights = call.weights.mutable_data_ptr<W>();
    for_each_row(
        call, gradient, [&] { return UpdateBuffers(call.max_d); },
        [&](const Table& table, int64_t row) {
          prefetch_bytes<true>(weights + table.begin + (row - table.first_row) * table.width, table.width * sizeof(W));
          for (const StatePlace& place : places)
            prefetch_bytes<true>(place.of(table, row), (place.by_row ? 1 : table.width) * sizeof(float));
        },
        [&](const Table& table, int64_t row, const float* sum, UpdateBuffers& buffers) {
          float* at[2] = {};
          for (size_t i = 0; i < places.size(); i++) at[i] = places[i].of(table, row);
          W* weight = weights + table.begin + (row - table.first_row) * table.width;
          update_row(optimizer, weight, at, sum, table.width, row, buffers);
        });
  });
}

Tensor tables_gradient(const Call& call, const OutputGradient& gradient) {
  Tensor result = at::zeros_like(call.weights);
  by_float_type(call.weights.scalar_type(), [&](auto type) {
    using W = decltype(type);
    W* values = result.mutable_data_ptr<W>();
    struct Nothing {};
    for_each_row(
        call, gradient, [] { return Nothing(); }, [](const Table&, int64_t) {},
        [&](const Table& table, int64_t row, const float* sum, Nothing&) {
          round_row(sum, values + table.begin + (row - table.first_row) * table.width, table.width);
        });
  });
  return result;
}

Tensor factors_gradient(const Call& call, const OutputGradient& gradient, const std::vector<int64_t>& wanted) {
  Tensor result = at::zeros({call.count}, call.weights.options().dtype(at::kFloat));
  float* out = result.mutable_data_ptr<float>();
  const GradientRows gradients(call, gradient);
  const Bags bags = call.bags();
  const int64_t* ids = call.ids();
  by_float_type(call.weights.scalar_type(), [&](auto weight) {
    using W = decltype(weight);
    const W* weights = call.weights.const_data_ptr<W>();
    const int64_t count = call.batch * static_cast<int64_t>(call.features.size());
    at::parallel_for(0, count, 64, [&](int64_t first, int64_t last) {
      std::vector<float> converted(call.max_d), buffer(call.max_d);
      for (int64_t bag = first; bag < last; bag++) {
        const int64_t f = bag / call.batch;
        if (!wanted[f] || bags.begin(bag) == bags.end(bag)) continue;
        const Feature& feature = call.features[f];
        const float* above = gradients.of_bag(bag, buffer.data());
        for (int64_t i = bags.begin(bag); i < bags.end(bag); i++) {
          if (!has_row(feature, ids[i])) continue;
          const float* row = floats_of(weights + feature.begin + ids[i] * feature.width, converted.data(), feature.width);
          out[i] = sum_of(feature.width, [&](int64_t c) { return row[c] * above[c]; });
        }
      }
    });
  });
  return result;
}

}  // namespace turbogr
