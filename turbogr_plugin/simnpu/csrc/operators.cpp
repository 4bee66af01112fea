// Facts about an operator, read once from its schema: which arguments it writes, which of them it returns, whether the
// host has to wait for it.
#include "simnpu.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>

namespace simnpu {
namespace {

using Names = std::unordered_set<std::string>;

// torch lets an index stay on the CPU, and lengths of packed sequences have to.
const Names kTakesCpuIndex = {"aten::index",     "aten::index_put",        "aten::index_put_", "aten::_index_put_impl_",
                              "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_pack_padded_sequence"};

std::mutex mutex;
auto& known = *new std::unordered_map<const c10::FunctionSchema*, OperatorFacts>();
Names any_dtype;

bool is_generator(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

OperatorFacts read(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& base = schema.name();
  OperatorFacts facts;
  facts.name = interned(schema.overload_name().empty() ? base : base + "." + schema.overload_name());
  bool takes_generator = false;
  for (const auto& argument : schema.arguments()) {
    facts.writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    takes_generator = takes_generator || is_generator(argument.type());
  }
  for (const auto& result : schema.returns()) {
    int which = -1;
    if (const auto* alias = result.alias_info()) {
      for (size_t i = 0; i < schema.arguments().size() && which < 0; ++i) {
        const auto* other = schema.arguments()[i].alias_info();
        if (facts.writes[i] && other->beforeSet() == alias->beforeSet()) which = static_cast<int>(i);
      }
      facts.returns_view = facts.returns_view || which < 0;
    }
    facts.returned_argument.push_back(which);
  }
  facts.any_dtype = any_dtype.count(*facts.name) > 0;
  facts.takes_cpu_index = kTakesCpuIndex.count(base) > 0;
  facts.random_without_generator = op.hasTag(at::Tag::nondeterministic_seeded) && !takes_generator;
  if (facts.takes_cpu_index) {
    // A mask is turned into indices first, whose number the host has to know.
    facts.sync = OperatorFacts::Sync::byte_index;
  } else if (base == "aten::repeat_interleave") {
    facts.sync = OperatorFacts::Sync::without_output_size;
  } else if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) {
    facts.sync = OperatorFacts::Sync::always;
  }
  return facts;
}

}  // namespace

void set_any_dtype(const std::vector<std::string>& overloads) {
  std::lock_guard<std::mutex> lock(mutex);
  any_dtype = {overloads.begin(), overloads.end()};
  for (auto& [_, facts] : known) facts.any_dtype = any_dtype.count(*facts.name) > 0;
}

const OperatorFacts& facts_of(const c10::OperatorHandle& op) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto* key = &op.schema();
  const auto found = known.find(key);
  return found != known.end() ? found->second : known.emplace(key, read(op)).first->second;
}

}  // namespace simnpu
