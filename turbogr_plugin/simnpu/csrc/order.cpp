// The happens-before checker: vector clocks of streams and host, and the uses of every block of device memory.
//
// clocks[s][t] is how much of stream t's work stream s runs after; an operator on s is the next tick of clocks[s][s]. A
// use at tick n of stream t comes before an operator on s if clocks[s][t] >= n. The host has one clock: what any thread
// of the program has waited for. A launch takes it over, because a stream cannot start what the host has not given it.
// By thread, a launch takes over what its own thread has waited for: another may have been quicker by luck alone.
#include "simnpu.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace simnpu {

std::atomic<bool> trace_sources{false};
Source (*capture_source)() = nullptr;

namespace {

// Beyond this many uses of one block, those that nothing can race with are looked for and dropped; beyond the second
// bound the oldest are: a race may then be missed, none is invented.
constexpr size_t kTidyHistory = 24;
constexpr size_t kLongestHistory = 512;
constexpr size_t kMostRaces = 1000;

std::mutex mutex;
std::map<std::pair<int, c10::StreamId>, Lane> lanes;
std::vector<std::pair<int, c10::StreamId>> streams;  // by lane
std::vector<Clock> clocks;                           // by lane
std::vector<uint64_t> host_seen;                     // by lane: version of the host clock it has taken over
Clock host;
uint64_t host_version = 0;
std::vector<Race> found;
std::vector<HostSync> syncs;
std::atomic<bool> checking{true};
std::atomic<bool> by_thread{false};

// What this thread has waited for. Threads of autograd work for others and take over what any has waited for: they are
// those that have launched nothing outside of a backward pass.
thread_local Clock waited;
thread_local bool works_for_itself = false;

uint64_t at(const Clock& clock, Lane lane) {
  return static_cast<size_t>(lane) < clock.size() ? clock[lane] : 0;
}

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

Lane lane_locked(const c10::Stream& stream) {
  const auto key = std::make_pair(static_cast<int>(stream.device_index()), stream.id());
  const auto [it, added] = lanes.try_emplace(key, static_cast<Lane>(clocks.size()));
  if (added) {
    streams.push_back(key);
    clocks.emplace_back(clocks.size() + 1, 0);
    host_seen.push_back(0);
  }
  return it->second;
}

void take_over_host(Lane lane) {
  if (by_thread && works_for_itself) {
    merge(clocks[lane], waited);
    return;
  }
  if (host_seen[lane] == host_version) return;
  merge(clocks[lane], host);
  host_seen[lane] = host_version;
}

bool same_columns(const Access& a, const Access& b) {
  // Both are columns of one matrix: they meet only if the columns do.
  const size_t a0 = a.low % a.pitch, b0 = b.low % b.pitch;
  const auto meets = [&](size_t x0, size_t xw, size_t y0) { return y0 >= x0 && y0 < x0 + xw; };
  // Columns may run over the end of the pitch, so the start of each is looked for one pitch on as well.
  return meets(a0, a.width, b0) || meets(a0, a.width, b0 + a.pitch) || meets(b0, b.width, a0) ||
         meets(b0, b.width, a0 + a.pitch);
}

bool overlap(const Access& a, const Access& b) {
  if (a.low >= b.high || b.low >= a.high) return false;
  return a.pitch == 0 || a.pitch != b.pitch || same_columns(a, b);
}

bool covers(const Access& later, const Access& earlier) {
  if (later.pitch == 0) return later.low <= earlier.low && earlier.high <= later.high;
  return later.pitch == earlier.pitch && later.width == earlier.width && later.low == earlier.low &&
         later.high == earlier.high;
}

const char* kind_of(const Access& earlier, const Access& later) {
  if (earlier.generation != later.generation) {
    return earlier.write ? "buffer reused before its writer ended" : "buffer reused before its reader ended";
  }
  if (!earlier.write) return "write before reader ended";
  return later.write ? "write before write ended" : "read before write ended";
}

RaceUse race_use_locked(const Launch& by, size_t bytes, bool write) {
  return {*by.op, streams[by.lane].first, streams[by.lane].second, by.source, static_cast<int64_t>(bytes), write};
}

void report_locked(Race race) {
  const auto same = [](const RaceUse& a, const RaceUse& b) {
    return a.op == b.op && a.device == b.device && a.stream == b.stream && a.source == b.source && a.bytes == b.bytes;
  };
  for (auto& known : found) {
    if (known.kind == race.kind && same(known.earlier, race.earlier) && same(known.later, race.later)) {
      ++known.count;
      return;
    }
  }
  if (found.size() < kMostRaces) found.push_back(std::move(race));
}

void tidy(History& history) {
  if (!by_thread) {
    history.erase(std::remove_if(history.begin(), history.end(),
                                 [](const Access& a) { return at(host, a.by.lane) >= a.by.tick; }),
                  history.end());
  }
  if (history.size() > kLongestHistory) {
    history.erase(history.begin(), history.end() - static_cast<long>(kLongestHistory / 2));
  }
}

// Bytes of the block that the tensor reaches.
Access access_of(const at::TensorBase& tensor, const Block& block) {
  Access access;
  const size_t item = tensor.itemsize();
  const auto* base = static_cast<const char*>(tensor.storage().data());
  access.low = static_cast<size_t>(base - static_cast<const char*>(block.data)) + tensor.storage_offset() * item;
  // Dimensions from the outermost in, those that follow each other without a gap as one: a[..., :5] of a contiguous
  // tensor is columns of a matrix, whatever its number of dimensions.
  struct Dimension {
    int64_t stride, size;
  };
  c10::SmallVector<Dimension, 8> dimensions;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dimensions.push_back({tensor.stride(d), tensor.size(d)});
  }
  std::stable_sort(dimensions.begin(), dimensions.end(),
                   [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
  size_t count = 0;
  for (const auto dimension : dimensions) {
    if (count > 0 && dimensions[count - 1].stride == dimension.stride * dimension.size) {
      dimensions[count - 1] = {dimension.stride, dimensions[count - 1].size * dimension.size};
    } else {
      dimensions[count++] = dimension;
    }
  }
  int64_t last = 0, inner = 0;
  for (size_t d = 0; d < count; ++d) {
    const int64_t reach = (dimensions[d].size - 1) * dimensions[d].stride;
    last += reach;
    if (d > 0) inner += reach;
  }
  access.high = access.low + (last + 1) * item;
  // One outermost stride, and the rest of the tensor fits below it: rows of a matrix. Every other shape counts as the
  // whole span between its first and its last element.
  if (count > 0 && inner + 1 < dimensions[0].stride) {
    access.pitch = dimensions[0].stride * item;
    access.width = (inner + 1) * item;
  }
  return access;
}

}  // namespace

const std::string* interned(const std::string& name) {
  static std::mutex names_mutex;
  static auto* names = new std::unordered_set<std::string>();
  std::lock_guard<std::mutex> lock(names_mutex);
  return &*names->insert(name).first;
}

Source current_source() { return trace_sources && capture_source != nullptr ? capture_source() : kNoSource; }

Lane lane_of(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex);
  return lane_locked(stream);
}

