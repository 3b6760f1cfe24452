// The handle of a virtual communication call, which completes at a given time.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "core/call_record.h"

namespace crystal {

class VirtualWork : public c10d::Work {
 public:
  // `held` are tensors that a real call would read or write until it is done.
  VirtualWork(
      int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
      std::vector<at::Tensor> held, const CallRecord& record, std::shared_ptr<const Group> group,
      std::chrono::milliseconds timeout);
  ~VirtualWork() override;

  bool isCompleted() override;
  bool isSuccess() const override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  int sourceRank() const override { return record_.peer_rank; }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return record_.position.seq; }

 private:
  void complete();

  CallRecord record_;
  std::shared_ptr<const Group> group_;
  std::chrono::milliseconds timeout_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> held_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace crystal
