// Ids without their repetitions, and the sums of the rows that belong to each: a sort by id, table by table.
#include <ATen/ops/empty.h>

#include "jagged_lookup.h"
#include "row_sort.h"
#include "take_turns.h"

namespace turbogr {
namespace {

// The ids of one table: the smallest and how many bits the distance of the largest from it has.
struct Range {
  int64_t least = 0;
  int bits = 0;
};

Range range_of(const int64_t* ids, int64_t n) {
  if (n == 0) return {};
  const int64_t stretches = std::clamp<int64_t>(n / kSortGrain, 1, at::get_num_threads());
  const int64_t stretch = (n + stretches - 1) / stretches;
  std::vector<std::pair<int64_t, int64_t>> found(stretches, {ids[0], ids[0]});
  at::parallel_for(0, stretches, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; s++) {
      int64_t least = ids[0], largest = ids[0];
      for (int64_t i = s * stretch; i < std::min(n, (s + 1) * stretch); i++)
        least = std::min<int64_t>(least, ids[i]), largest = std::max<int64_t>(largest, ids[i]);
      found[s] = {least, largest};
    }
  });
  int64_t least = ids[0], largest = ids[0];
  for (const auto& [low, high] : found) least = std::min(least, low), largest = std::max(largest, high);
  return {least, bits_of(static_cast<uint64_t>(largest) - static_cast<uint64_t>(least))};
}

// n ids sorted: entries are (id - least, position).
template <class E>
const E* sort_ids(const int64_t* ids, int64_t n, const Range& range, E* entries, E* spare) {
  at::parallel_for(0, n, kSortGrain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      entries[i] = E::of(static_cast<uint64_t>(ids[i]) - static_cast<uint64_t>(range.least), i);
  });
  return sort_by_row(entries, spare, n, range.bits);
}

// For each block of sorted entries how many different rows begin before it; one element more: all rows.
template <class E>
std::vector<int64_t> rows_before_blocks(const E* sorted, int64_t n) {
  const int64_t blocks = row_blocks(n);
  std::vector<int64_t> before(blocks + 1);
  at::parallel_for(0, blocks, 8, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; block++) {
      int64_t heads = 0;
      for (int64_t i = block * kRowBlock; i < std::min(n, (block + 1) * kRowBlock); i++)
        heads += i == 0 || sorted[i].row() != sorted[i - 1].row();
      before[block + 1] = heads;
    }
  });
  for (int64_t block = 0; block < blocks; block++) before[block + 1] += before[block];
  return before;
}

// body(place of the row, begin, end) for each row of sorted entries, on all threads.
template <class E, class Body>
void for_each_place(const E* sorted, int64_t n, const std::vector<int64_t>& before, Body&& body) {
  const int64_t blocks = row_blocks(n);
  take_turns(blocks, [&](auto&& next) {
    for (int64_t block; (block = next()) < blocks;) {
      int64_t place = before[block];
      rows_of_block(sorted, n, block, [&](int64_t begin, int64_t end) { body(place++, begin, end); });
    }
  });
}

