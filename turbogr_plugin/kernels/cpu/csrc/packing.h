// Rows of the inputs as operands of the matrix product, padded with zeros to whole tiles.
//
// Operands are always copied: rows of one head stand H * D apart, which falls into few sets of the L1 cache, and the
// copy is where another type becomes the one that is computed with. Names of the forms:
//   rows      A operand [R, Dk]: rows as they are
//   pairs     B operand [R, D]: rows as they are; in bf16 rows 2r and 2r + 1 interleaved
//   columns   B operand [D, R]: transposed; in bf16 in pairs of d
//   turned    A operand [D, R]: transposed, never in pairs
#pragma once

#include "vectors.h"

namespace turbogr {

// One of the inputs [T, H, D]: strides in elements, that of the last dimension is 1.
template <class T>
struct Operand {
  T* data;
  int64_t token, head;
  T* row(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

// Dims of A operands in bf16 are even: the product takes them two at a time.
template <class C>
inline int64_t padded_dim(int64_t D) {
  return kLow<C> ? round_up(D, 2) : D;
}

template <class T>
inline void prefetch_rows(const T* rows, int64_t ld, int64_t R, int64_t D) {
  for (int64_t r = 0; r < R; r++)
    for (int64_t o = 0; o < D * static_cast<int64_t>(sizeof(T)); o += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(rows + r * ld) + o, 0, 2);
}

template <class In, class C>
inline void pack_rows(const In* from, int64_t ld, C* to, int64_t R, int64_t D, int64_t Dk, int64_t padded) {
  for (int64_t r = 0; r < padded; r++) {
    if (r < R) convert_row(from + r * ld, to + r * Dk, D);
    const int64_t filled = r < R ? D : 0;
    if (filled < Dk) std::memset(static_cast<void*>(to + r * Dk + filled), 0, (Dk - filled) * sizeof(C));
  }
}

// Rows a and b as one row of pairs.
inline void interleave(const BFloat16* a, const BFloat16* b, BFloat16* to, int64_t n) {
  const uint16_t *x = reinterpret_cast<const uint16_t*>(a), *y = reinterpret_cast<const uint16_t*>(b);
  uint32_t* z = reinterpret_cast<uint32_t*>(to);
  for (int64_t i = 0; i < n; i++) z[i] = static_cast<uint32_t>(x[i]) | (static_cast<uint32_t>(y[i]) << 16);
}

template <class In>
inline void pack_pairs(const In* from, int64_t ld, float* to, int64_t R, int64_t D, int64_t padded) {
  pack_rows(from, ld, to, R, D, D, padded);
}
inline void pack_pairs(const BFloat16* from, int64_t ld, BFloat16* to, int64_t R, int64_t D, int64_t padded) {
  uint16_t* o = reinterpret_cast<uint16_t*>(to);
  for (int64_t r = 0; r < padded; r += 2, o += 2 * D) {
    if (r + 1 < R) {
      interleave(from + r * ld, from + (r + 1) * ld, reinterpret_cast<BFloat16*>(o), D);
    } else if (r < R) {
      for (int64_t i = 0; i < D; i++) {
        std::memcpy(o + 2 * i, from + r * ld + i, 2);
        o[2 * i + 1] = 0;
      }
    } else {
      std::memset(o, 0, 2 * D * sizeof(uint16_t));
    }
  }
}

// `scratch` [padded, D] is used where the type changes.
template <class In>
inline void pack_columns(const In* from, int64_t ld, float* to, float* scratch, int64_t R, int64_t D, int64_t padded) {
  if constexpr (std::is_same_v<In, float>) {
    transpose(from, ld, to, padded, R, D, padded);
  } else {
    pack_rows(from, ld, scratch, R, D, D, padded);
    transpose(scratch, D, to, padded, padded, D, padded);
  }
}
inline void pack_columns(const BFloat16* from, int64_t ld, BFloat16* to, BFloat16*, int64_t R, int64_t D,
                         int64_t padded) {
  // Pairs of d are 32-bit values, where the rows allow to read them so.
  if (D % 2 == 0 && ld % 2 == 0 && reinterpret_cast<uintptr_t>(from) % 4 == 0) {
    transpose(reinterpret_cast<const float*>(from), ld / 2, reinterpret_cast<float*>(to), padded, R, D / 2, padded);
    return;
  }
  for (int64_t c = 0; c < round_up(D, 2); c++)
    for (int64_t r = 0; r < padded; r++)
      to[(c / 2) * padded * 2 + r * 2 + c % 2] = (r < R && c < D) ? from[r * ld + c] : BFloat16(0.f);
}

// Both B operands of one tile of rows.
template <class In>
inline void pack_pairs_and_columns(const In* from, int64_t ld, float* pairs, float* columns, int64_t R, int64_t D,
                                   int64_t padded) {
  pack_pairs(from, ld, pairs, R, D, padded);
  transpose(pairs, D, columns, padded, padded, D, padded);
}
inline void pack_pairs_and_columns(const BFloat16* from, int64_t ld, BFloat16* pairs, BFloat16* columns, int64_t R,
                                   int64_t D, int64_t padded) {
  pack_pairs(from, ld, pairs, R, D, padded);
  pack_columns(from, ld, columns, nullptr, R, D, padded);
}

// From packed rows [padded, Dk].
inline void pack_turned(const float* rows, int64_t Dk, float* to, int64_t ldt, int64_t D, int64_t padded) {
  transpose(rows, Dk, to, ldt, padded, D, padded);
}
inline void pack_turned(const BFloat16* rows, int64_t Dk, BFloat16* to, int64_t ldt, int64_t D, int64_t padded) {
  for (int64_t r = 0; r < padded; r += 16)
    for (int64_t c = 0; c < D; c++)
      for (int64_t x = 0; x < 16; x++) to[c * ldt + r + x] = rows[(r + x) * Dk + c];
}

}  // namespace turbogr
