// A simulated `npu` device (PrivateUse1) on host memory: what its parts share.
//
// Every operator runs at once, in the calling thread, on host memory. What is simulated is the device's contract:
// which memory belongs to which device, which stream an operator was launched on, and what the program itself has
// ordered (streams, events, synchronisation). The happens-before checker compares uses of memory against that order.
//
//   device.cpp      devices, streams, events: the guard that torch calls
//   order.cpp       vector clocks, launches, uses of device memory
//   host_order.cpp  host reads and writes of pinned memory that a copy has not ended with
//   allocator.cpp   device memory with a pool per stream, pinned memory
//   hooks.cpp       what torch.accelerator and pinned memory ask for; generators
//   tensors.cpp     kernels that make, alias and copy tensors
//   operators.cpp   facts about an operator, from its schema
//   boxed.cpp       every other operator, by its CPU kernel on the same memory; allow-list
//   autocast.cpp    autocast("npu")
//   process_group.* hccl over gloo
//   bindings.cpp    what Python sees
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace simnpu {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

inline bool on_npu(const at::TensorBase& tensor) {
  return tensor.defined() && tensor.device().type() == kNpu;
}

// ---------------------------------------------------------------- device.cpp
// Called once, before anything else, with what load() was given.
void initialize(int devices, size_t memory_bytes);
c10::DeviceIndex device_count() noexcept;
size_t memory_per_device();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
void check_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
double elapsed_ms(void* first, void* second);

// ----------------------------------------------------------------- order.cpp
// A stream's position in every vector clock; handed out on first use.
using Lane = int32_t;
using Clock = std::vector<uint64_t>;
using Source = int32_t;  // index of Python source lines kept on the Python side; -1: not traced
constexpr Source kNoSource = -1;

struct Launch {
  Lane lane = -1;
  uint64_t tick = 0;
  const std::string* op = nullptr;  // interned
  Source source = kNoSource;
};

// A use of [low, high) of a block. A non-zero pitch says that only `width` bytes from `low` on are used in every pitch:
// columns of a matrix, which another stream may use beside other columns.
struct Access {
  Launch by;
  size_t low = 0, high = 0, pitch = 0, width = 0;
  bool write = false;
  uint32_t generation = 0;  // which life of the block: it is handed out again after a free
};
using History = std::vector<Access>;
struct Block;

struct RaceUse {
  std::string op;
  int device;
  int64_t stream;
  Source source;
  int64_t bytes;
  bool write;
};
struct Race {
  std::string kind;
  RaceUse earlier, later;
  int64_t block_bytes;
  int64_t count;
};

const std::string* interned(const std::string& name);
Lane lane_of(const c10::Stream& stream);

// Ordering. Each takes the lock of the checker.
Launch launch(const c10::Stream& stream, const std::string* op);  // one operator: merges host into stream, advances it
Clock stream_clock(const c10::Stream& stream);                    // event record
void stream_waits(const c10::Stream& stream, const Clock& clock); // event wait
void host_waits(const Clock& clock);                              // event or stream synchronise
void host_waits_device(c10::DeviceIndex device);
bool host_knows(Lane lane, uint64_t tick);
bool host_knows(const Clock& clock);
uint64_t lane_tick(Lane lane);
bool lane_knows(Lane lane, Lane other, uint64_t tick);

// Uses. `tensor` is on npu; nothing happens where the checker is off or the memory is not ours.
void use(const at::TensorBase& tensor, bool write, const Launch& by);
void report_race(Race race);
RaceUse race_use(const Launch& by, size_t bytes, bool write);
std::vector<Race> races();
void reset_reports();  // races and host synchronisations
void set_check_streams(bool on, bool of_each_thread);
bool check_streams();
// The uses of a block over its lives. Several streams may still be at work when it is handed out again.
void new_life(Block& block);
void forget_history(Block& block);
void forget_uses(Block& block, const std::vector<std::pair<Lane, uint64_t>>& ended);

// Host synchronisations, with where they came from.
struct HostSync {
  std::string op;
  Source source;
  int64_t count;
};
void count_host_sync(const std::string* op, Source source);
std::vector<HostSync> host_syncs();

// Python source lines of the caller; kNoSource unless tracing is on. Takes the GIL: call it with no lock held.
Source current_source();
extern std::atomic<bool> trace_sources;
extern Source (*capture_source)();

// ------------------------------------------------------------ host_order.cpp
// A non-blocking copy between device and pinned memory that the host has not waited for.
void host_copy_started(const void* data, size_t bytes, bool writes_host, const Launch& by);
// A copy on a stream uses pinned memory that an earlier copy may still be using.
void check_host_range(const void* data, size_t bytes, bool writes_host, const Launch& by);
void host_copies_over();                            // forget what the host has waited for
void host_memory_freed(const void* data, size_t bytes);
void reset_host_copies();
// While this lives, operators of this thread are the device's own and no reads of the host.
struct DeviceWork {
  DeviceWork();
  ~DeviceWork();
};

// ------------------------------------------------------------- allocator.cpp
struct Block {
  void* data = nullptr;
  size_t bytes = 0;       // as accounted, a multiple of 512
  size_t real_bytes = 0;  // size class
  size_t requested = 0;
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;  // where it was allocated: only there it is handed out again
  uint32_t generation = 0;
  std::vector<Lane> recorded;                         // record_stream
  std::vector<std::pair<Lane, uint64_t>> waiting_for;  // after free: not handed out before these have ended
  History history;
};
c10::DeviceAllocator* device_allocator();
at::Allocator* pinned_allocator();
bool is_pinned(const void* data);
Block* block_of(const at::TensorBase& tensor);  // null: no memory, or not ours
c10::DeviceIndex device_of_pointer(const void* data);
void record_stream(const at::TensorBase& tensor, const c10::Stream& stream);
void forget_histories();

// ----------------------------------------------------------------- hooks.cpp
at::Generator default_generator(c10::DeviceIndex device);
at::Generator cpu_generator_of(const at::Generator& npu_generator);
void resize_storage(c10::StorageImpl* storage, size_t bytes);

// --------------------------------------------------------------- tensors.cpp
struct Counters {
  std::atomic<int64_t> h2d{0}, d2h{0}, d2d{0}, host_syncs{0};
};
extern Counters counters;
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype, c10::Device device);
// CPU tensors over the memory of npu tensors; tensors that share a storage share one there too.
class CpuViews {
 public:
  at::Tensor of(const at::Tensor& tensor);

