// Rows of tables in fp32, fp16 and bf16: conversion, copies that pass the caches by, and sums in float32.
//
// The arithmetic is that of single operators of ATen, element by element, and the build forbids the compiler to fuse a
// product with a sum: sums and updates are the same bits as those of the reference, whatever the vectors' width.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace turbogr {

// f(a value of the type behind a dtype)
template <class F>
void by_float_type(at::ScalarType type, F&& f) {
  switch (type) {
    case at::kFloat: f(float()); break;
    case at::kHalf: f(Half()); break;
    case at::kBFloat16: f(BFloat16()); break;
    default: TORCH_CHECK(false, "tables are served in float32, float16 and bfloat16, got ", type);
  }
}

// A row in float32: itself, or converted into `buffer`.
inline const float* floats_of(const float* row, float*, int64_t) { return row; }
template <class T>
inline const float* floats_of(const T* row, float* buffer, int64_t n) {
  convert_row(row, buffer, n);
  return buffer;
}

// Rounds to nearest, ties to even, as ATen does.
inline void round_row(const float* from, float* to, int64_t n) {
  if (from != to) convert_row(from, to, n);
}
inline void round_row(const float* from, Half* to, int64_t n) {
  int64_t i = 0;
#if defined(CPU_CAPABILITY_AVX512)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(CPU_CAPABILITY_AVX2)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; i++) to[i] = static_cast<Half>(from[i]);
}
// In integers: the instruction of AVX-512 takes numbers below 1e-38 for zeros.
inline void round_row(const float* from, BFloat16* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const uint16_t half = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : static_cast<uint16_t>(rounded);
    std::memcpy(static_cast<void*>(to + i), &half, 2);
  }
}

// A row of one type from one of another.
template <class From, class To>
inline void convert(const From* from, To* to, float* buffer, int64_t n) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(static_cast<void*>(to), from, n * sizeof(To));
  } else if constexpr (std::is_same_v<To, float>) {
    convert_row(from, to, n);
  } else {
    round_row(floats_of(from, buffer, n), to, n);
  }
}

// Whether rows of so many bytes, one behind the other from `first` on, can be streamed: whole lines.
constexpr int64_t kLine = 64;
inline bool can_stream(const void* first, int64_t row_bytes) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  return row_bytes % kLine == 0 && reinterpret_cast<uintptr_t>(first) % kLine == 0;
#else
  return false;
#endif
}

// Copies whole lines past the caches: a result larger than them is neither read from memory first, nor does it push
// the tables' popular rows out. `drain_streams` must follow before another thread reads.
inline void stream_row(const void* from, void* to, int64_t bytes) {
  const auto* source = static_cast<const char*>(from);
  auto* target = static_cast<char*>(to);
#if defined(CPU_CAPABILITY_AVX512)
  for (int64_t i = 0; i < bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_loadu_si512(source + i));
#elif defined(CPU_CAPABILITY_AVX2)
  for (int64_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
#else
  std::memcpy(target, source, bytes);
#endif
}
inline void drain_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// What will be read goes to the second-level cache, which has more fetches under way at once than the first: measured,
// rows of 512 bytes at random places take 42 instead of 52 ns each.
template <bool Write = false>
inline void prefetch_bytes(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(row) + i, Write ? 1 : 0, 2);
  asm volatile("");  // GCC leaves out calls of functions that only fetch: to it they have no effect
}

// V::size() values in float32.
inline V load_floats(const float* row) { return V::loadu(row); }
template <class T>
inline V load_floats(const T* row) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
  if constexpr (std::is_same_v<T, Half>) {
    return V(_mm512_cvtph_ps(halves));
  } else {
    return V(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)));
  }
#else
  alignas(64) float values[V::size()];
  convert_row(row, values, V::size());
  return V::loadu(values);
#endif
}

inline void add_row(const float* row, float* sum, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) sum[i] += row[i];
}
inline void scale_in_place(float* row, float factor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) row[i] *= factor;
}
inline void divide_in_place(float* row, float divisor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) row[i] /= divisor;
}
// NaN stays NaN.
inline void clamp_in_place(float* row, float limit, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) row[i] = row[i] < -limit ? -limit : row[i] > limit ? limit : row[i];
}

// Sum of value(i) in float32, in the same order on every machine: 16 partial sums, then pairs of them.
constexpr int kPartialSums = 16;
template <class F>
inline float sum_of(int64_t n, F&& value) {
  float partial[kPartialSums] = {};
  int64_t i = 0;
  for (; i + kPartialSums <= n; i += kPartialSums)
#pragma omp simd
    for (int k = 0; k < kPartialSums; k++) partial[k] += value(i + k);
  for (int k = 0; i < n; i++, k++) partial[k] += value(i);
  for (int half = kPartialSums / 2; half > 0; half /= 2)
    for (int k = 0; k < half; k++) partial[k] += partial[k + half];
  return partial[0];
}

}  // namespace turbogr
