// Sums over tokens that are the same bits for any number of threads: partial sums of blocks of tokens, whoever took
// them, added up in the order of the blocks.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace turbogr {

// total[column] = sum over blocks of partial[block][column]
inline void add_blocks(const float* partial, int64_t blocks, int64_t columns, float* total) {
  at::parallel_for(0, columns, 256, [&](int64_t begin, int64_t end) {
    std::fill(total + begin, total + end, 0.f);
    for (int64_t block = 0; block < blocks; block++) {
#pragma omp simd
      for (int64_t i = begin; i < end; i++) total[i] += partial[block * columns + i];
    }
  });
}

}  // namespace turbogr
