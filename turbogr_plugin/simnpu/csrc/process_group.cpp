// `hccl` of the simulated npu: collectives over gloo, ordered by streams as HCCL orders them.
//
// A collective is one operator on a communication stream of its group. That stream first waits for the caller's stream;
// Work::wait() makes the current stream wait for it. wait() blocks no host, so that a result used without it is as
// unordered here as on a device, and the stream checker finds it. gloo gets the values from the memory behind the npu
// tensors, so no copy between host and device is counted and no host synchronisation either (barrier excepted).
//
// Left out: the exchange itself is done when the call returns (send and receive excepted), so that ranks which issue
// the collectives of two groups in different orders wait for each other here, while HCCL may get through. ReduceOps and
// receive-from-any that HCCL lacks are refused.
#include "process_group.h"
#include "process_group_agreement.h"
#include "process_group_work.h"
#include "simnpu.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <functional>

namespace simnpu {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
// Gets the inputs as contiguous tensors on the host and fills the outputs, contiguous tensors on the host too.
using Exchange = std::function<void(Tensors& inputs, Tensors& outputs)>;

Tensor bytes(const Tensor& contiguous) {
  return contiguous.reshape(-1).view(at::kByte);
}

Tensor joined_bytes(const Tensors& tensors) {
  Tensors parts;
  for (const auto& tensor : tensors) parts.push_back(bytes(tensor));
  return at::cat(parts);
}

void split_bytes(const Tensor& joined, Tensors& tensors) {
  int64_t begin = 0;
  for (auto& tensor : tensors) {
    const auto length = static_cast<int64_t>(tensor.nbytes());
    bytes(tensor).copy_(joined.narrow(0, begin, length));
    begin += length;
  }
}

std::vector<int64_t> byte_lengths(const Tensors& tensors) {
  std::vector<int64_t> lengths;
  for (const auto& tensor : tensors) lengths.push_back(static_cast<int64_t>(tensor.nbytes()));
  return lengths;
}

class HcclOverGloo : public c10d::Backend {
 public:
  explicit HcclOverGloo(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {
    init();
  }

  const std::string getBackendName() const override { return "hccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("hccl::broadcast", OpType::BROADCAST, tensors, tensors, [&](Tensors& inputs, Tensors& outputs) {
      outputs = inputs;
      for (auto& host : outputs) broadcast_bytes(host, options.rootRank, options.timeout);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduce_all(OpType::ALLREDUCE, tensors, options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_all(OpType::ALLREDUCE_COALESCED, tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_reduction(options.reduceOp);
    const bool root = options.rootRank == rank_;
    const auto received = root ? tensors : Tensors{};
    return run("hccl::reduce", OpType::REDUCE, tensors, received, [&](Tensors& inputs, Tensors& outputs) {
      for (auto& host : inputs) {
        auto sent = options;
        host = reduced(host, sent.reduceOp, [&](Tensors& wide) { return gloo_->reduce(wide, sent); });
      }
      if (root) outputs = inputs;
    });
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    check_lists("allgather", outputs.size(), inputs.size());
    return gather_all(OpType::ALLGATHER, flattened(outputs), inputs, options);
  }

  WorkPtr allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    // Here outputs are one list per rank, each with one tensor per input.
    Tensors by_input;
    for (size_t i = 0; i < inputs.size(); ++i) {
      for (auto& of_rank : outputs) by_input.push_back(of_rank.at(i));
    }
    return gather_all(OpType::ALLGATHER_COALESCED, by_input, inputs, options);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return gather_into(OpType::_ALLGATHER_BASE, outputs, inputs, options);
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return gather_into(OpType::ALLGATHER_COALESCED, outputs, inputs, options);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto received = flattened(outputs);
    return run("hccl::gather", OpType::GATHER, inputs, received, [&](Tensors& from, Tensors& to) {
      std::vector<Tensors> lists;
      if (!to.empty()) {
        lists.emplace_back();
        for (auto& host : to) lists[0].push_back(bytes(host));
      }
      Tensors sent{bytes(from.at(0))};
      finish(gloo_->gather(lists, sent, options));
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto sent = flattened(inputs);
    return run("hccl::scatter", OpType::SCATTER, sent, outputs, [&](Tensors& from, Tensors& to) {
      std::vector<Tensors> lists;
      if (!from.empty()) {
        lists.emplace_back();
        for (auto& host : from) lists[0].push_back(bytes(host));
      }
      Tensors received{bytes(to.at(0))};
      finish(gloo_->scatter(received, lists, options));
    });
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    check_lists("reduce_scatter", inputs.size(), outputs.size());
    check_reduction(options.reduceOp);
    const auto sent = flattened(inputs);
    check_lists("reduce_scatter", sent.size(), outputs.size() * size_);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto chunks = of_ranks(sent, i);
      check_dtypes("reduce_scatter", chunks, outputs[i]);
      agree(*gloo_, OpType::REDUCE_SCATTER, outputs[i], element_counts(chunks),
            std::vector<int64_t>(size_, outputs[i].numel()), outputs.size(), options.timeout);
    }
    return run("hccl::reduce_scatter", OpType::REDUCE_SCATTER, sent, outputs, [&](Tensors& from, Tensors& to) {
      for (size_t i = 0; i < to.size(); ++i) {
        reduce_chunks(of_ranks(from, i), to[i], options);
      }
    });
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    check_lists("reduce_scatter_tensor", inputs.size(), outputs.size());
    check_reduction(options.reduceOp);
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_dtypes("reduce_scatter_tensor", {inputs[i]}, outputs[i]);
      TORCH_CHECK_VALUE(
          inputs[i].numel() == outputs[i].numel() * size_, "hccl reduce_scatter_tensor: the input has ",
          inputs[i].numel(), " elements; with ", size_, " ranks and an output of ", outputs[i].numel(),
          " elements it must have ", outputs[i].numel() * size_);
    }
    const auto type = OpType::_REDUCE_SCATTER_BASE;
    return run("hccl::reduce_scatter_tensor", type, inputs, outputs, [&](Tensors& from, Tensors& to) {
      for (size_t i = 0; i < to.size(); ++i) {
        auto chunks = from[i].reshape(-1).split(std::max<int64_t>(to[i].numel(), 1));
        chunks.resize(size_, at::empty({0}, from[i].options()));
        reduce_chunks(chunks, to[i], options);
      }
    });
  }

  WorkPtr alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    TORCH_CHECK_TYPE(
        output.scalar_type() == input.scalar_type(), "hccl all_to_all: the output is ", output.scalar_type(),
        ", the input is ", input.scalar_type());
    c10d::checkSplitSizes(output_splits, output, size_);
    c10d::checkSplitSizes(input_splits, input, size_);
    agree(*gloo_, OpType::ALLTOALL_BASE, input, split_lengths(input, input_splits, 1),
          split_lengths(output, output_splits, 1), 1, options.timeout);
    return run("hccl::all_to_all_single", OpType::ALLTOALL_BASE, {input}, {output}, [&](Tensors& from, Tensors& to) {
      auto received = bytes(to[0]), sent = bytes(from[0]);
      auto to_lengths = split_lengths(to[0], output_splits, static_cast<int64_t>(to[0].element_size()));
      auto from_lengths = split_lengths(from[0], input_splits, static_cast<int64_t>(from[0].element_size()));
      finish(gloo_->alltoall_base(received, sent, to_lengths, from_lengths, options));
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    check_lists("all_to_all", outputs.size(), size_);
    check_lists("all_to_all", inputs.size(), size_);
    check_dtypes("all_to_all", outputs, inputs[0]);
    check_dtypes("all_to_all", inputs, inputs[0]);
    agree(*gloo_, OpType::ALLTOALL, inputs[0], element_counts(inputs), element_counts(outputs), 1, options.timeout);
    return run("hccl::all_to_all", OpType::ALLTOALL, inputs, outputs, [&](Tensors& from, Tensors& to) {
      auto sent = joined_bytes(from), received = at::empty_like(joined_bytes(to));
      auto to_lengths = byte_lengths(to), from_lengths = byte_lengths(from);
      finish(gloo_->alltoall_base(received, sent, to_lengths, from_lengths, options));
      split_bytes(received, to);
    });
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const auto stream = enter("hccl::send", tensors, {});
    Tensors hosts;
    for (const auto& tensor : tensors) hosts.push_back(bytes(to_host(tensor)));
    return keep(c10::make_intrusive<PendingWork>(
        rank_, OpType::SEND, stream, gloo_->send(hosts, destination, tag), hosts, Tensors{}));
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const auto stream = enter("hccl::recv", {}, tensors);
    Tensors hosts, received;
    for (auto& tensor : tensors) {
      hosts.push_back(host_like(tensor));
      received.push_back(bytes(hosts.back()));
      // From now on to wait() nobody may read the tensor: who does shall see that.
      received.back().fill_(0xC5);
      from_host(tensor, hosts.back());
    }
    return keep(c10::make_intrusive<PendingWork>(
        rank_, OpType::RECV, stream, gloo_->recv(received, source, tag), hosts, tensors));
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10::impl::VirtualGuardImpl npu(kNpu);
    auto device = npu.getDevice();
    if (options.device && options.device->type() == kNpu && options.device->has_index()) device = *options.device;
    if (!options.device_ids.empty()) device = c10::Device(kNpu, static_cast<c10::DeviceIndex>(options.device_ids[0]));
    const auto stream = enter("hccl::barrier", {}, {}, device);
    c10d::BarrierOptions sent;
    sent.timeout = options.timeout;
    finish(gloo_->barrier(sent));
    return keep(c10::make_intrusive<DoneWork>(rank_, OpType::BARRIER, stream, Tensors{}, /*block_host=*/true));
  }

  void startCoalescing() override {
    TORCH_CHECK(!coalescing_, "hccl: startCoalescing within startCoalescing");
    coalescing_ = true;
  }

  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalescing_, "hccl: endCoalescing without startCoalescing");
    coalescing_ = false;
    return c10::make_intrusive<CoalescedWork>(rank_, std::exchange(coalesced_, {}));
  }

 private:
  static void finish(const WorkPtr& work) { work->wait(); }

  // One tensor per rank: the i-th of a list of such lists, flattened.
  Tensors of_ranks(const Tensors& tensors, size_t i) const {
    const auto begin = tensors.begin() + static_cast<int64_t>(i) * size_;
    return {begin, begin + size_};
  }

  static Tensors flattened(const std::vector<Tensors>& lists) {
    Tensors all;
    for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }

  static void check_lists(const char* name, size_t got, size_t expected) {
    TORCH_CHECK_VALUE(got == expected, "hccl ", name, ": got ", got, " lists of tensors, ", expected, " are needed");
  }

  static void check_dtypes(const char* name, const Tensors& tensors, const Tensor& other) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK_TYPE(
          tensor.scalar_type() == other.scalar_type(), "hccl ", name, ": got tensors of ", tensor.scalar_type(),
          " and ", other.scalar_type());
    }
  }

