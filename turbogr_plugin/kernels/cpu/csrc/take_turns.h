// A parallel loop whose threads take the next index when they are done with one: where another program holds up a
// thread, the others go on. The results must not depend on who takes what.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace turbogr {

// body(next), once on each thread; next() gives its indices from [0, n) one after the other, then n.
template <class F>
inline void take_turns(int64_t n, F&& body) {
  std::atomic<int64_t> taken{0};
  at::parallel_for(0, std::min<int64_t>(n, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    body([&] { return std::min(taken.fetch_add(1, std::memory_order_relaxed), n); });
  });
}

}  // namespace turbogr
