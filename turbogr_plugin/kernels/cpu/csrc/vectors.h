// Arithmetic on vectors of floats: at::vec everywhere, AVX-512 instructions where they are much better.
//
// Tiles have kLanes columns. A row of a tile is worked on as n vectors in registers; n is a template argument, chosen
// by the number of lanes in use (by_lanes).
#pragma once

#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace turbogr {

using c10::BFloat16;
using c10::Half;
using V = at::vec::Vectorized<float>;

constexpr int64_t kLanes = 64;      // columns of a tile
constexpr int64_t kHalfLanes = 32;  // of tiles at the border of what a query sees: half the waste of masked pairs

// Whether sums and activations may have the precision of bf16 results.
template <class C>
constexpr bool kLow = !std::is_same_v<C, float>;

// Columns that are computed for n valid ones; bf16 is stored two vectors at a time.
template <class C>
inline int64_t padded_lanes(int64_t n) {
  constexpr int64_t g = kLow<C> ? 32 : 16;
  return (n + g - 1) / g * g;
}
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// f(std::integral_constant<int, number of vectors>) for a number of lanes, a multiple of 16
template <class F>
inline void by_lanes(int64_t lanes, F&& f) {
  constexpr int m = V::size();
  switch (lanes / 16) {
    case 1:
      f(std::integral_constant<int, 16 / m>());
      break;
    case 2:
      f(std::integral_constant<int, 32 / m>());
      break;
    case 3:
      f(std::integral_constant<int, 48 / m>());
      break;
    default:
      f(std::integral_constant<int, 64 / m>());
  }
}

// 1 / (1 + exp(-x)). With AVX-512: 2^(-x log2 e) by a polynomial of degree 5 (relative error 7e-8) or 4 (3e-6, enough
// for bf16), then a reciprocal of 14 bits with one Newton step (none for bf16): 14 instructions, faster than exp_u20
// and a division. The argument is held below 2^100, so that the denominator stays finite, and the result is 0 there, so
// that its product with a score of -1e38 is, too (NaN stays NaN in that product).
template <bool Low>
inline V sigmoid(V x) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512 t = _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)), _mm512_set1_ps(100.f));
  const __m512 n = _mm512_roundscale_ps(t, 8), f = _mm512_sub_ps(t, n);
  __m512 p;
  if constexpr (Low) {
    p = _mm512_fmadd_ps(_mm512_set1_ps(0.009570101652f), f, _mm512_set1_ps(0.0559178621f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2402474485f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931218145f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.9999992614f));
  } else {
    p = _mm512_fmadd_ps(_mm512_set1_ps(0.001327647174f), f, _mm512_set1_ps(0.00967554154f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.05550713276f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2402211972f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931469671f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.000000072f));
  }
  const __m512 d = _mm512_add_ps(_mm512_scalef_ps(p, n), _mm512_set1_ps(1.f));
  const __mmask16 open = _mm512_cmp_ps_mask(t, _mm512_set1_ps(100.f), _CMP_LT_OQ);
  const __m512 r = _mm512_maskz_rcp14_ps(open, d);
  if constexpr (Low) return V(r);
  return V(_mm512_mul_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(2.f))));
#else
  const V one(1.f);
  return one / (one + x.neg().exp());
#endif
}

// ---- rows of one type from rows of another ----

inline void store_row(float* to, const V* x, int n) {
  for (int c = 0; c < n; c++) x[c].store(to + c * V::size());
}
inline void store_row(BFloat16* to, const V* x, int n) {
#if defined(__AVX512BF16__)
  for (int c = 0; c + 1 < n; c += 2)
    _mm512_storeu_si512(to + c * V::size(), (__m512i)_mm512_cvtne2ps_pbh(x[c + 1], x[c]));
#else
  for (int c = 0; c < n; c++) {
    float t[V::size()];
    x[c].store(t);
    for (int k = 0; k < V::size(); k++) to[c * V::size() + k] = BFloat16(t[k]);
  }
#endif
}

// A vector loop: for rows of 64 floats cheaper than a call of memcpy.
template <class T>
inline void convert_row(const T* from, T* to, int64_t n) {
  constexpr int64_t m = at::vec::Vectorized<T>::size();
  int64_t i = 0;
  for (; i + m <= n; i += m) at::vec::Vectorized<T>::loadu(from + i).store(to + i);
  for (; i < n; i++) to[i] = from[i];
}
inline void convert_row(const BFloat16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) {  // a bf16 is the upper half of a float
    uint16_t half;
    std::memcpy(&half, from + i, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    std::memcpy(to + i, &bits, 4);
  }
}
inline void convert_row(const Half* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(CPU_CAPABILITY_AVX512)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif defined(CPU_CAPABILITY_AVX2)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < n; i++) to[i] = static_cast<float>(from[i]);
}

