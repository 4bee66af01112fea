// Device memory, handed out as a caching allocator does, and pinned host memory.
//
// A freed block goes to the pool of the stream it was allocated on and is handed out there at once, last in first out:
// the order of that stream protects it, and nothing protects it from a reader on another stream unless record_stream
// was called. So memory really is reused, and what reads too late reads the next owner's values. Memory is filled with
// 0xC5 when it is new and when it is freed: a read of either shows (-6.3e3 as float32, -4.2e18 as int64).
#include "simnpu.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <deque>

namespace simnpu {
namespace {

constexpr int kPoison = 0xC5;
constexpr size_t kRounding = 512;
// Blocks that wait for a recorded stream; older ones count as ended. A real allocator asks the device whether they are,
// and the device has got there after a while without anyone waiting for it.
constexpr size_t kMostWaiting = 32;

using PoolKey = std::tuple<c10::DeviceIndex, c10::StreamId, size_t>;

std::mutex mutex;
auto& live = *new std::unordered_map<const void*, Block*>();
auto& pools = *new std::map<PoolKey, std::vector<Block*>>();
auto& waiting = *new std::map<c10::DeviceIndex, std::deque<Block*>>();
auto& stats = *new std::array<c10::CachingDeviceAllocator::DeviceStats, kMaxDevices>();
auto& pinned = *new std::map<const char*, size_t>();  // never destroyed: tensors outlive static destructors

size_t rounded(size_t bytes) { return (bytes + kRounding - 1) / kRounding * kRounding; }

// Eight classes per power of two: a block serves requests that are up to an eighth smaller.
size_t size_class(size_t bytes) {
  size_t power = kRounding;
  while (power * 2 <= bytes) power *= 2;
  const size_t step = std::max(kRounding, power / 8);
  return (bytes + step - 1) / step * step;
}

void return_to_system(Block* block) {
  auto& s = stats[block->device];
  s.reserved_bytes[0].decrease(block->real_bytes);
  s.segment[0].decrease(1);
  ++s.num_device_free;
  std::free(block->data);
  delete block;
}

void to_pool(Block* block) { pools[{block->device, block->stream, block->real_bytes}].push_back(block); }

void collect_waiting(c10::DeviceIndex device, bool all) {
  auto& queue = waiting[device];
  std::deque<Block*> still;
  size_t left = queue.size();
  for (Block* block : queue) {
    bool ended = all || left > kMostWaiting;
    --left;
    if (!ended) {
      ended = std::all_of(block->waiting_for.begin(), block->waiting_for.end(),
                          [](const auto& end) { return host_knows(end.first, end.second); });
    }
    if (!ended) {
      still.push_back(block);
      continue;
    }
    forget_uses(*block, block->waiting_for);
    block->waiting_for.clear();
    to_pool(block);
  }
  queue.swap(still);
}

void empty_cache(c10::DeviceIndex device) {
  // As the real call, this waits for the device before it gives memory back.
  collect_waiting(device, true);
  for (auto it = pools.begin(); it != pools.end();) {
    if (std::get<0>(it->first) != device) {
      ++it;
      continue;
    }
    for (Block* block : it->second) return_to_system(block);
    it = pools.erase(it);
  }
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::memset(block->data, kPoison, block->real_bytes);
  std::lock_guard<std::mutex> lock(mutex);
  auto& s = stats[block->device];
  s.allocated_bytes[0].decrease(block->bytes);
  s.requested_bytes[0].decrease(block->requested);
  s.active_bytes[0].decrease(block->bytes);
  s.allocation[0].decrease(1);
  s.active[0].decrease(1);
  live.erase(block->data);
  for (const Lane lane : block->recorded) block->waiting_for.emplace_back(lane, lane_tick(lane));
  block->recorded.clear();
  if (block->waiting_for.empty()) {
    to_pool(block);
  } else {
    waiting[block->device].push_back(block);
  }
}

void no_free(void*) {}

Block* find_block(c10::DeviceIndex device, c10::StreamId stream, size_t real_bytes) {
  collect_waiting(device, false);
  const auto it = pools.find({device, stream, real_bytes});
  if (it == pools.end() || it->second.empty()) return nullptr;
  Block* block = it->second.back();
  it->second.pop_back();
  return block;
}

Block* new_block(c10::DeviceIndex device, c10::StreamId stream, size_t real_bytes) {
  auto& s = stats[device];
  const size_t limit = memory_per_device();
  if (s.reserved_bytes[0].current + real_bytes > limit) {
    ++s.num_alloc_retries;
    empty_cache(device);
  }
  void* data = s.reserved_bytes[0].current + real_bytes > limit ? nullptr : std::aligned_alloc(kRounding, real_bytes);
  if (data == nullptr) {
    ++s.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "npu:", static_cast<int>(device), " is out of memory: tried to allocate ",
                     real_bytes, " bytes, ", s.allocated_bytes[0].current, " of ", limit, " bytes are in use");
  }
  std::memset(data, kPoison, real_bytes);
  auto* block = new Block();
  block->data = data;
  block->real_bytes = real_bytes;
  block->device = device;
  block->stream = stream;
  s.reserved_bytes[0].increase(real_bytes);
  s.segment[0].increase(1);
  ++s.num_device_alloc;
  return block;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    const c10::Device where(kNpu, device);
    if (bytes == 0) return {nullptr, nullptr, &no_free, where};
    check_device(device);  // not before load() has said how many there are
    const auto stream = current_stream(device).id();
    std::lock_guard<std::mutex> lock(mutex);
    const size_t real_bytes = size_class(rounded(bytes));
    Block* block = find_block(device, stream, real_bytes);
    if (block == nullptr) block = new_block(device, stream, real_bytes);
    new_life(*block);
    block->bytes = rounded(bytes);
    block->requested = bytes;
    auto& s = stats[device];
    s.allocated_bytes[0].increase(block->bytes);
    s.requested_bytes[0].increase(bytes);
    s.active_bytes[0].increase(block->bytes);
    s.allocation[0].increase(1);
    s.active[0].increase(1);
    live[block->data] = block;
    return {block->data, block, &free_block, where};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return device_count() > 0; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex);
    for (c10::DeviceIndex d = 0; d < device_count(); ++d) empty_cache(d);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto* block = data.cast_context<Block>(&free_block);
    if (block == nullptr) return;
    const Lane lane = lane_of(stream);
    std::lock_guard<std::mutex> lock(mutex);
    // The stream of the allocation needs no record: its own order protects the block.
    if (stream.device_index() == block->device && stream.id() == block->stream) return;
    if (std::find(block->recorded.begin(), block->recorded.end(), lane) == block->recorded.end()) {
      block->recorded.push_back(lane);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_device(device);
    std::lock_guard<std::mutex> lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    check_device(device);
    std::lock_guard<std::mutex> lock(mutex);
    auto& s = stats[device];
    for (auto* stat : {&s.allocated_bytes, &s.reserved_bytes, &s.requested_bytes, &s.active_bytes, &s.allocation,
                       &s.active, &s.segment}) {
      (*stat)[0].reset_accumulated();
    }
    s.num_alloc_retries = s.num_ooms = s.num_device_alloc = s.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    check_device(device);
    std::lock_guard<std::mutex> lock(mutex);
    auto& s = stats[device];
    for (auto* stat : {&s.allocated_bytes, &s.reserved_bytes, &s.requested_bytes, &s.active_bytes, &s.allocation,
                       &s.active, &s.segment}) {
      (*stat)[0].reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    check_device(device);
    std::lock_guard<std::mutex> lock(mutex);
    return {memory_per_device() - stats[device].reserved_bytes[0].current, memory_per_device()};
  }
};

void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = pinned.find(static_cast<const char*>(data));
    // A pinned allocator waits for the copies that use a block before it hands it out again, so these cannot race.
    host_memory_freed(data, it->second);
    pinned.erase(it);
  }
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const size_t real_bytes = rounded(std::max<size_t>(bytes, 1));
    void* data = std::aligned_alloc(kRounding, real_bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "no pinned memory: tried to allocate ", real_bytes, " bytes");
    std::lock_guard<std::mutex> lock(mutex);
    pinned[static_cast<const char*>(data)] = real_bytes;
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new DeviceAllocator();
  return allocator;
}
REGISTER_ALLOCATOR(kNpu, device_allocator())

at::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return allocator;
}

bool is_pinned(const void* data) {
  const auto* p = static_cast<const char*>(data);
  std::lock_guard<std::mutex> lock(mutex);
  auto it = pinned.upper_bound(p);
  if (it == pinned.begin()) return false;
  --it;
  return p < it->first + it->second;
}

Block* block_of(const at::TensorBase& tensor) {
  return tensor.storage().data_ptr().cast_context<Block>(&free_block);
}

c10::DeviceIndex device_of_pointer(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto it = live.find(data);
  return it == live.end() ? current_device() : it->second->device;
}

void record_stream(const at::TensorBase& tensor, const c10::Stream& stream) {
  device_allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

void forget_histories() {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [_, block] : live) forget_history(*block);
  for (auto& [_, blocks] : pools) {
    for (Block* block : blocks) forget_history(*block);
  }
  for (auto& [_, blocks] : waiting) {
    for (Block* block : blocks) forget_history(*block);
  }
}

}  // namespace simnpu
