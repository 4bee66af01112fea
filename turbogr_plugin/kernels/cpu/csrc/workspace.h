// Memory of a kernel beyond its inputs and outputs: one aligned block per thread, cut into pieces, and counted.
//
// A kernel's buffers are a struct whose constructor takes its pieces from a Cutter. It is made twice: once to find the
// size of the block, once on the block, so the size is written nowhere. Under AddressSanitizer a poisoned gap follows
// each piece, so that running over the end of one is an error and not a write into the next.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define TURBOGR_SANITIZED 1
#else
#define TURBOGR_SANITIZED 0
#endif

namespace turbogr {

constexpr size_t kAlignment = 64;

// Bytes that are held now and the most that were, by all threads together.
struct WorkspaceCount {
  std::atomic<int64_t> now{0}, peak{0};
  void add(int64_t bytes) {
    const int64_t total = now += bytes;
    int64_t seen = peak;
    while (total > seen && !peak.compare_exchange_weak(seen, total)) {
    }
  }
};
inline WorkspaceCount workspace_count;

class Cutter {
 public:
  explicit Cutter(char* base) : base_(base) {}
  template <class T>
  T* take(int64_t n) {
    const size_t bytes = (n * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += bytes;
#if TURBOGR_SANITIZED
    if (base_ != nullptr)
      __asan_poison_memory_region(base_ + used_ - bytes + n * sizeof(T), bytes - n * sizeof(T) + kAlignment);
    used_ += kAlignment;
#endif
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// The buffers of one thread: `Buffers(Cutter&, arguments...)` on a block of its own.
template <class Buffers>
class Workspace {
 public:
  template <class... Arguments>
  explicit Workspace(const Arguments&... arguments) {
    Cutter measure(nullptr);
    Buffers(measure, arguments...);
    bytes_ = measure.used();
    block_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, bytes_ + kAlignment)));
    if (block_ == nullptr) throw std::bad_alloc();
    workspace_count.add(bytes_);
    Cutter cut(block_.get());
    buffers_ = std::make_unique<Buffers>(cut, arguments...);
  }
  ~Workspace() {
    workspace_count.now -= bytes_;
#if TURBOGR_SANITIZED
    __asan_unpoison_memory_region(block_.get(), bytes_);
#endif
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  Buffers& operator*() { return *buffers_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> block_;
  std::unique_ptr<Buffers> buffers_;
  int64_t bytes_ = 0;
};

// Memory that the threads share, counted like the rest. Starts as zeros.
template <class T>
class SharedArray {
 public:
  explicit SharedArray(int64_t n = 0) : n_(n), data_(n > 0 ? new T[n]() : nullptr) {
    workspace_count.add(n_ * sizeof(T));
  }
  SharedArray(SharedArray&& other) noexcept : n_(std::exchange(other.n_, 0)), data_(std::move(other.data_)) {}
  SharedArray& operator=(SharedArray&& other) noexcept {
    std::swap(n_, other.n_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~SharedArray() { workspace_count.now -= n_ * static_cast<int64_t>(sizeof(T)); }
  T* get() const { return data_.get(); }
  T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return n_; }

 private:
  int64_t n_;
  std::unique_ptr<T[]> data_;
};

}  // namespace turbogr
