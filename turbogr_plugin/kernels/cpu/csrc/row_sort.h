// Stable radix sort of (row, position) on all threads: groups a batch's positions by the row that they name, the
// positions of one row in their own order.
//
// Each thread counts and moves one stretch of the input, so what it moves to a bucket lies behind what earlier
// stretches move there: the result does not depend on the number of threads. At most 2048 buckets: their write fronts
// stay in the second-level cache; 200,000 rows in each of 8 tables need two passes.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "reused_memory.h"

namespace turbogr {

// Memory that the threads of a kernel share, uninitialised, used again by later calls and counted as workspace.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t n) : bytes_(n * static_cast<int64_t>(sizeof(T))), data_(memory_for(bytes_).allocate(bytes_)) {
    workspace_count.add(bytes_);
  }
  ~Scratch() { workspace_count.now -= bytes_; }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return static_cast<T*>(data_.get()); }

 private:
  int64_t bytes_;
  c10::DataPtr data_;
};

// A row of up to 32 bits with a position: one word, half of the traffic of WideEntry.
struct NarrowEntry {
  uint64_t word;
  static NarrowEntry of(uint64_t row, int64_t position) { return {row << 32 | static_cast<uint64_t>(position)}; }
  uint64_t row() const { return word >> 32; }
  int64_t position() const { return static_cast<uint32_t>(word); }
};

struct WideEntry {
  uint64_t wide_row;
  uint64_t at;
  static WideEntry of(uint64_t row, int64_t position) { return {row, static_cast<uint64_t>(position)}; }
  uint64_t row() const { return wide_row; }
  int64_t position() const { return static_cast<int64_t>(at); }
};

constexpr int kNarrowBits = 32;
constexpr int64_t kMostPositions = int64_t{1} << 32;

// f(an entry of the narrowest kind for rows of so many bits)
template <class F>
decltype(auto) by_entry(int bits, F&& f) {
  return bits <= kNarrowBits ? f(NarrowEntry()) : f(WideEntry());
}

inline int bits_of(uint64_t largest) { return std::bit_width(largest); }

constexpr int kDigitBits = 11;
constexpr int64_t kSortGrain = 16384;  // entries per thread, at least: below, waking it costs more than it moves

// Sorts n entries by the lower `bits` of their rows, above which there are none.
// Returns where they are then: `entries` or `spare`.
template <class E>
E* sort_by_row(E* entries, E* spare, int64_t n, int bits) {
  if (n <= 1 || bits == 0) return entries;
  const int passes = (bits + kDigitBits - 1) / kDigitBits, digit = (bits + passes - 1) / passes;
  const int64_t buckets = int64_t{1} << digit;
  const int64_t stretches = std::clamp<int64_t>(n / kSortGrain, 1, at::get_num_threads());
  const int64_t stretch = (n + stretches - 1) / stretches;
  std::vector<int64_t> places(stretches * buckets);
  for (int pass = 0; pass < passes; pass++) {
    const int shift = pass * digit;
    const auto bucket = [&](const E& entry) { return static_cast<int64_t>(entry.row() >> shift & (buckets - 1)); };
    at::parallel_for(0, stretches, 1, [&](int64_t first, int64_t last) {
      for (int64_t s = first; s < last; s++) {
        int64_t* counts = places.data() + s * buckets;
        std::fill(counts, counts + buckets, 0);
        for (int64_t i = s * stretch; i < std::min(n, (s + 1) * stretch); i++) counts[bucket(entries[i])]++;
      }
    });
    int64_t total = 0;
    for (int64_t b = 0; b < buckets; b++)
      for (int64_t s = 0; s < stretches; s++) total += std::exchange(places[s * buckets + b], total);
    at::parallel_for(0, stretches, 1, [&](int64_t first, int64_t last) {
      for (int64_t s = first; s < last; s++) {
        int64_t* to = places.data() + s * buckets;
        for (int64_t i = s * stretch; i < std::min(n, (s + 1) * stretch); i++) spare[to[bucket(entries[i])]++] = entries[i];
      }
    });
    std::swap(entries, spare);
  }
  return entries;
}

// Entries that a thread takes at once. Which rows a block holds depends on the entries alone.
constexpr int64_t kRowBlock = 2048;
inline int64_t row_blocks(int64_t n) { return (n + kRowBlock - 1) / kRowBlock; }

// body(begin, end) for each row whose first entry is in a block, with its range of the sorted entries.
template <class E, class F>
void rows_of_block(const E* sorted, int64_t n, int64_t block, F&& body) {
  const int64_t limit = std::min(n, (block + 1) * kRowBlock);
  int64_t begin = block * kRowBlock;
  if (begin > 0)
    while (begin < limit && sorted[begin].row() == sorted[begin - 1].row()) begin++;
  while (begin < limit) {
    int64_t end = begin + 1;
    while (end < n && sorted[end].row() == sorted[begin].row()) end++;
    body(begin, end);
    begin = end;
  }
}

}  // namespace turbogr