  static void check_reduction(const ReduceOp& op) {
    TORCH_CHECK_VALUE(
        op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PRODUCT || op.op_ == ReduceOp::MIN ||
            op.op_ == ReduceOp::MAX,
        "hccl: this ReduceOp is not there, HCCL has SUM, AVG, PRODUCT, MIN and MAX");
  }

  c10::Stream comm_stream(c10::Device device) {
    std::lock_guard<std::mutex> lock(streams_mutex_);
    auto found = streams_.find(device.index());
    if (found == streams_.end()) {
      found = streams_.emplace(device.index(), c10::impl::VirtualGuardImpl(kNpu).getNewStream(device)).first;
    }
    return found->second;
  }

  // Checks the tensors and launches: the communication stream waits for the caller's and uses the tensors.
  c10::Stream enter(
      const char* name, const Tensors& inputs, const Tensors& outputs, std::optional<c10::Device> device = {}) {
    for (const auto* tensors : {&inputs, &outputs}) {
      for (const auto& tensor : *tensors) {
        TORCH_CHECK_VALUE(
            on_npu(tensor) && tensor.layout() == at::kStrided, name, ": got a tensor on ", tensor.device(),
            " with layout ", tensor.layout(), ", only dense npu tensors are allowed");
        if (!device) device = tensor.device();
        TORCH_CHECK_VALUE(
            tensor.device() == *device, name, ": all tensors must be on one device, got ", *device, " and ",
            tensor.device());
      }
    }
    const auto stream = comm_stream(device ? *device : c10::impl::VirtualGuardImpl(kNpu).getDevice());
    stream_waits(stream, stream_clock(current_stream_of(stream.device())));
    const auto by = launch(stream, interned(name));
    for (const auto& tensor : inputs) use(tensor, /*write=*/false, by);
    for (const auto& tensor : outputs) use(tensor, /*write=*/true, by);
    for (const auto* tensors : {&inputs, &outputs}) {
      for (const auto& tensor : *tensors) record_stream(tensor, stream);
    }
    ++sequence_;
    return stream;
  }