 private:
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages_;
};
// The stream's work is over for the host: a blocking copy, item(), a data-dependent shape.
void synchronize_with_host(const c10::Stream& stream, const Launch& by);

// ------------------------------------------------------------- operators.cpp
struct OperatorFacts {
  const std::string* name;
  std::vector<bool> writes;            // per argument
  std::vector<int> returned_argument;  // per return: the argument that it is, or -1
  bool returns_view = false;
  bool any_dtype = false;              // creation, copies, casts: legal in a dtype without arithmetic
  bool takes_cpu_index = false;        // CPU tensors of any size are legal arguments
  bool random_without_generator = false;
  enum class Sync { never, always, byte_index, without_output_size } sync = Sync::never;
};
void set_any_dtype(const std::vector<std::string>& overloads);
const OperatorFacts& facts_of(const c10::OperatorHandle& op);

// ----------------------------------------------------------------- boxed.cpp
enum class Policy { strict, report, permissive };
void set_policy(Policy policy);
void set_missing_dtypes(const std::vector<c10::ScalarType>& dtypes);
// Gives each of these aten overloads a kernel of its own; returns those that were left to their decomposition.
std::vector<std::string> register_kernels(const std::vector<std::string>& overloads);
std::map<std::string, int64_t> executed();
std::map<std::string, int64_t> cpu_fallbacks();
void count_executed(const std::string* op);
void reset_counts();

}  // namespace simnpu