Launch launch(const c10::Stream& stream, const std::string* op) {
  const Source source = current_source();
  if (torch::autograd::get_current_graph_task_id() < 0) works_for_itself = true;
  std::lock_guard<std::mutex> lock(mutex);
  const Lane lane = lane_locked(stream);
  take_over_host(lane);
  return {lane, ++clocks[lane][lane], op, source};
}

Clock stream_clock(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex);
  const Lane lane = lane_locked(stream);
  take_over_host(lane);
  return clocks[lane];
}

void stream_waits(const c10::Stream& stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(clocks[lane_locked(stream)], clock);
}

void host_waits(const Clock& clock) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    merge(host, clock);
    merge(waited, clock);
    ++host_version;
  }
  host_copies_over();
}

void host_waits_device(c10::DeviceIndex device) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t lane = 0; lane < clocks.size(); ++lane) {
      if (streams[lane].first != device) continue;
      merge(host, clocks[lane]);
      merge(waited, clocks[lane]);
    }
    ++host_version;
  }
  host_copies_over();
}

bool host_knows(Lane lane, uint64_t tick) {
  std::lock_guard<std::mutex> lock(mutex);
  return at(host, lane) >= tick;
}

bool host_knows(const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t lane = 0; lane < clock.size(); ++lane) {
    if (at(host, static_cast<Lane>(lane)) < clock[lane]) return false;
  }
  return true;
}

