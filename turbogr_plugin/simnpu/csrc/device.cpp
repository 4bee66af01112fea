// Devices, streams and events: the guard through which torch switches devices, streams and records events.
#include "simnpu.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>

namespace simnpu {
namespace {

int device_count_ = 0;
size_t memory_per_device_ = 0;
thread_local c10::DeviceIndex current_device_ = 0;
thread_local std::array<c10::StreamId, kMaxDevices> current_stream_{};

// torch_npu, like CUDA, hands out streams of a fixed pool in turn; so two "new" streams may be one, there as here.
constexpr int kStreamsPerPool = 32;
std::array<std::atomic<uint32_t>, kMaxDevices> next_stream_[2];

struct Event {
  Clock clock;
  double ms = 0;
  bool recorded = false;
  bool asked = false;  // since it was recorded
};

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, device), id);
}

c10::DeviceIndex index_of(c10::Device device) {
  if (device.index() < 0) return current_device_;
  check_device(device.index());
  return device.index();
}

void count_sync(const char* what) { count_host_sync(interned(what), current_source()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kNpu, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kNpu, current_device_}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device_ = device.index();
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    const auto index = index_of(device);
    const int pool = priority < 0 ? 1 : 0;
    const auto turn = next_stream_[pool][index]++ % kStreamsPerPool;
    return make_stream(index, 1 + pool * kStreamsPerPool + turn);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto index = index_of(stream.device());
    const auto before = make_stream(index, current_stream_[index]);
    current_stream_[index] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override {
    // Everything has run; a host that has seen this may rely on it.
    host_waits(stream_clock(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(stream_clock(stream));
    count_sync("stream synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits_device(device < 0 ? current_device_ : device);
    count_sync("device synchronize");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    auto* e = static_cast<Event*>(*event);
    e->clock = stream_clock(stream);
    e->ms = now_ms();
    e->recorded = true;
    e->asked = false;
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* e = static_cast<Event*>(event);
    if (e != nullptr && e->recorded) stream_waits(stream, e->clock);
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    if (e == nullptr || !e->recorded) return true;
    // Everything has run, and a host that has seen so may rely on it. But it has to be able to do without: a program
    // that looks once per step and goes on would otherwise be in step with the device, and its races hidden.
    if (!e->asked && !host_knows(e->clock)) {
      e->asked = true;
      return false;
    }
    host_waits(e->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    if (e == nullptr || !e->recorded) return;
    host_waits(e->clock);
    count_sync("event synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return elapsed_ms(first, second);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    // What AI cores have arithmetic for: neither float64 nor complex numbers.
    capability.capability_data.capability_bits =
        (1ULL << c10::kIndex_Byte) | (1ULL << c10::kIndex_Char) | (1ULL << c10::kIndex_Short) |
        (1ULL << c10::kIndex_Int) | (1ULL << c10::kIndex_Long) | (1ULL << c10::kIndex_Half) |
        (1ULL << c10::kIndex_BFloat16) | (1ULL << c10::kIndex_Float) | (1ULL << c10::kIndex_Bool);
    return capability;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

void initialize(int devices, size_t memory_bytes) {
  TORCH_CHECK_VALUE(devices >= 1 && devices <= kMaxDevices, "devices must be 1 to ", kMaxDevices, ", got ", devices);
  device_count_ = devices;
  memory_per_device_ = memory_bytes;
}
c10::DeviceIndex device_count() noexcept { return static_cast<c10::DeviceIndex>(device_count_); }
size_t memory_per_device() { return memory_per_device_; }

c10::DeviceIndex current_device() { return current_device_; }
void check_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count_, "npu: invalid device ordinal ", static_cast<int>(device),
              ", there are ", device_count_, " simulated devices");
}
void set_current_device(c10::DeviceIndex device) {
  check_device(device);
  current_device_ = device;
}
c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  const auto before = current_device_;
  if (device >= 0) set_current_device(device);
  return before;
}
c10::Stream current_stream(c10::DeviceIndex device) { return make_stream(device, current_stream_[device]); }

double elapsed_ms(void* first, void* second) {
  auto* a = static_cast<Event*>(first);
  auto* b = static_cast<Event*>(second);
  TORCH_CHECK(a != nullptr && b != nullptr && a->recorded && b->recorded,
              "Both events must be recorded before calculating elapsed time.");
  return b->ms - a->ms;
}

}  // namespace simnpu