  WorkPtr keep(WorkPtr work) {
    if (coalescing_) coalesced_.push_back(work);
    return work;
  }

  WorkPtr run(
      const char* name, OpType type, const Tensors& inputs, const Tensors& outputs, const Exchange& exchange) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const auto stream = enter(name, inputs, outputs);
    Tensors from, to;
    for (const auto& tensor : inputs) from.push_back(to_host(tensor));
    for (const auto& tensor : outputs) to.push_back(host_like(tensor));
    exchange(from, to);
    for (size_t i = 0; i < outputs.size(); ++i) from_host(outputs[i], to[i]);
    return keep(c10::make_intrusive<DoneWork>(rank_, type, stream, outputs));
  }

  void broadcast_bytes(const Tensor& host, int64_t root, std::chrono::milliseconds timeout) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = timeout;
    Tensors one{bytes(host)};
    finish(gloo_->broadcast(one, options));
  }

  // gloo has no 16-bit integers and no average of integers: those are summed wider and divided here, towards zero.
  Tensor reduced(Tensor host, ReduceOp& op, const std::function<WorkPtr(Tensors&)>& launch) {
    const auto type = host.scalar_type();
    const bool divide = op.op_ == ReduceOp::AVG && at::isIntegralType(type, /*includeBool=*/true);
    if (divide) op = ReduceOp::SUM;
    Tensors wide{type == at::kShort ? host.to(at::kInt) : host};
    finish(launch(wide));
    if (divide) wide[0].div_(size_, "trunc");
    return wide[0].to(type);
  }

  WorkPtr reduce_all(OpType type, Tensors& tensors, const c10d::AllreduceOptions& options) {
    check_reduction(options.reduceOp);
    return run("hccl::allreduce", type, tensors, tensors, [&](Tensors& inputs, Tensors& outputs) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        auto sent = options;
        outputs[i] = reduced(inputs[i], sent.reduceOp, [&](Tensors& wide) { return gloo_->allreduce(wide, sent); });
      }
    });
  }

  // `outputs` are those of the first input for each rank, then those of the second, and so on.
  WorkPtr gather_all(OpType type, const Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
    check_lists("allgather", outputs.size(), inputs.size() * size_);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto parts = of_ranks(outputs, i);
      check_dtypes("allgather", parts, inputs[i]);
      agree(*gloo_, type, inputs[i], std::vector<int64_t>(size_, inputs[i].numel()), element_counts(parts),
            inputs.size(), options.timeout);
    }
    return run("hccl::allgather", type, inputs, outputs, [&](Tensors& from, Tensors& to) {
      for (size_t i = 0; i < from.size(); ++i) {
        auto parts = of_ranks(to, i);
        gather_parts(from[i], parts, options);
      }
    });
  }

  WorkPtr gather_into(OpType type, Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
    check_lists("all_gather_into_tensor", outputs.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      TORCH_CHECK_VALUE(
          outputs[i].numel() == inputs[i].numel() * size_ && outputs[i].scalar_type() == inputs[i].scalar_type(),
          "hccl all_gather_into_tensor: the output has ", outputs[i].numel(), " elements of ",
          outputs[i].scalar_type(), "; with ", size_, " ranks and this input it must have ", inputs[i].numel() * size_,
          " of ", inputs[i].scalar_type());
    }
    return run("hccl::allgather_into_tensor", type, inputs, outputs, [&](Tensors& from, Tensors& to) {
      for (size_t i = 0; i < from.size(); ++i) {
        auto sent = bytes(from[i]), received = bytes(to[i]);
        if (sent.numel() > 0) finish(gloo_->_allgather_base(received, sent, options));
      }
    });
  }

  void gather_parts(const Tensor& from, Tensors& parts, const c10d::AllgatherOptions& options) {
    if (all_equal(parts)) {
      auto sent = bytes(from), received = at::empty({sent.numel() * size_}, sent.options());
      if (sent.numel() > 0) finish(gloo_->_allgather_base(received, sent, options));
      split_bytes(received, parts);
      return;
    }
    bytes(parts[rank_]).copy_(bytes(from));
    for (int root = 0; root < size_; ++root) {
      if (parts[root].numel() > 0) broadcast_bytes(parts[root], root, options.timeout);
    }
  }

  void reduce_chunks(Tensors chunks, Tensor& output, const c10d::ReduceScatterOptions& options) {
    const bool even = all_equal(chunks);
    for (auto& chunk : chunks) chunk = chunk.reshape(-1);
    auto joined = at::cat(chunks);
    if (joined.numel() == 0) return;
    auto flat = output.view(-1);
    if (even && joined.scalar_type() != at::kShort && at::isFloatingType(joined.scalar_type())) {
      finish(gloo_->_reduce_scatter_base(flat, joined, options));
      return;
    }
    c10d::AllreduceOptions sent;
    sent.reduceOp = options.reduceOp;
    sent.timeout = options.timeout;
    joined = reduced(joined, sent.reduceOp, [&](Tensors& wide) { return gloo_->allreduce(wide, sent); });
    int64_t begin = 0;
    for (int rank = 0; rank < rank_; ++rank) begin += chunks[rank].numel();
    flat.copy_(joined.narrow(0, begin, output.numel()));
  }

  // What `splits` rows, or an equal share where there are none, are in units of which an element has `units`.
  std::vector<int64_t> split_lengths(const Tensor& tensor, const std::vector<int64_t>& splits, int64_t units) const {
    const auto rows = tensor.size(0);
    const auto row = rows == 0 ? 0 : tensor.numel() / rows * units;
    std::vector<int64_t> lengths(size_, row * (rows / size_));
    for (size_t i = 0; i < splits.size(); ++i) lengths[i] = row * splits[i];
    return lengths;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::mutex streams_mutex_;
  std::atomic<uint64_t> sequence_{0};
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

}  // namespace

void bind_process_group(pybind11::module& module) {
  module.def(
      "hccl_over",
      [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<HcclOverGloo>(gloo);
      },
      pybind11::arg("gloo"), "The backend `hccl`, which exchanges through the gloo backend given.");
}

}  // namespace simnpu
