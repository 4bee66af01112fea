// Memory that is written for the first time: large tensors and arrays on pages of 2 MiB.
//
// The system hands out a tensor of 100 MB in pages of 4 KiB as they are touched, 25,000 interrupts that took an eighth of
// a projection's time. Where it lets programs ask for larger pages (transparent huge pages set to madvise, the default of
// most distributions), this does; elsewhere nothing changes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "workspace.h"

namespace turbogr {

constexpr uintptr_t kHugePage = 2 << 20;

inline void ask_for_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t start = reinterpret_cast<uintptr_t>(data), end = start + static_cast<uintptr_t>(bytes);
  const uintptr_t first = (start + kHugePage - 1) / kHugePage * kHugePage, last = end / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// A tensor for results, uninitialised.
inline at::Tensor fresh_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty(sizes, options);
  ask_for_huge_pages(tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
  return tensor;
}

// Floats that the threads of a kernel share, uninitialised and counted as workspace.
class FreshArray {
 public:
  explicit FreshArray(int64_t n) : bytes_(n * static_cast<int64_t>(sizeof(float))) {
    const uintptr_t alignment = bytes_ >= static_cast<int64_t>(kHugePage) ? kHugePage : kAlignment;
    const uintptr_t size = (static_cast<uintptr_t>(bytes_) + alignment) / alignment * alignment;
    data_.reset(static_cast<float*>(std::aligned_alloc(alignment, size)));
    if (data_ == nullptr) throw std::bad_alloc();
    ask_for_huge_pages(data_.get(), bytes_);
    workspace_count.add(bytes_);
  }
  ~FreshArray() { workspace_count.now -= bytes_; }
  FreshArray(const FreshArray&) = delete;
  FreshArray& operator=(const FreshArray&) = delete;
  float& operator[](int64_t i) const { return data_.get()[i]; }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  int64_t bytes_;
  std::unique_ptr<float, Free> data_;
};

// Fetches rows of floats that will be read (or, with Write, written) while a matrix product keeps the thread busy.
template <bool Write>
inline void prefetch_rows(const float* row, int64_t stride, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++, row += stride)
    for (int64_t c = 0; c < width; c += 16) __builtin_prefetch(row + c, Write ? 1 : 0, 3);
}

}  // namespace turbogr
