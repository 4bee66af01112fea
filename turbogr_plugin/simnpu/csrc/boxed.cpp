// Every operator without a kernel of its own here: its CPU kernel, on the same memory, under the rules of the chip.
//
// torch_npu's own overloads get this as their kernel (register_kernels), as torch_npu registers them: what is composite
// there decomposes here too. The fallback gets the rest, which torch_npu would run on the CPU: under the policy
// "strict" it raises, under "report" it runs and is counted.
#include "simnpu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

namespace simnpu {
namespace {

using at::Tensor;
using torch::jit::Stack;

std::atomic<Policy> policy{Policy::strict};
std::mutex mutex;
auto& executed_ = *new std::unordered_map<const std::string*, int64_t>();
auto& fallbacks_ = *new std::map<std::string, int64_t>();
std::vector<c10::ScalarType> missing_dtypes;

bool is_missing(c10::ScalarType dtype) {
  return std::find(missing_dtypes.begin(), missing_dtypes.end(), dtype) != missing_dtypes.end();
}

void count_fallback(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex);
  ++fallbacks_[name];
}

// Calls visit(tensor, argument index) for each defined tensor among the arguments, lists included.
template <typename Visit>
void visit_tensors(c10::ArrayRef<c10::IValue> values, Visit visit) {
  for (size_t i = 0; i < values.size(); ++i) {
    const auto& value = values[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(value.toTensor(), i);
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) {
        if (tensor.defined()) visit(tensor, i);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor && tensor->defined()) visit(*tensor, i);
      }
    }
  }
}

// One device for all, as a real backend demands: CPU scalars are the exception.
c10::Device device_of_call(const c10::OperatorHandle& op, const OperatorFacts& facts,
                           c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  for (const auto& value : arguments) {
    if (value.isDevice() && value.toDevice().type() == kNpu) {
      const auto index = value.toDevice().index();
      device = c10::Device(kNpu, index < 0 ? current_device() : index);
      check_device(device->index());
    }
  }
  visit_tensors(arguments, [&](const Tensor& tensor, size_t) {
    if (on_npu(tensor) && !device) device = tensor.device();
  });
  if (!device) {
    // A generator of npu brought the call here.
    visit_tensors(arguments, [&](const Tensor& tensor, size_t) {
      TORCH_CHECK(false, "Expected a '", tensor.device().type(), "' device type for generator but found 'npu' in ",
                  *facts.name);
    });
    return {kNpu, current_device()};
  }
  visit_tensors(arguments, [&](const Tensor& tensor, size_t i) {
    if (tensor.device() == *device) return;
    const bool scalar = tensor.device().is_cpu() && tensor.dim() == 0 && !facts.writes[i];
    if (scalar || (tensor.device().is_cpu() && facts.takes_cpu_index && !facts.writes[i])) return;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                " and ", tensor.device(), "! (when checking argument ", op.schema().arguments()[i].name(), " of ",
                *facts.name, ")");
  });
  return *device;
}