int widest(const std::vector<Range>& ranges) {
  int bits = 0;
  for (const Range& range : ranges) bits = std::max(bits, range.bits);
  return bits;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> unique_ids(const Tensor& given, const std::vector<int64_t>& table_offsets) {
  const Tensor ids = given.to(at::kLong);
  const int64_t n = ids.numel(), tables = static_cast<int64_t>(table_offsets.size()) - 1;
  const bool rises = std::is_sorted(table_offsets.begin(), table_offsets.end());
  TORCH_CHECK(rises && table_offsets.front() == 0 && table_offsets.back() == n,
              "table_offsets must rise from 0 to the number of ids, ", n);
  Tensor offsets = at::empty({tables + 1}, ids.options()), inverse = at::empty({n}, ids.options()), unique;
  const int64_t* data = ids.const_data_ptr<int64_t>();
  std::vector<Range> ranges;
  for (int64_t t = 0; t < tables; t++)
    ranges.push_back(range_of(data + table_offsets[t], table_offsets[t + 1] - table_offsets[t]));
  by_entry(widest(ranges), [&](auto kind) {
    using E = decltype(kind);
    const Scratch<E> entries(n), spare(n);
    std::vector<const E*> sorted;
    std::vector<std::vector<int64_t>> before;
    int64_t* ends = offsets.mutable_data_ptr<int64_t>();
    ends[0] = 0;
    for (int64_t t = 0; t < tables; t++) {
      const int64_t begin = table_offsets[t], count = table_offsets[t + 1] - begin;
      sorted.push_back(sort_ids(data + begin, count, ranges[t], entries.get() + begin, spare.get() + begin));
      before.push_back(rows_before_blocks(sorted[t], count));
      ends[t + 1] = ends[t] + before[t].back();
    }
    unique = at::empty({ends[tables]}, ids.options());
    int64_t *out = unique.mutable_data_ptr<int64_t>(), *places = inverse.mutable_data_ptr<int64_t>();
    for (int64_t t = 0; t < tables; t++) {
      const int64_t first = table_offsets[t];
      const E* of_table = sorted[t];
      for_each_place(of_table, table_offsets[t + 1] - first, before[t], [&](int64_t place, int64_t begin, int64_t end) {
        place += ends[t];
        out[place] = static_cast<int64_t>(of_table[begin].row() + static_cast<uint64_t>(ranges[t].least));
        for (int64_t i = begin; i < end; i++) places[first + of_table[i].position()] = place;
      });
    }
  });
  return {unique.to(given.scalar_type()), offsets, inverse};
}

namespace {

constexpr int64_t kRowsAhead = 8;

// A: in which is summed.
template <class A, class T>
void sum_row(const T* from, bool first, A* sum, int64_t n) {
  if (first) {
    for (int64_t i = 0; i < n; i++) sum[i] = static_cast<A>(from[i]);
  } else {
    for (int64_t i = 0; i < n; i++) sum[i] += static_cast<A>(from[i]);
  }
}

template <class F>
void by_summed_type(at::ScalarType type, F&& f) {
  type == at::kDouble ? f(double()) : by_float_type(type, std::forward<F>(f));
}

}  // namespace

std::tuple<Tensor, Tensor> coalesce(const Tensor& given, const Tensor& grads) {
  const Tensor ids = given.to(at::kLong);
  const int64_t n = ids.numel(), width = grads.size(1), stride = grads.stride(0);
  const auto options = grads.options().dtype(grads.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const int64_t* data = ids.const_data_ptr<int64_t>();
  const Range range = range_of(data, n);
  Tensor unique, rows;
  by_entry(range.bits, [&](auto kind) {
    using E = decltype(kind);
    const Scratch<E> entries(n), spare(n);
    const E* sorted = sort_ids(data, n, range, entries.get(), spare.get());
    const std::vector<int64_t> before = rows_before_blocks(sorted, n);
    unique = at::empty({before.back()}, ids.options());
    rows = result_tensor({before.back(), width}, options);
    int64_t* out = unique.mutable_data_ptr<int64_t>();
    by_summed_type(grads.scalar_type(), [&](auto value) {
      using T = decltype(value);
      using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
      const T* from = grads.const_data_ptr<T>();
      A* sums = rows.mutable_data_ptr<A>();
      for_each_place(sorted, n, before, [&](int64_t place, int64_t begin, int64_t end) {
        out[place] = static_cast<int64_t>(sorted[begin].row() + static_cast<uint64_t>(range.least));
        for (int64_t i = begin; i < end; i++) {
          if (i + kRowsAhead < n) prefetch_bytes(from + sorted[i + kRowsAhead].position() * stride, width * sizeof(T));
          sum_row(from + sorted[i].position() * stride, i == begin, sums + place * width, width);
        }
      });
    });
  });
  return {unique.to(given.scalar_type()), rows};
}

}  // namespace turbogr
