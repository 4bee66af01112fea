// Large results and workspaces on memory that the kernels use again, step after step.
//
// The system hands out a new tensor of 100 MB in pages of 4 KiB as they are touched and takes them back when it is freed:
// a fifth of the time of an eager projection goes there. What is freed here is kept for the next call. Never more is held
// than was in use at once, and what is new is asked for in pages of 2 MiB where the system grants them.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <tuple>
#include <unordered_map>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "workspace.h"

namespace turbogr {

constexpr size_t kHugePage = 2 << 20;

class ReusedMemory final : public c10::Allocator {
 public:
  // One for each extension. Never destroyed: tensors on it may live to the end of the process.
  static ReusedMemory& get() {
    static auto* memory = new ReusedMemory;
    return *memory;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* block = take(bytes);
    return {block, block, &ReusedMemory::give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &ReusedMemory::give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  void* take(size_t bytes) {
    const size_t size = rounded(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = free_.lower_bound(size);
    if (found != free_.end() && found->first <= size + size / 4) {
      void* block = found->second;
      used_ += found->first, held_ -= found->first;
      sizes_.emplace(block, found->first);
      free_.erase(found);
      most_used_ = std::max(most_used_, used_);
      return block;
    }
    used_ += size, most_used_ = std::max(most_used_, used_);
    while (!free_.empty() && used_ + held_ > most_used_) {
      held_ -= free_.begin()->first;
      std::free(free_.begin()->second);
      free_.erase(free_.begin());
    }
    void* block = std::aligned_alloc(kHugePage, size);
    if (block == nullptr) {
      used_ -= size;
      throw std::bad_alloc();
    }
#if defined(__linux__)
    madvise(block, size, MADV_HUGEPAGE);
#endif
    sizes_.emplace(block, size);
    return block;
  }
  // Bytes that are in use, that are held for the next calls, and the most that were in use.
  std::tuple<size_t, size_t, size_t> bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {used_, held_, most_used_};
  }
  static void give_back(void* block) {
    auto& memory = get();
    const std::lock_guard<std::mutex> lock(memory.mutex_);
    const auto found = memory.sizes_.find(block);
    memory.used_ -= found->second, memory.held_ += found->second;
    memory.free_.emplace(found->second, block);
    memory.sizes_.erase(found);
  }

 private:
  // Few different sizes, so that batches of about as many tokens find each other's blocks: steps of an eighth at most.
  static size_t rounded(size_t bytes) {
    size_t step = kHugePage;
    while (step * 16 < bytes) step *= 2;
    return (std::max<size_t>(bytes, 1) + step - 1) / step * step;
  }
  std::mutex mutex_;
  std::multimap<size_t, void*> free_;         // by size
  std::unordered_map<void*, size_t> sizes_;  // of the blocks in use
  size_t used_ = 0, held_ = 0, most_used_ = 0;
};

// Small pieces come from torch's own memory, as all do under AddressSanitizer, which must see where each ends.
inline c10::Allocator& memory_for(size_t bytes) {
  return bytes < kHugePage || TURBOGR_SANITIZED ? *c10::GetAllocator(c10::DeviceType::CPU) : ReusedMemory::get();
}

// A tensor for results, uninitialised, of a floating-point type on CPU.
inline at::Tensor result_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = c10::multiply_integers(sizes) * options.dtype().itemsize();
  return at::detail::empty_generic(sizes, &memory_for(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

// Floats that the threads of a kernel share, uninitialised and counted as workspace.
class SharedFloats {
 public:
  explicit SharedFloats(int64_t n) : bytes_(n * static_cast<int64_t>(sizeof(float))), data_(memory_for(bytes_).allocate(bytes_)) { workspace_count.add(bytes_); }
  ~SharedFloats() { workspace_count.now -= bytes_; }
  SharedFloats(const SharedFloats&) = delete;
  SharedFloats& operator=(const SharedFloats&) = delete;
  float& operator[](int64_t i) const { return static_cast<float*>(data_.get())[i]; }

 private:
  int64_t bytes_;
  c10::DataPtr data_;
};

// Fetches rows of floats that will be read (or, with Write, written) while a matrix product keeps the thread busy.
template <bool Write>
inline void prefetch_rows(const float* row, int64_t stride, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++, row += stride)
    for (int64_t c = 0; c < width; c += 16) __builtin_prefetch(row + c, Write ? 1 : 0, 3);
}

}  // namespace turbogr
