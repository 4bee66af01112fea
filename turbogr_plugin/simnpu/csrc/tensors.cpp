// Kernels that make, alias, resize and copy tensors: what cannot be had by running a CPU kernel on the same memory.
#include "simnpu.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simnpu {

Counters counters;

namespace {

using at::Tensor;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void check_factory(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided,
                              "npu: only strided tensors are simulated, not ", c10::layout_or_default(layout));
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
}

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                           std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                           std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> memory_format) {
  check_factory(layout, pin_memory);
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), memory_format);
}

Tensor empty_strided_kernel(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                            std::optional<bool> pin_memory) {
  check_factory(layout, pin_memory);
  return empty_strided(size, stride, c10::dtype_or_default(dtype), c10::device_or_default(device));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, std::move(offset));
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> memory_format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), memory_format);
}
Tensor& set_(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return at::cpu::set_(self, std::move(storage), 0, {0}, {});
}
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }
Tensor& set_storage_offset(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                           c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}

void record_stream_kernel(Tensor& self, c10::Stream stream) { record_stream(self, stream); }

// A copy is asynchronous for the host only where the device reads or writes the host's memory itself: pinned, in the
// same type and layout. All else goes through memory of the driver.
bool direct(const Tensor& host, const Tensor& device) {
  return host.scalar_type() == device.scalar_type() && host.is_contiguous() && device.is_contiguous() &&
         host.sizes() == device.sizes() && is_pinned(host.const_data_ptr());
}

void copy_values(const Tensor& from, const Tensor& to) {
  DeviceWork device_work;
  CpuViews views;
  Tensor source = views.of(from), target = views.of(to);
  at::native::copy_(target, source, false);
}

void copy_between_devices(const Tensor& from, const Tensor& to) {
  static const auto* name = interned("aten::copy_ (device to device)");
  ++counters.d2d;
  const auto stream = current_stream(from.device().index());
  const bool across = from.device() != to.device();
  const auto other = current_stream(to.device().index());
  // As between GPUs: the copy waits for the stream that owns the target, which then waits for the copy.
  if (across) stream_waits(stream, stream_clock(other));
  const auto by = launch(stream, name);
  use(from, false, by);
  use(to, true, by);
  copy_values(from, to);
  if (across) stream_waits(other, stream_clock(stream));
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  static const auto* name = interned("aten::copy_ (host to device)");
  ++counters.h2d;
  const auto stream = current_stream(to.device().index());
  const auto by = launch(stream, name);
  use(to, true, by);
  const bool asynchronous = non_blocking && direct(from, to);
  check_host_range(from.const_data_ptr(), from.nbytes(), false, by);
  copy_values(from, to);
  if (asynchronous) {
    host_copy_started(from.const_data_ptr(), from.nbytes(), false, by);
  } else if (!non_blocking) {
    synchronize_with_host(stream, by);
  }
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  static const auto* name = interned("aten::copy_ (device to host)");
  ++counters.d2h;
  const auto stream = current_stream(from.device().index());
  const auto by = launch(stream, name);
  use(from, false, by);
  check_host_range(to.const_data_ptr(), to.nbytes(), true, by);
  copy_values(from, to);
  if (non_blocking && direct(to, from)) {
    host_copy_started(to.const_data_ptr(), to.nbytes(), true, by);
  } else {
    synchronize_with_host(stream, by);
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  c10::DeviceGuard guard(on_npu(to) ? to.device() : from.device());
  if (on_npu(from) && on_npu(to)) {
    copy_between_devices(from, to);
  } else if (on_npu(to)) {
    copy_to_device(from, to, non_blocking);
  } else {
    copy_to_host(from, to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  static const auto* name = interned("aten::_local_scalar_dense");
  ++counters.d2h;
  count_executed(name);
  const auto stream = current_stream(self.device().index());
  const auto by = launch(stream, name);
  use(self, false, by);
  synchronize_with_host(stream, by);
  CpuViews views;
  return at::native::_local_scalar_dense_cpu(views.of(self));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided_kernel);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_", set_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("record_stream", record_stream_kernel);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

// The copy sees conjugated and negated views for itself; torch's fallback would materialise them by a copy, endlessly.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype, c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, dtype);
}

Tensor CpuViews::of(const Tensor& tensor) {
  if (!on_npu(tensor)) return tensor;
  auto* npu_storage = tensor.storage().unsafeGetStorageImpl();
  const c10::Storage* storage = nullptr;
  for (const auto& [known, cpu] : storages_) {
    if (known == npu_storage) storage = &cpu;
  }
  if (storage == nullptr) {
    // Resizable, so that out= variants may give it other memory; nothing is freed with it.
    storages_.emplace_back(npu_storage, c10::Storage(c10::Storage::use_byte_size_t(), npu_storage->nbytes(),
                                                     at::DataPtr(npu_storage->mutable_data(), c10::kCPU),
                                                     c10::GetCPUAllocator(), true));
    storage = &storages_.back().second;
  }
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(*storage), keys, tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

void synchronize_with_host(const c10::Stream& stream, const Launch& by) {
  host_waits(stream_clock(stream));
  count_host_sync(by.op, by.source);
}

}  // namespace simnpu