// `told` keeps a call from being counted once per tensor.
void check_dtype(const OperatorFacts& facts, const Tensor& tensor, bool& told) {
  // A rule of the simulation: AI Core has no float64, and torch_npu either emulates it slowly or fails, by operator.
  // Creating, copying and casting such tensors works there.
  if (told || policy == Policy::permissive || facts.any_dtype || !on_npu(tensor)) return;
  if (!is_missing(tensor.scalar_type()) || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(policy != Policy::strict, "npu: operator '", *facts.name, "' with a ",
                              tensor.scalar_type(), " tensor: the chip has no arithmetic in this dtype. Use float32, "
                              "or run it on the CPU");
  count_fallback(*facts.name + " (" + c10::toString(tensor.scalar_type()) + ")");
  told = true;
}

Tensor to_npu(const Tensor& result, c10::Device device, const Launch& by) {
  if (!result.defined() || !result.device().is_cpu()) return result;
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == at::kStrided && !result.is_quantized(), "npu: operator '", *by.op,
                              "' returns a tensor that is not strided, which is not simulated");
  Tensor dense = result.resolve_conj().resolve_neg();
  if (!dense.is_non_overlapping_and_dense()) dense = dense.contiguous();
  Tensor out = empty_strided(dense.sizes(), dense.strides(), dense.scalar_type(), device);
  if (dense.numel() > 0) {
    std::memcpy(out.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
    use(out, true, by);
  }
  return out;
}

// The CPU kernel may have given an out= tensor another shape or other memory.
void take_over_shape(const Tensor& npu, const Tensor& cpu) {
  auto* impl = npu.unsafeGetTensorImpl();
  auto* storage = npu.storage().unsafeGetStorageImpl();
  if (cpu.storage().data() != storage->data()) {
    resize_storage(storage, 0);
    resize_storage(storage, cpu.storage().nbytes());
    std::memcpy(storage->mutable_data(), cpu.storage().data(), cpu.storage().nbytes());
  }
  if (npu.sizes() != cpu.sizes() || npu.strides() != cpu.strides() || npu.storage_offset() != cpu.storage_offset()) {
    impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
}

bool host_waits_for(const OperatorFacts& facts, c10::ArrayRef<c10::IValue> arguments) {
  const auto is_mask = [](const std::optional<Tensor>& index) {
    return index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
  };
  switch (facts.sync) {
    case OperatorFacts::Sync::never:
      return false;
    case OperatorFacts::Sync::always:
      return true;
    case OperatorFacts::Sync::byte_index:
      for (const auto& value : arguments) {
        if (!value.isOptionalTensorList()) continue;
        const auto indices = value.toOptionalTensorVector();
        if (std::any_of(indices.begin(), indices.end(), is_mask)) return true;
      }
      return false;
    case OperatorFacts::Sync::without_output_size:
      return !arguments.empty() && arguments.back().isNone();
  }
  return false;
}

// CPU kernels without a generator argument draw from the CPU's default generator: for the call it is the device's.
// Another thread that draws from it at this moment gets numbers of this device.
class DefaultGeneratorOf {
 public:
  explicit DefaultGeneratorOf(c10::DeviceIndex device)
      : npu_(default_generator(device)), cpu_(at::detail::getDefaultCPUGenerator()), saved_(cpu_.get_state()) {
    cpu_.set_state(npu_.get_state());
  }
  ~DefaultGeneratorOf() {
    npu_.set_state(cpu_.get_state());
    cpu_.set_state(saved_);
  }

 private:
  at::Generator npu_, cpu_;
  Tensor saved_;
};

void run(const c10::OperatorHandle& op, Stack* stack, const OperatorFacts& facts, bool through_host) {
  const size_t count = op.schema().arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - static_cast<long>(count), stack->end());
  const c10::Device device = device_of_call(op, facts, arguments);
  bool told = false;
  visit_tensors(arguments, [&](const Tensor& tensor, size_t) { check_dtype(facts, tensor, told); });
  TORCH_CHECK_NOT_IMPLEMENTED(!facts.returns_view, "npu: operator '", *facts.name,
                              "' returns a view and is not simulated");
  count_executed(facts.name);

  c10::DeviceGuard guard(device);
  const auto stream = current_stream(device.index());
  const Launch by = launch(stream, facts.name);
  visit_tensors(arguments, [&](const Tensor& tensor, size_t i) {
    if (on_npu(tensor) && !facts.writes[i]) use(tensor, false, by);
  });

  CpuViews views;
  std::vector<std::pair<Tensor, Tensor>> written;  // npu, CPU
  const auto to_cpu = [&](const Tensor& tensor, size_t i) {
    Tensor cpu = views.of(tensor);
    if (facts.writes[i] && on_npu(tensor)) written.emplace_back(tensor, cpu);
    return cpu;
  };
  for (size_t i = 0; i < count; ++i) {
    auto& slot = (*stack)[stack->size() - count + i];
    const auto& value = arguments[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) slot = to_cpu(value.toTensor(), i);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? to_cpu(tensor, i) : tensor);
      slot = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(to_cpu(*tensor, i)) : tensor);
      }
      slot = std::move(list);
    } else if (value.isDevice() && value.toDevice().type() == kNpu) {
      slot = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().type() == kNpu, "Expected a 'npu' device type for generator but found '",
                  value.toGenerator().device().type(), "'");
      slot = cpu_generator_of(value.toGenerator());
    } else if (value.isNone()) {
      const auto type = op.schema().arguments()[i].type()->cast<c10::OptionalType>();
      if (type && type->getElementType()->kind() == c10::TypeKind::GeneratorType) {
        slot = cpu_generator_of(default_generator(device.index()));
      }
    }
  }
  {
    DeviceWork device_work;
    at::AutoDispatchBelowADInplaceOrView below;
    std::optional<DefaultGeneratorOf> random;
    if (facts.random_without_generator) random.emplace(device.index());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (const auto& [npu, cpu] : written) {
    take_over_shape(npu, cpu);
    use(npu, true, by);
  }
  const size_t results = facts.returned_argument.size();
  for (size_t r = 0; r < results; ++r) {
    auto& slot = (*stack)[stack->size() - results + r];
    if (facts.returned_argument[r] >= 0) {
      slot = arguments[facts.returned_argument[r]];
    } else if (slot.isTensor()) {
      slot = to_npu(slot.toTensor(), device, by);
      check_dtype(facts, slot.toTensor(), told);
    } else if (slot.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : slot.toTensorVector()) {
        list.push_back(to_npu(tensor, device, by));
        check_dtype(facts, list.get(list.size() - 1), told);
      }
      slot = std::move(list);
    } else if (slot.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : slot.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<Tensor>(to_npu(*tensor, device, by)) : tensor);
      }
      slot = std::move(list);
    }
  }
  if (through_host || host_waits_for(facts, arguments)) synchronize_with_host(stream, by);
}

