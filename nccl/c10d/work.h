// The handle of a virtual communication call, which completes at a given time.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "c10d/footprint.h"
#include "c10d/mates.h"
#include "core/release.h"
#include "core/world.h"

namespace crystal {

// Tells the world when a call is waited for, the first time.
class WaitRecorder {
 public:
  WaitRecorder(std::shared_ptr<World> world, int64_t call)
      : world_(std::move(world)), call_(call) {}
  void waited(int64_t begin_ns, int64_t end_ns);
  // A future has been given away. Who waits for it cannot be seen; in a backward
  // pass (DDP's reducer) it is the pass's end, which is over no earlier than the
  // call. `end_ns` says when that was, or -1.
  void future_taken(std::function<int64_t()> end_ns);

 private:
  std::shared_ptr<World> world_;
  int64_t call_;
  std::atomic<bool> done_{false};
};

class VirtualWork : public c10d::Work {
 public:
  // `held` are tensors that a real call would read or write until it is done; `record`
  // is that of the last call, where several end together. The call ends when its real
  // part, if there is one, is over and its release time has come.
  VirtualWork(
      int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
      std::vector<at::Tensor> held, const CallRecord& record, End end,
      std::shared_ptr<const Group> group, std::shared_ptr<World> world,
      std::chrono::milliseconds timeout, std::shared_ptr<RealPart> real = nullptr);
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
  // What the library holds for the call; null if nobody asks.
  void hold(std::shared_ptr<Footprint> footprint) { footprint_ = std::move(footprint); }

 private:
  void complete();

  const CallRecord record_;
  const End end_;
  std::shared_ptr<const Group> group_;
  WaitRecorder waits_;
  std::chrono::milliseconds timeout_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> held_;
  const std::shared_ptr<RealPart> real_; // null: all peers are virtual
  std::shared_ptr<Footprint> footprint_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The handle of a call that a real backend carries out. Where it does so among
// mates, errors name them.
class CarriedWork : public c10d::Work {
 public:
  CarriedWork(
      int rank, c10d::OpType type, c10::intrusive_ptr<c10d::Work> real, const CallRecord& record,
      std::shared_ptr<const Group> group, std::shared_ptr<World> world);

  bool isCompleted() override;
  bool isSuccess() const override { return real_->isSuccess(); }
  std::exception_ptr exception() const override { return real_->exception(); }
  int sourceRank() const override { return real_->sourceRank(); }
  std::vector<at::Tensor> result() override { return real_->result(); }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override { real_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return real_->getSequencenumber(); }

 private:
  void let_worker_let_go() const;

  c10::intrusive_ptr<c10d::Work> real_;
  CallRecord record_;
  std::shared_ptr<const Group> group_;
  std::shared_ptr<World> world_;
  WaitRecorder waits_;
};

} // namespace crystal