// to[i] = factor * from[i], rounded to T
template <class T>
inline void scale_row(const float* from, float factor, T* to, int64_t n) {
  if constexpr (std::is_same_v<T, float>) {
    const V f(factor);
    int64_t i = 0;
    for (; i + V::size() <= n; i += V::size()) (V::loadu(from + i) * f).store(to + i);
    for (; i < n; i++) to[i] = from[i] * factor;
  } else {
    for (int64_t i = 0; i < n; i++) to[i] = T(from[i] * factor);
  }
}

inline bool all_finite(const float* x, int64_t n) {
  V sum(0.f);
  float rest = 0.f;
  int64_t i = 0;
  for (; i + V::size() <= n; i += V::size()) sum = at::vec::fmadd(V::loadu(x + i), V(0.f), sum);
  for (; i < n; i++) rest += x[i] * 0.f;
  alignas(64) float lanes[V::size()];
  sum.store(lanes);
  for (float lane : lanes) rest += lane;
  return rest == 0.f;
}

// ---- transposing ----

// 16 x 16 transpose of 32-bit values: sink(c, column c as 16 floats in vectors). With AVX-512 the 128-bit loads do half
// of the shuffling.
template <class F>
inline void transpose16(const float* from, int64_t ld, F&& sink) {
#if defined(CPU_CAPABILITY_AVX512)
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    __m512 x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const float* p = from + i * ld + 4 * c;
      x[i] = _mm512_castps128_ps512(_mm_loadu_ps(p));
      x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(p + 4 * ld), 1);
      x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(p + 8 * ld), 2);
      x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(p + 12 * ld), 3);
    }
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1])),
                  b = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
    const __m512d d = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3])),
                  e = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
    sink(4 * c, std::array<V, 1>{V(_mm512_castpd_ps(_mm512_unpacklo_pd(a, d)))});
    sink(4 * c + 1, std::array<V, 1>{V(_mm512_castpd_ps(_mm512_unpackhi_pd(a, d)))});
    sink(4 * c + 2, std::array<V, 1>{V(_mm512_castpd_ps(_mm512_unpacklo_pd(b, e)))});
    sink(4 * c + 3, std::array<V, 1>{V(_mm512_castpd_ps(_mm512_unpackhi_pd(b, e)))});
  }
#else
  alignas(64) float turned[16 * 16];
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++) turned[c * 16 + r] = from[r * ld + c];
  for (int c = 0; c < 16; c++) {
    std::array<V, 16 / V::size()> column;
    for (int k = 0; k < 16 / V::size(); k++) column[k] = V::loadu(turned + c * 16 + k * V::size());
    sink(c, column);
  }
#endif
}

// to[c][r] = from[r][c] for R rows and C columns; rows from R to the next multiple of 16 up to `padded` are zeros.
inline void transpose(const float* from, int64_t ld, float* to, int64_t ldt, int64_t R, int64_t C, int64_t padded) {
  for (int64_t r = 0; r < padded; r += 16)
    for (int64_t c = 0; c < C; c += 16) {
      const int64_t m = std::clamp<int64_t>(R - r, 0, 16), n = std::min<int64_t>(16, C - c);
      float* o = to + c * ldt + r;
      if (m == 16 && n == 16) {
        transpose16(from + r * ld + c, ld, [&](int y, const auto& column) {
          for (size_t k = 0; k < column.size(); k++) column[k].store(o + y * ldt + k * V::size());
        });
      } else {
        for (int64_t y = 0; y < n; y++)
          for (int64_t x = 0; x < 16; x++) o[y * ldt + x] = x < m ? from[(r + x) * ld + c + y] : 0.f;
      }
    }
}

// to[r][d] (+)= factor * from[d][r] for R rows and D columns
inline void add_transposed(const float* from, int64_t ld, float* to, int64_t ldt, int64_t R, int64_t D, float factor,
                           bool add) {
  const V f(factor);
  for (int64_t r = 0; r < R; r += 16)
    for (int64_t d = 0; d < D; d += 16) {
      const int64_t m = std::min<int64_t>(16, R - r), n = std::min<int64_t>(16, D - d);
      float* o = to + r * ldt + d;
      if (n == 16 && m == 16) {
        transpose16(from + d * ld + r, ld, [&](int y, const auto& column) {
          for (size_t k = 0; k < column.size(); k++) {
            float* at = o + y * ldt + k * V::size();
            (add ? at::vec::fmadd(column[k], f, V::loadu(at)) : column[k] * f).store(at);
          }
        });
      } else {
        for (int64_t y = 0; y < m; y++)
          for (int64_t z = 0; z < n; z++) {
            const float x = factor * from[(d + z) * ld + r + y];
            o[y * ldt + z] = add ? o[y * ldt + z] + x : x;
          }
      }
    }
}

}  // namespace turbogr