uint64_t lane_tick(Lane lane) {
  std::lock_guard<std::mutex> lock(mutex);
  return clocks[lane][lane];
}

bool lane_knows(Lane lane, Lane other, uint64_t tick) {
  std::lock_guard<std::mutex> lock(mutex);
  return at(clocks[lane], other) >= tick;
}

void use(const at::TensorBase& tensor, bool write, const Launch& by) {
  if (!checking || tensor.numel() == 0) return;
  Block* block = block_of(tensor);
  if (block == nullptr) return;
  Access now = access_of(tensor, *block);
  now.by = by;
  now.write = write;
  std::lock_guard<std::mutex> lock(mutex);
  now.generation = block->generation;
  auto& history = block->history;
  const Clock& clock = clocks[by.lane];
  for (const Access& before : history) {
    if (!(before.write || write) || at(clock, before.by.lane) >= before.by.tick || !overlap(before, now)) continue;
    report_locked({kind_of(before, now), race_use_locked(before.by, before.high - before.low, before.write),
                   race_use_locked(by, now.high - now.low, write), static_cast<int64_t>(block->bytes), 1});
  }
  // What a write covers need not be remembered: whatever is ordered after it is ordered after that too. The same holds
  // for a read and the earlier reads of its own stream.
  history.erase(std::remove_if(history.begin(), history.end(),
                               [&](const Access& a) {
                                 return (write || (!a.write && a.by.lane == by.lane)) && covers(now, a);
                               }),
                history.end());
  if (history.size() >= kTidyHistory) tidy(history);
  history.push_back(std::move(now));
}

RaceUse race_use(const Launch& by, size_t bytes, bool write) {
  std::lock_guard<std::mutex> lock(mutex);
  return race_use_locked(by, bytes, write);
}

void report_race(Race race) {
  if (!checking) return;
  std::lock_guard<std::mutex> lock(mutex);
  report_locked(std::move(race));
}

std::vector<Race> races() {
  std::lock_guard<std::mutex> lock(mutex);
  return found;
}

void set_check_streams(bool on, bool of_each_thread) {
  // What was done while nobody looked is unknown, so nothing is remembered across a change.
  const bool changed = checking.exchange(on) != on;
  if (by_thread.exchange(of_each_thread) != of_each_thread || changed) {
    forget_histories();
    reset_host_copies();
  }
}
bool check_streams() { return checking; }

void count_host_sync(const std::string* op, Source source) {
  ++counters.host_syncs;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& known : syncs) {
    if (known.op == *op && known.source == source) {
      ++known.count;
      return;
    }
  }
  syncs.push_back({*op, source, 1});
}

std::vector<HostSync> host_syncs() {
  std::lock_guard<std::mutex> lock(mutex);
  return syncs;
}

void reset_reports() {
  std::lock_guard<std::mutex> lock(mutex);
  found.clear();
  syncs.clear();
}

void forget_history(Block& block) {
  std::lock_guard<std::mutex> lock(mutex);
  block.history.clear();
}

void new_life(Block& block) {
  std::lock_guard<std::mutex> lock(mutex);
  ++block.generation;
  if (block.history.size() >= kTidyHistory) tidy(block.history);
}

void forget_uses(Block& block, const std::vector<std::pair<Lane, uint64_t>>& ended) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& history = block.history;
  history.erase(std::remove_if(history.begin(), history.end(),
                               [&](const Access& a) {
                                 return std::any_of(ended.begin(), ended.end(), [&](const auto& end) {
                                   return end.first == a.by.lane && a.by.tick <= end.second;
                                 });
                               }),
                history.end());
}

}  // namespace simnpu
