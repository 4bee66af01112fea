// Who works on what in a backward, so that sums come out the same for any number of threads.
//
// A stream is (segment of the batch, group of heads); its blocks of keys are taken in order. Block n adds to the
// gradient of a tile of queries only after the last earlier block that touches this tile has, so each sum has one
// order. A thread stays with its stream, then takes the costliest one that nobody has begun, and only at the end joins
// a busy one, where it may wait: a fixed interleaving of blocks lets one thread that the system has put aside stall the
// others (measured: 308 against 422 GFLOP/s). No deadlock: a block waits only for earlier blocks of its stream, which
// were handed out before it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "workspace.h"

namespace turbogr {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Stream {
  int64_t segment, head, blocks;
  std::atomic<int32_t>* turns;  // of each tile of queries: 1 + the last block that has added to it; 0: none
  std::atomic<int32_t>* done;   // blocks whose table gradients are added
  int64_t next = 0;
  int active = 0;
};

class Streams {
 public:
  // In the order in which they are to be begun; see `add`.
  void add(int64_t segment, int64_t head, int64_t blocks, int64_t query_tiles) {
    streams_.push_back({segment, head, blocks, nullptr, nullptr});
    tiles_.push_back(query_tiles);
  }
  void start() {
    int64_t total = 0;
    for (int64_t n : tiles_) total += n + 1;
    counters_ = SharedArray<std::atomic<int32_t>>(total);
    std::atomic<int32_t>* at = counters_.get();
    for (size_t i = 0; i < streams_.size(); i++) {
      streams_[i].turns = at;
      streams_[i].done = at + tiles_[i];
      at += tiles_[i] + 1;
    }
  }
  int64_t size() const { return streams_.size(); }
  const Stream& operator[](int64_t i) const { return streams_[i]; }
  int64_t index(const Stream* stream) const { return stream - streams_.data(); }

  // The next block for a thread whose last one was of `current` (null at first); false: there are no more.
  bool pick(Stream*& current, int64_t& block) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (current != nullptr) current->active--;
    if (current == nullptr || current->active > 0 || current->next == current->blocks) current = next_stream();
    if (current == nullptr) return false;
    current->active++;
    block = current->next++;
    return true;
  }

  // The stream that will be begun next, to fetch its rows ahead: only a guess. Null: all have been begun.
  const Stream* upcoming() const {
    const size_t next = fresh_.load(std::memory_order_relaxed);
    return next < streams_.size() ? &streams_[next] : nullptr;
  }

  // Until `counter` is `value`. Throws where another thread has failed, which would otherwise be waited for without
  // end.
  void wait(const std::atomic<int32_t>& counter, int32_t value) const {
    for (int spins = 0; counter.load(std::memory_order_acquire) != value; spins++) {
      if (failed_.load(std::memory_order_relaxed)) throw std::runtime_error("another thread of this kernel failed");
      if (spins < 2000)
        pause();
      else
        std::this_thread::yield();
    }
  }
  void fail() { failed_ = true; }

 private:
  std::vector<Stream> streams_;
  std::vector<int64_t> tiles_;
  SharedArray<std::atomic<int32_t>> counters_;
  std::mutex mutex_;
  std::atomic<bool> failed_{false};
  std::atomic<size_t> fresh_{0};  // streams before it have been begun
  size_t open_ = 0;

  Stream* next_stream() {
    if (fresh_ < streams_.size()) return &streams_[fresh_++];
    while (open_ < streams_.size() && streams_[open_].next == streams_[open_].blocks) open_++;
    Stream* best = nullptr;
    for (size_t i = open_; i < streams_.size(); i++) {
      Stream& stream = streams_[i];
      if (stream.next < stream.blocks && (best == nullptr || stream.active < best->active)) best = &stream;
    }
    return best;
  }
};

}  // namespace turbogr
