// What torch.accelerator, pinned memory and storages ask a backend for; random generators.
#include "simnpu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

namespace simnpu {
namespace {

// A generator of a device draws from a CPU generator of its own, which the CPU kernels get in its place.
struct Generator final : c10::GeneratorImpl {
  Generator(c10::DeviceIndex device, at::Generator cpu)
      : c10::GeneratorImpl(c10::Device(kNpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), cpu.clone()); }
  static c10::DeviceType device_type() { return kNpu; }

  at::Generator cpu;
};

at::Generator new_generator(c10::DeviceIndex device) {
  if (device < 0) device = current_device();
  check_device(device);
  const auto seed = c10::detail::getNonDeterministicRandom();
  return at::make_generator<Generator>(device, at::make_generator<at::CPUGeneratorImpl>(seed));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return simnpu::device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device >= 0 && device < simnpu::device_count();
  }
  c10::DeviceIndex deviceCount() const override { return simnpu::device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void* data) const override { return {kNpu, device_of_pointer(data)}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    if (device < 0) device = current_device();
    check_device(device);
    static auto* generators = [] {
      auto* all = new std::vector<at::Generator>();
      for (c10::DeviceIndex d = 0; d < simnpu::device_count(); ++d) all->push_back(new_generator(d));
      return all;
    }();
    return (*generators)[device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

at::Generator default_generator(c10::DeviceIndex device) {
  return at::detail::getPrivateUse1Hooks().getDefaultGenerator(device);
}

at::Generator cpu_generator_of(const at::Generator& npu_generator) {
  auto* generator = dynamic_cast<Generator*>(npu_generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(generator != nullptr, "expected a generator of an npu device, got one of ", npu_generator.device());
  return generator->cpu;
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DeviceGuard guard(storage->device());
  auto data = device_allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0 && storage->data() != nullptr) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

}  // namespace simnpu
