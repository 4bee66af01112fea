// Y = A W^T for tokens A [T, in] and a weight W [out, in], and its gradients, in tiles of 128 tokens by 64 outputs.
//
// What makes A and what becomes of Y (norm, activation, residual) is done by a caller's worker on tiles that are still
// in cache, so that no [T, out] tensor is written and read again on the way.
//
// Backward goes over the tokens in chunks. First the tiles of a chunk in parallel: dY, and dA = dY W. Then the gradient
// of W from the chunk's dY and transposed A, both kept in the layout in which they are operands, in parallel over the
// outputs. Each element of it is summed over the tiles of tokens in their order, whatever the chunks and threads.
#pragma once

#include <ATen/Parallel.h>

#include <memory>
#include <vector>

#include "reused_memory.h"
#include "gemm.h"
#include "ordered_sums.h"
#include "take_turns.h"
#include "vectors.h"
#include "workspace.h"

namespace turbogr {

constexpr int64_t kTileTokens = 128;
constexpr int64_t kTileColumns = 64;
constexpr int64_t kGroupTiles = 4, kGroupInputs = 256;  // of the gradient of W that are computed together
constexpr int64_t kChunkTiles = 8;  // tiles of tokens per chunk at least: 8 MiB of dY for 2048 outputs

// Neighbouring outputs that are computed together; they belong to one part of the output.
struct ColumnTile {
  int64_t part;    // which part
  int64_t first;   // first column within the part
  int64_t column;  // first column of all, a row of W
  int64_t count;   // up to kTileColumns
  int64_t padded() const { return round_up(count, 16); }
};

inline std::vector<ColumnTile> column_tiles(const std::vector<int64_t>& widths) {
  std::vector<ColumnTile> tiles;
  int64_t before = 0;
  for (size_t part = 0; part < widths.size(); part++) {
    for (int64_t first = 0; first < widths[part]; first += kTileColumns)
      tiles.push_back({static_cast<int64_t>(part), first, before + first, std::min(kTileColumns, widths[part] - first)});
    before += widths[part];
  }
  return tiles;
}

inline int64_t token_tiles(int64_t tokens) { return (tokens + kTileTokens - 1) / kTileTokens; }

// W^T as the second operand of each tile: [in, kTileColumns], columns past a tile's count are zeros.
class TransposedWeight {
 public:
  TransposedWeight(const std::vector<ColumnTile>& tiles, const float* weight, int64_t in)
      : size_(in * kTileColumns), data_(static_cast<int64_t>(tiles.size()) * size_) {
    at::parallel_for(0, tiles.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        transpose(weight + tiles[t].column * in, in, &data_[t * size_], kTileColumns, tiles[t].count, in, tiles[t].padded());
    });
  }
  const float* tile(int64_t t) const { return &data_[t * size_]; }

 private:
  int64_t size_;
  SharedFloats data_;
};

// One worker per thread, made before the threads start: it holds the thread's buffers over all parallel regions.
template <class Make>
auto workers(Make&& make) {
  std::vector<decltype(make())> made;
  for (int i = 0; i < at::get_num_threads(); i++) made.push_back(make());
  return made;
}

// Computes all tiles. A worker (held by pointer) has
//   rows(first, count, a)          writes rows of A [count, in]
//   expect(t, first, count)        is told, a product ahead, where it will write
//   store(t, first, count, y)      takes a tile of Y, [count, kTileColumns]
template <class Workers>
void project(const std::vector<ColumnTile>& tiles, const TransposedWeight& weight, int64_t tokens, int64_t in, Workers& workers) {
  struct Buffers {
    float *a, *y;
    Buffers(Cutter& cut, int64_t in) : a(cut.take<float>(kTileTokens * in)), y(cut.take<float>(kTileTokens * kTileColumns)) {}
  };
  const int64_t blocks = token_tiles(tokens);
  take_turns(blocks, [&](auto&& next) {
    Workspace<Buffers> workspace(in);
    float *a = (*workspace).a, *y = (*workspace).y;
    auto& worker = *workers[at::get_thread_num()];
    for (int64_t block = next(); block < blocks; block = next()) {
      const int64_t first = block * kTileTokens, count = std::min(kTileTokens, tokens - first), rows = round_up(count, 16);
      worker.rows(first, count, a);
      std::fill(a + count * in, a + rows * in, 0.f);
      for (size_t t = 0; t < tiles.size(); t++) {
        worker.expect(t, first, count);
        multiply(rows, tiles[t].padded(), in, a, in, weight.tile(t), kTileColumns, y, kTileColumns, false);
        worker.store(t, first, count, y);
      }
    }
    release_multiply(false);
  });
}

// Where the gradients of the parameters go: [out, in], and [out] or null.
struct ParameterGradients {
  float* weight;
  float* bias;
};

// dY and transposed A of a chunk of tokens.
class Chunk {
 public:
  Chunk(int64_t column_tiles, int64_t in, int64_t size)
      : in_(in), size_(size), dy_(column_tiles * size * kTileTokens * kTileColumns), a_(size * in * kTileTokens) {}
  int64_t size() const { return size_; }  // in tiles of tokens
  float* dy(int64_t t, int64_t block) const { return &dy_[(t * size_ + block) * kTileTokens * kTileColumns]; }
  float* transposed(int64_t block) const { return &a_[block * in_ * kTileTokens]; }  // [in, kTileTokens]

 private:
  int64_t in_, size_;
  SharedFloats dy_, a_;
};

