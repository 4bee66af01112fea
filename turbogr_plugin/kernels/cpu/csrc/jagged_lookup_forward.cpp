// Forward: rows of tables, one for each id or one for each bag.
//
// All threads work on the ids of one table before they go on to the next, so that its popular rows are in the shared
// cache for all of them. Rows are fetched ahead: their addresses look random to the machine. Results larger than the
// caches are streamed past them.
#include "jagged_lookup.h"

#include "reused_memory.h"
#include "take_turns.h"

namespace turbogr {
namespace {

constexpr int64_t kIdsPerTurn = 1024;
constexpr int64_t kRowsAhead = 12;
constexpr int64_t kStreamedBytes = 16 << 20;  // results that hardly stay in cache until they are read

// Fetches the rows of ids [at, end).
template <class W>
inline void prefetch_ids(const W* table, const Feature& feature, const int64_t* ids, int64_t at, int64_t end) {
  for (; at < end; at++)
    if (has_row(feature, ids[at])) prefetch_bytes(table + ids[at] * feature.width, feature.width * sizeof(W));
}

// The rows of positions [first, last) into out, whose first row is that of position `first`.
template <class W, class O>
void copy_rows(const Call& call, int64_t first, int64_t last, O* out, bool stream) {
  const int64_t* ids = call.ids();
  const W* weights = call.weights.const_data_ptr<W>();
  const int64_t width = call.max_d, bytes = width * static_cast<int64_t>(sizeof(O));
  const int64_t turns = (last - first + kIdsPerTurn - 1) / kIdsPerTurn;
  take_turns(turns, [&](auto&& next) {
    std::vector<float> buffer(width);
    std::vector<O> row(width);
    for (int64_t turn; (turn = next()) < turns;) {
      const int64_t from = first + turn * kIdsPerTurn, to = std::min(last, from + kIdsPerTurn);
      call.by_feature(from, to, [&](int64_t f, int64_t begin, int64_t end) {
        O* target = out + (begin - first) * width;
        if (f < 0) {
          std::memset(static_cast<void*>(target), 0, (end - begin) * bytes);
          return;
        }
        const Feature& feature = call.features[f];
        const W* table = weights + feature.begin;
        prefetch_ids(table, feature, ids, begin, std::min(end, begin + kRowsAhead));
        for (int64_t i = begin; i < end; i++, target += width) {
          if (i + kRowsAhead < end) prefetch_ids(table, feature, ids, i + kRowsAhead, i + kRowsAhead + 1);
          if (!has_row(feature, ids[i])) {
            std::memset(static_cast<void*>(target), 0, bytes);
            continue;
          }
          const W* source = table + ids[i] * width;
          if (!stream) {
            convert(source, target, buffer.data(), width);
          } else if constexpr (std::is_same_v<W, O>) {
            stream_row(source, target, bytes);
          } else {
            convert(source, row.data(), buffer.data(), width);
            stream_row(row.data(), target, bytes);
          }
        }
      });
    }
    if (stream) drain_streams();
  });
}

constexpr int64_t kBagsPerTurn = 64;

// The ids of one bag and their factors, if they have some; rows of `table` are `feature.width` apart.
template <class W>
struct Bag {
  const W* table;
  const Feature& feature;
  const int64_t* ids;
  const float* factors;
  int64_t begin, end;
  int64_t fetched, fetchable;  // positions before `fetched` have been fetched, those from `fetchable` on are of others
};

// Sums of n vectors of columns in registers: a sum in memory would be read and written for every row.
template <int n, class W>
void pool_columns(Bag<W>& bag, int64_t column, float* sums) {
  V sum[n];
#pragma GCC unroll 8
  for (int k = 0; k < n; k++) sum[k] = V(0.f);
  for (int64_t i = bag.begin; i < bag.end; i++) {
    for (const int64_t wanted = std::min(bag.fetchable, i + kRowsAhead + 1); bag.fetched < wanted; bag.fetched++)
      prefetch_ids(bag.table, bag.feature, bag.ids, bag.fetched, bag.fetched + 1);
    if (!has_row(bag.feature, bag.ids[i])) continue;
    const W* row = bag.table + bag.ids[i] * bag.feature.width + column;
    if (bag.factors == nullptr) {
#pragma GCC unroll 8
      for (int k = 0; k < n; k++) sum[k] = sum[k] + load_floats(row + k * V::size());
    } else {
      const V factor(bag.factors[i]);
#pragma GCC unroll 8
      for (int k = 0; k < n; k++) sum[k] = sum[k] + load_floats(row + k * V::size()) * factor;
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < n; k++) sum[k].store(sums + column + k * V::size());
}

template <class W>
void pool_bag(Bag<W>& bag, float* sums) {
  const int64_t width = bag.feature.width;
  int64_t c = 0;
  for (; c + 8 * V::size() <= width; c += 8 * V::size()) pool_columns<8>(bag, c, sums);
  for (; c + 2 * V::size() <= width; c += 2 * V::size()) pool_columns<2>(bag, c, sums);
  for (; c + V::size() <= width; c += V::size()) pool_columns<1>(bag, c, sums);
  for (; c < width; c++) {
    sums[c] = 0;
    for (int64_t i = bag.begin; i < bag.end; i++) {
      if (!has_row(bag.feature, bag.ids[i])) continue;
      const auto value = static_cast<float>(bag.table[bag.ids[i] * width + c]);
      sums[c] += bag.factors == nullptr ? value : value * bag.factors[i];
    }
  }
}

template <class W, class O>
void pool_bags(const Call& call, O* out) {
  const int64_t* ids = call.ids();
  const W* weights = call.weights.const_data_ptr<W>();
  const float* factors = call.indice_weights ? call.indice_weights->const_data_ptr<float>() : nullptr;
  const Bags bags = call.bags();
  const int64_t turns_each = (call.batch + kBagsPerTurn - 1) / kBagsPerTurn;
  const int64_t turns = turns_each * static_cast<int64_t>(call.features.size());
  take_turns(turns, [&](auto&& next) {
    std::vector<float> sums(call.max_d);
    for (int64_t turn; (turn = next()) < turns;) {
      const int64_t f = turn / turns_each, from = turn % turns_each * kBagsPerTurn;
      const int64_t to = std::min(call.batch, from + kBagsPerTurn), first = f * call.batch;
      const Feature& feature = call.features[f];
      const int64_t begin = bags.begin(first + from), end = bags.end(first + to - 1);
      Bag<W> bag{weights + feature.begin, feature, ids, factors, 0, 0, begin, end};
      for (int64_t sample = from; sample < to; sample++) {
        bag.begin = bags.begin(first + sample), bag.end = bags.end(first + sample);
        pool_bag(bag, sums.data());
        if (call.pooling == Pooling::mean) divide_in_place(sums.data(), bags.divisor(first + sample), feature.width);
        round_row(sums.data(), out + sample * call.total_d + feature.column, feature.width);
      }
    }
  });
}

}  // namespace

std::vector<Tensor> look_up(const Call& call, const std::vector<int64_t>& block_ends,
                            const std::vector<at::ScalarType>& types) {
  std::vector<Tensor> outputs;
  by_float_type(call.weights.scalar_type(), [&](auto weight) {
    using W = decltype(weight);
    for (size_t block = 0; block < types.size(); block++) {
      by_float_type(types[block], [&](auto result) {
        using O = decltype(result);
        const auto options = call.weights.options().dtype(types[block]);
        if (call.pooling != Pooling::sequence) {
          Tensor out = result_tensor({call.batch, call.total_d}, options);
          pool_bags<W, O>(call, out.template mutable_data_ptr<O>());
          outputs.push_back(std::move(out));
          return;
        }
        const int64_t first = block == 0 ? 0 : block_ends[block - 1], last = block_ends[block];
        Tensor out = result_tensor({last - first, call.max_d}, options);
        O* data = out.template mutable_data_ptr<O>();
        const bool large = static_cast<int64_t>(out.nbytes()) >= kStreamedBytes;
        const bool stream = large && can_stream(data, call.max_d * sizeof(O));
        copy_rows<W, O>(call, first, last, data, stream);
        outputs.push_back(std::move(out));
      });
    }
  });
  return outputs;
}

}  // namespace turbogr
