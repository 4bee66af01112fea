// The small matrix product that every kernel here is made of: ATen's brgemm.
//
// C[M, N] (+)= A[M, K] B[K, N], sums in float32. In float32 oneDNN generates a kernel for each shape (AVX2 or better);
// elsewhere ATen itself takes its BLAS. In bfloat16 B comes in pairs of rows ([K / 2, N, 2], "packed"), which only
// oneDNN serves: where the machine has no bf16 dot product, the kernels convert to float32 as they pack.
//
// It runs at 95 % of the registers' peak from 64 rows on, for any leading dimension; keep M and N multiples of 16.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

namespace turbogr {

using c10::BFloat16;
using c10::Half;

inline void multiply(int64_t M, int64_t N, int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb,
                     float* C, int64_t ldc, bool add) {
  at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, A, B, C, false);
}

inline void multiply(int64_t M, int64_t N, int64_t K, const BFloat16* A, int64_t lda, const BFloat16* B, int64_t ldb,
                     float* C, int64_t ldc, bool add) {
  at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, A, B, C, true);
}

// At the end of a thread's work: on machines with tiles (AMX) their state is given back.
inline void release_multiply(bool packed) { at::native::cpublas::brgemm_release(packed); }

// Whether packed bf16 can be multiplied here: the compiler was told of the machine's instruction, and oneDNN, which may
// be held back (ONEDNN_MAX_CPU_ISA) or switched off, takes a tile of it.
inline bool packed_bf16() {
#if defined(__AVX512BF16__)
  static const bool taken = [] {
    alignas(64) BFloat16 a[16 * 32] = {}, b[32 * 32] = {};
    alignas(64) float c[16 * 32];
    try {
      multiply(16, 32, 32, a, 32, b, 32, c, 32, false);
      release_multiply(true);
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }();
  return taken && at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

// Whether oneDNN generates the float32 product, as far as can be told from outside: ATen asks it for AVX2 and does not
// say what it answers. For people to read; no kernel depends on it.
inline bool generated_float32() {
#if defined(__x86_64__)
  static const bool allowed = [] {
    const char* most = std::getenv("ONEDNN_MAX_CPU_ISA");
    if (most == nullptr) most = std::getenv("DNNL_MAX_CPU_ISA");
    const std::string name = most == nullptr ? "" : most;
    return __builtin_cpu_supports("avx2") && name != "SSE41" && name != "AVX";
  }();
  return allowed && at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

// FLOP/s on tiles of 64 x 256 x 64 that stay in cache, on all threads at once. The best of three runs.
template <class T>
double multiply_rate() {
  constexpr int64_t M = 64, N = 256, K = 64;
  const int64_t threads = at::get_num_threads(), times = sizeof(T) == 4 ? 1000 : 2000;
  std::vector<T> a(threads * M * K, T(1.f)), b(threads * K * N, T(1.f));
  std::vector<float> c(threads * M * N);
  double best = 1e30;
  for (int run = 0; run < 3; run++) {
    const auto start = std::chrono::steady_clock::now();
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < times; i++)
          multiply(M, N, K, &a[t * M * K], K, &b[t * K * N], N, &c[t * M * N], N, false);
      release_multiply(sizeof(T) == 2);
    });
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return static_cast<double>(threads * times) * 2. * M * N * K / best;
}

}  // namespace turbogr
