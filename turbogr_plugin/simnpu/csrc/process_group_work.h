// What the collectives of process_group.cpp return, and how they get at the memory of npu tensors.
#pragma once

#include "simnpu.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>

namespace simnpu {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

inline at::Tensor host_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
}

inline at::Tensor to_host(const at::Tensor& tensor) {
  auto host = host_like(tensor);
  host.copy_(CpuViews().of(tensor));
  return host;
}

inline void from_host(const at::Tensor& tensor, const at::Tensor& host) {
  CpuViews().of(tensor).copy_(host.view(tensor.sizes()));
}

inline c10::Stream current_stream_of(c10::Device device) { return c10::impl::VirtualGuardImpl(kNpu).getStream(device); }

// A collective whose exchange is done; what is left is the order of streams.
class DoneWork : public c10d::Work {
 public:
  DoneWork(int rank, c10d::OpType type, c10::Stream stream, Tensors outputs, bool block_host = false)
      : Work(rank, type),
        device_(stream.device()),
        event_(kNpu),
        outputs_(std::move(outputs)),
        block_host_(block_host) {
    const c10::StreamGuard guard(stream);  // the future records the current stream
    event_.record(stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_});
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/ = kNoTimeout) override {
    event_.block(current_stream_of(device_));
    if (block_host_) event_.synchronize();
    return true;
  }
  void synchronize() override { wait(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::Device device_;
  c10::Event event_;
  Tensors outputs_;
  bool block_host_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A send or a receive that gloo is still working on. The host blocks in wait() until the peer has come; on a device
// only the stream would.
class PendingWork : public c10d::Work {
 public:
  PendingWork(int rank, c10d::OpType type, c10::Stream stream, WorkPtr exchange, Tensors hosts, Tensors outputs)
      : Work(rank, type), device_(stream.device()), event_(kNpu), exchange_(std::move(exchange)),
        hosts_(std::move(hosts)), outputs_(std::move(outputs)) {
    event_.record(stream);
  }
  bool isCompleted() override { return done_ || exchange_->isCompleted(); }
  bool isSuccess() const override { return done_; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    std::lock_guard<std::mutex> lock(waiting_);
    if (!done_) {
      exchange_->wait(timeout);
      for (size_t i = 0; i < outputs_.size(); ++i) from_host(outputs_[i], hosts_[i]);
      done_ = true;
    }
    event_.block(current_stream_of(device_));
    return true;
  }
  void synchronize() override { wait(); }
  Tensors result() override { return outputs_; }

 private:
  std::mutex waiting_;
  c10::Device device_;
  c10::Event event_;
  WorkPtr exchange_;
  Tensors hosts_, outputs_;
  bool done_ = false;
};

// What startCoalescing and endCoalescing enclose.
class CoalescedWork : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<WorkPtr> parts) : Work(rank, c10d::OpType::COALESCED), parts_(std::move(parts)) {}
  bool isCompleted() override {
    return std::all_of(parts_.begin(), parts_.end(), [](const WorkPtr& part) { return part->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(parts_.begin(), parts_.end(), [](const WorkPtr& part) { return part->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    for (const auto& part : parts_) part->wait(timeout);
    return true;
  }
  void synchronize() override { wait(); }

 private:
  std::vector<WorkPtr> parts_;
};

}  // namespace simnpu
