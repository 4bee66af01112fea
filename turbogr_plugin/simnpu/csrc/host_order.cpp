// Pinned memory that a non-blocking copy is still using, and the host operators that touch it too early.
//
// A global RecordFunction callback sees the operators of the host. It is on only while there are such copies, so a
// program without them pays nothing. It sees operators: what reads through numpy or a raw pointer is not seen.
#include "simnpu.h"

#include <ATen/record_function.h>

#include <algorithm>

namespace simnpu {
namespace {

struct Pending {
  const char* low;
  const char* high;
  bool writes_host;
  Launch by;
};

std::mutex mutex;
auto& pending = *new std::vector<Pending>();
std::optional<at::CallbackHandle> callback;
bool callback_on = false;
thread_local int device_work = 0;

void drop_ended_locked() {
  pending.erase(std::remove_if(pending.begin(), pending.end(),
                               [](const Pending& p) { return host_knows(p.by.lane, p.by.tick); }),
                pending.end());
}

void switch_callback_locked();

// Names an operator that passes a tensor on without reading it: what it calls is seen by itself.
bool only_passes_on(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::_to_copy",    "aten::to",           "aten::pin_memory",     "aten::is_pinned",      "aten::empty_like",
      "aten::zeros_like",  "aten::ones_like",    "aten::rand_like",      "aten::randn_like",     "aten::full_like",
      "aten::new_empty",   "aten::new_zeros",    "aten::new_ones",       "aten::new_full",       "aten::size",
      "aten::result_type", "aten::is_same_size", "aten::record_stream",  "aten::can_cast",       "aten::stride",
      "aten::set_",        "aten::resize_",      "aten::resize_as_",     "aten::requires_grad_", "aten::_version",
      "aten::new_empty_strided", "aten::_has_compatible_shallow_copy_type",
  };
  return names.count(name) > 0;
}

void check_host_tensor(const at::Tensor& tensor, bool write, const std::string* op) {
  if (!tensor.defined() || !tensor.device().is_cpu() || !tensor.has_storage()) return;
  const auto* base = static_cast<const char*>(tensor.storage().data());
  if (base == nullptr || tensor.numel() == 0) return;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto* low = base + tensor.storage_offset() * tensor.itemsize();
  const auto* high = low + (last + 1) * tensor.itemsize();
  // Reported once: the operators inside of this one touch the same memory.
  std::vector<Pending> hits;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto hit = [&](const Pending& p) { return p.low < high && low < p.high && (p.writes_host || write); };
    std::copy_if(pending.begin(), pending.end(), std::back_inserter(hits), hit);
    pending.erase(std::remove_if(pending.begin(), pending.end(), hit), pending.end());
    switch_callback_locked();
  }
  for (const auto& p : hits) {
    if (host_knows(p.by.lane, p.by.tick)) continue;
    const auto bytes = static_cast<int64_t>(high - low);
    report_race({write ? "host write before copy ended" : "host read before copy ended",
                 race_use(p.by, p.high - p.low, p.writes_host),
                 {*op, -1, 0, current_source(), bytes, write},
                 static_cast<int64_t>(p.high - p.low),
                 1});
  }
}

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  if (device_work > 0 || !check_streams()) return nullptr;
  const auto schema = function.operator_schema();
  if (!schema || only_passes_on(schema->name())) return nullptr;
  const auto inputs = function.inputs();
  const auto& arguments = schema->arguments();
  // An operator with npu tensors runs on the device; what it copies is told by the copy.
  for (const auto& value : inputs) {
    if (value.isTensor() && on_npu(value.toTensor())) return nullptr;
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (on_npu(tensor)) return nullptr;
      }
    }
  }
  const auto* op = interned(schema->overload_name().empty() ? schema->name()
                                                            : schema->name() + "." + schema->overload_name());
  // These stand at the start of tolist(), which then reads without an operator.
  const bool reads_alias = schema->name() == "aten::resolve_conj" || schema->name() == "aten::resolve_neg";
  for (size_t i = 0; i < inputs.size() && i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool write = alias != nullptr && alias->isWrite();
    if (alias != nullptr && !write && !reads_alias) continue;  // a view
    if (inputs[i].isTensor()) {
      check_host_tensor(inputs[i].toTensor(), write, op);
    } else if (inputs[i].isTensorList()) {
      for (const at::Tensor& tensor : inputs[i].toTensorVector()) check_host_tensor(tensor, write, op);
    } else if (inputs[i].isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : inputs[i].toOptionalTensorVector()) {
        if (tensor) check_host_tensor(*tensor, write, op);
      }
    }
  }
  return nullptr;
}

void switch_callback_locked() {
  const bool wanted = !pending.empty();
  if (wanted == callback_on) return;
  callback_on = wanted;
  if (!callback) {
    callback = at::addGlobalCallback(
        at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  } else if (wanted) {
    at::reenableCallback(*callback);
  } else {
    at::disableCallback(*callback);
  }
}

}  // namespace

DeviceWork::DeviceWork() { ++device_work; }
DeviceWork::~DeviceWork() { --device_work; }

void host_copy_started(const void* data, size_t bytes, bool writes_host, const Launch& by) {
  if (!check_streams() || bytes == 0) return;
  std::lock_guard<std::mutex> lock(mutex);
  drop_ended_locked();
  const auto* low = static_cast<const char*>(data);
  // The same buffer again on the same stream: the later copy ends later.
  pending.erase(std::remove_if(pending.begin(), pending.end(),
                               [&](const Pending& p) {
                                 return p.by.lane == by.lane && low <= p.low && p.high <= low + bytes &&
                                        p.writes_host == writes_host;
                               }),
                pending.end());
  pending.push_back({low, low + bytes, writes_host, by});
  switch_callback_locked();
}

void check_host_range(const void* data, size_t bytes, bool writes_host, const Launch& by) {
  std::vector<Pending> hits;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto* low = static_cast<const char*>(data);
    for (const auto& p : pending) {
      if (p.low < low + bytes && low < p.high && (p.writes_host || writes_host)) hits.push_back(p);
    }
  }
  for (const auto& p : hits) {
    if (lane_knows(by.lane, p.by.lane, p.by.tick)) continue;
    const char* kind = !p.writes_host ? "write before reader ended"
                       : writes_host  ? "write before write ended"
                                      : "read before write ended";
    report_race({kind, race_use(p.by, p.high - p.low, p.writes_host), race_use(by, bytes, writes_host),
                 static_cast<int64_t>(bytes), 1});
  }
}

void host_copies_over() {
  std::lock_guard<std::mutex> lock(mutex);
  if (pending.empty()) return;
  drop_ended_locked();
  switch_callback_locked();
}

void host_memory_freed(const void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  if (pending.empty()) return;
  const auto* low = static_cast<const char*>(data);
  pending.erase(std::remove_if(pending.begin(), pending.end(),
                               [&](const Pending& p) { return p.low < low + bytes && low < p.high; }),
                pending.end());
  switch_callback_locked();
}

void reset_host_copies() {
  std::lock_guard<std::mutex> lock(mutex);
  pending.clear();
  switch_callback_locked();
}

}  // namespace simnpu