// The one operator of common models that draws without a generator argument, as the CPU's kernel does it: drawn with
// the device's generator, its numbers do not depend on what other threads draw.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  static const auto* name = interned("aten::native_dropout");
  count_executed(name);
  const auto as_mask = input.options().dtype(at::kBool);
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, as_mask)};
  const double kept = 1 - p;
  Tensor mask = at::empty_like(input, as_mask).bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0 : 1 / kept), mask};
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("native_dropout", native_dropout); }

void kernel(const c10::OperatorHandle& op, Stack* stack) { run(op, stack, facts_of(op), false); }

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& facts = facts_of(op);
  TORCH_CHECK_NOT_IMPLEMENTED(policy != Policy::strict, "npu: operator '", *facts.name,
                              "' has no kernel on npu: torch_npu registers none and would run it on the CPU. Use other "
                              "operators, or register a kernel for PrivateUse1");
  const bool counted = policy == Policy::report;
  if (counted) count_fallback(*facts.name);
  // torch_npu's fallback copies the arguments to the host and the results back.
  run(op, stack, facts, counted);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Kept to their decomposition although torch_npu has kernels: they end in kernels of tensors.cpp (copies), or they take
// tensors of several devices by design.
const std::unordered_set<std::string> kDecomposed = {
    "aten::copy_",     "aten::clone",     "aten::_to_copy",   "aten::empty_like", "aten::new_empty_strided",
    "aten::ones_like", "aten::is_pinned", "aten::_pin_memory", "aten::_lazy_clone", "aten::resize_as_",
    "aten::contiguous", "aten::_foreach_copy_",
};

bool has_tensor_argument(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
    return argument.type()->str().find("Tensor") != std::string::npos;
  });
}

}  // namespace

void set_policy(Policy value) { policy = value; }

void set_missing_dtypes(const std::vector<c10::ScalarType>& dtypes) { missing_dtypes = dtypes; }

std::vector<std::string> register_kernels(const std::vector<std::string>& overloads) {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  std::vector<std::string> decomposed;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : overloads) {
    const auto dot = name.find('.');
    const std::string base = name.substr(0, dot), overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto op = dispatcher.findSchema({base, overload});
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const bool implicit = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    const bool explicit_ = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    const bool on_cpu = implicit || explicit_ || op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
                        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    // A kernel would hide the autograd of a composite operator; views alias through as_strided; factories end in empty.
    if (!on_cpu || implicit || kDecomposed.count(base) > 0 || facts_of(*op).returns_view ||
        (explicit_ && !has_tensor_argument(op->schema()))) {
      decomposed.push_back(name);
      continue;
    }
    library->impl(name.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
  }
  return decomposed;
}

void count_executed(const std::string* op) {
  std::lock_guard<std::mutex> lock(mutex);
  ++executed_[op];
}

std::map<std::string, int64_t> executed() {
  std::lock_guard<std::mutex> lock(mutex);
  std::map<std::string, int64_t> result;
  for (const auto& [name, count] : executed_) result[*name] = count;
  return result;
}

std::map<std::string, int64_t> cpu_fallbacks() {
  std::lock_guard<std::mutex> lock(mutex);
  return fallbacks_;
}

void reset_counts() {
  std::lock_guard<std::mutex> lock(mutex);
  executed_.clear();
  fallbacks_.clear();
}

}  // namespace simnpu

// Attention by its decomposition: one of the fused kernels of the CPU is not one of the chip.
static int64_t sdp_math(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                        double, bool, std::optional<double>, bool) {
  return 0;
}
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sdp_math)
}