// Sums over the rows of a tile of dY: the tile's part of the bias's gradient.
inline void column_sums(const float* dy, int64_t count, float* sums) {
  std::fill(sums, sums + kTileColumns, 0.f);
  for (int64_t r = 0; r < count; r++) {
#pragma omp simd
    for (int64_t c = 0; c < kTileColumns; c++) sums[c] += dy[r * kTileColumns + c];
  }
}

// Adds a chunk's part of the gradient of W, transposed and tile by tile: A^T dY over the first `size` tiles of tokens. A
// thread takes a few tiles of outputs and some rows of A^T at a time, so that both stay in the second-level cache.
inline void weight_gradient(const std::vector<ColumnTile>& tiles, const Chunk& chunk, int64_t size, int64_t in, bool add, const SharedFloats& dweight) {
  const int64_t outputs = static_cast<int64_t>(tiles.size()), groups = (outputs + kGroupTiles - 1) / kGroupTiles;
  const int64_t parts = (in + kGroupInputs - 1) / kGroupInputs, units = groups * parts;
  take_turns(units, [&](auto&& next) {
    for (int64_t unit = next(); unit < units; unit = next()) {
      const int64_t first = unit / parts * kGroupTiles, i = unit % parts * kGroupInputs, rows = std::min(kGroupInputs, in - i);
      for (int64_t block = 0; block < size; block++)
        for (int64_t t = first; t < std::min(outputs, first + kGroupTiles); t++)
          multiply(rows, tiles[t].padded(), kTileTokens, chunk.transposed(block) + i * kTileTokens, kTileTokens, chunk.dy(t, block), kTileColumns, &dweight[(t * in + i) * kTileColumns], kTileColumns, add || block > 0);
    }
    release_multiply(false);
  });
}

// All gradients. A worker (held by pointer) has
//   rows(first, count, a)              writes rows of A [count, in]
//   expect(t, first, count)            is told, a product ahead, what it will read
//   gradient(t, first, count, a, dy)   writes a tile of dY [count, kTileColumns], zeros past the tile's columns;
//                                      a has rows up to the next multiple of 16
//   inputs(first, count, da)           takes the gradient of A [count, in]
template <class Workers>
void project_backward(const std::vector<ColumnTile>& tiles, const float* weight, int64_t tokens, int64_t in, Workers& workers, const ParameterGradients& gradients) {
  struct Buffers {
    float *a, *da;
    Buffers(Cutter& cut, int64_t in) : a(cut.take<float>(kTileTokens * in)), da(cut.take<float>(kTileTokens * in)) {}
  };
  const int64_t blocks = token_tiles(tokens), outputs = static_cast<int64_t>(tiles.size()), columns = outputs * kTileColumns;
  const Chunk chunk(outputs, in, std::min(blocks, std::max<int64_t>(kChunkTiles, 4 * at::get_num_threads())));
  const auto buffers = turbogr::workers([&] { return std::make_unique<Workspace<Buffers>>(in); });
  const SharedFloats dweight(columns * in);  // transposed, tile by tile
  const SharedFloats sums(gradients.bias != nullptr ? blocks * columns : 0);
  for (int64_t start = 0; start < blocks; start += chunk.size()) {
    const int64_t size = std::min(chunk.size(), blocks - start);
    take_turns(size, [&](auto&& next) {
      auto& worker = *workers[at::get_thread_num()];
      float *a = (**buffers[at::get_thread_num()]).a, *da = (**buffers[at::get_thread_num()]).da;
      for (int64_t block = next(); block < size; block = next()) {
        const int64_t first = (start + block) * kTileTokens, count = std::min(kTileTokens, tokens - first), rows = round_up(count, 16);
        worker.expect(0, first, count);
        worker.rows(first, count, a);
        std::fill(a + count * in, a + rows * in, 0.f);
        transpose(a, in, chunk.transposed(block), kTileTokens, count, in, kTileTokens);
        for (size_t t = 0; t < tiles.size(); t++) {
          float* dy = chunk.dy(t, block);
          worker.gradient(t, first, count, a, dy);
          std::fill(dy + count * kTileColumns, dy + kTileTokens * kTileColumns, 0.f);
          if (gradients.bias != nullptr) column_sums(dy, count, &sums[(start + block) * columns + t * kTileColumns]);
          if (t + 1 < tiles.size()) {
            worker.expect(t + 1, first, count);
            prefetch_rows<true>(chunk.dy(t + 1, block), kTileColumns, count, kTileColumns);
          }
          // W's rows are the second operand as they stand.
          multiply(rows, in, tiles[t].count, dy, kTileColumns, weight + tiles[t].column * in, in, da, in, t > 0);
        }
        worker.inputs(first, count, da);
      }
      release_multiply(false);
    });
    weight_gradient(tiles, chunk, size, in, start > 0, dweight);
  }
  at::parallel_for(0, tiles.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      add_transposed(&dweight[t * in * kTileColumns], kTileColumns, gradients.weight + tiles[t].column * in, in, tiles[t].count, in, 1.f, false);
  });
  if (gradients.bias == nullptr) return;
  std::vector<float> total(columns);
  add_blocks(&sums[0], blocks, columns, total.data());
  for (size_t t = 0; t < tiles.size(); t++)
    std::copy_n(total.data() + t * kTileColumns, tiles[t].count, gradients.bias + tiles[t].column);
}

}  // namespace turbogr
