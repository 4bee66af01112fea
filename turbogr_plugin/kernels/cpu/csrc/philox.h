// Philox4x32-10 for a row of consecutive blocks: the words of kernels/keyed_random.py, to the bit.
//
// Lanes are 64 bits wide and hold 32-bit words in their lower halves. The multiply instruction takes the lower halves
// alone, so what a round leaves in the upper ones is never cleared: six instructions for each vector and round.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace turbogr {

// What the draws of one row have in common: the counter but for its block, and the key.
struct PhiloxRow {
  uint32_t lane, sample_low, sample_high, key0, key1;
};

// Row of a sample id for dropout; `purpose` is that of kernels/keyed_random.py.
inline PhiloxRow philox_row(int64_t sample, uint32_t layer, uint32_t seed, uint32_t step) {
  constexpr uint64_t purpose = 2;
  return {layer, static_cast<uint32_t>(sample), static_cast<uint32_t>((static_cast<uint64_t>(sample) >> 32) | purpose << 24),
          seed, step};
}

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;

// Words are written in groups of this many blocks: the buffer must have room for `blocks` rounded up to it, times four.
constexpr int64_t kPhiloxGroup = 8;

#if defined(__AVX512F__)

// The order of blocks in the lanes is the one in which the two unpacks below give consecutive blocks.
inline void philox_group(uint32_t first, const PhiloxRow& row, uint32_t* words) {
  const __m512i m0 = _mm512_set1_epi64(kPhiloxMultiplier0), m1 = _mm512_set1_epi64(kPhiloxMultiplier1);
  __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  __m512i c1 = _mm512_set1_epi64(row.lane), c2 = _mm512_set1_epi64(row.sample_low);
  __m512i c3 = _mm512_set1_epi64(row.sample_high);
  uint32_t k0 = row.key0, k1 = row.key1;
  for (int round = 0; round < kPhiloxRounds; round++) {
    const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
    c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1, _mm512_set1_epi64(k0), 0x96);  // xor of three
    c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, _mm512_set1_epi64(k1), 0x96);
    c1 = p1, c3 = p0;
    k0 += kPhiloxWeyl0, k1 += kPhiloxWeyl1;
  }
  const __m512i low = _mm512_set1_epi64(0xFFFFFFFF);
  const __m512i w01 = _mm512_or_si512(_mm512_and_si512(c0, low), _mm512_slli_epi64(c1, 32));
  const __m512i w23 = _mm512_or_si512(_mm512_and_si512(c2, low), _mm512_slli_epi64(c3, 32));
  _mm512_storeu_si512(words, _mm512_unpacklo_epi64(w01, w23));
  _mm512_storeu_si512(words + 16, _mm512_unpackhi_epi64(w01, w23));
}

#elif defined(__AVX2__)

inline void philox_group(uint32_t first, const PhiloxRow& row, uint32_t* words) {
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxMultiplier0), m1 = _mm256_set1_epi64x(kPhiloxMultiplier1);
  const __m256i low = _mm256_set1_epi64x(0xFFFFFFFF);
  for (int half = 0; half < 2; half++) {
    __m256i c0 = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(first) + 4 * half), _mm256_setr_epi64x(0, 2, 1, 3));
    __m256i c1 = _mm256_set1_epi64x(row.lane), c2 = _mm256_set1_epi64x(row.sample_low);
    __m256i c3 = _mm256_set1_epi64x(row.sample_high);
    uint32_t k0 = row.key0, k1 = row.key1;
    for (int round = 0; round < kPhiloxRounds; round++) {
      const __m256i p0 = _mm256_mul_epu32(c0, m0), p1 = _mm256_mul_epu32(c2, m1);
      c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), _mm256_set1_epi64x(k0));
      c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), _mm256_set1_epi64x(k1));
      c1 = p1, c3 = p0;
      k0 += kPhiloxWeyl0, k1 += kPhiloxWeyl1;
    }
    const __m256i w01 = _mm256_or_si256(_mm256_and_si256(c0, low), _mm256_slli_epi64(c1, 32));
    const __m256i w23 = _mm256_or_si256(_mm256_and_si256(c2, low), _mm256_slli_epi64(c3, 32));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 16 * half), _mm256_unpacklo_epi64(w01, w23));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 16 * half + 8), _mm256_unpackhi_epi64(w01, w23));
  }
}

#else

inline void philox_group(uint32_t first, const PhiloxRow& row, uint32_t* words) {
  for (uint32_t block = 0; block < kPhiloxGroup; block++) {
    uint32_t c0 = first + block, c1 = row.lane, c2 = row.sample_low, c3 = row.sample_high;
    uint32_t k0 = row.key0, k1 = row.key1;
    for (int round = 0; round < kPhiloxRounds; round++) {
      const uint64_t p0 = static_cast<uint64_t>(c0) * kPhiloxMultiplier0;
      const uint64_t p1 = static_cast<uint64_t>(c2) * kPhiloxMultiplier1;
      c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(p1), c3 = static_cast<uint32_t>(p0);
      k0 += kPhiloxWeyl0, k1 += kPhiloxWeyl1;
    }
    words[4 * block] = c0, words[4 * block + 1] = c1, words[4 * block + 2] = c2, words[4 * block + 3] = c3;
  }
}

#endif

// Four words for each of the blocks first, first + 1, ...
inline void philox_words(uint32_t first, int64_t blocks, const PhiloxRow& row, uint32_t* words) {
  for (int64_t block = 0; block < blocks; block += kPhiloxGroup)
    philox_group(first + static_cast<uint32_t>(block), row, words + 4 * block);
}

}  // namespace turbogr
