// A c10d backend whose peers are virtual. It stands where gloo stands, and on
// a machine without CUDA where NCCL stands; everything above it (ProcessGroup,
// DeviceMesh, functional collectives, DDP's reducer) is torch's own.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "c10d/checks.h"
#include "c10d/content.h"
#include "c10d/footprint.h"
#include "c10d/mates.h"
#include "core/world.h"

namespace crystal {

struct VirtualOptions : c10d::Backend::Options {
  explicit VirtualOptions(
      std::string backend, std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options(std::move(backend), timeout) {}
};

class VirtualBackend : public c10d::Backend {
 public:
  VirtualBackend(
      Flavour flavour, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      c10::intrusive_ptr<VirtualOptions> options);

  const std::string getBackendName() const override { return to_string(flavour_); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<VirtualOptions> virtual_options() { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return flavour_ == Flavour::nccl; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setGroupUid(const std::string& uid) override;

  // The communicator, created on first use. Its members are the options'
  // global_ranks_in_group; none are given for the default group.
  Group& group();

  void setSequenceNumberForGroup() override { group(); }
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override;
  int64_t splits() const { return splits_; }

  // From here on a real backend moves the data and sets the time; calls are
  // recorded as ever.
  void carry_by(c10::intrusive_ptr<c10d::Backend> carrier) { carrier_ = std::move(carrier); }

  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_coalesced(
      std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr reduce_scatter(
      Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPtr send(Tensors&, int, int) override;
  WorkPtr recv(Tensors&, int, int) override;
  WorkPtr recvAnysource(Tensors&, int) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override;

 private:
  // One member of a call: a coalesced call has several, which end together.
  struct Part {
    Call call;
    Tensors inputs;
    Tensors outputs;
    std::function<void(Peers&)> fill;
  };
  static std::vector<Part> all_reduce_parts(
      const Tensors& tensors, const c10d::AllreduceOptions& opts);
  // The one way in: stamps the arrival, makes the record, invents the peers'
  // data, and returns a handle that completes at the release time.
  // `carry` makes the same call on a real backend.
  using Carry = std::function<WorkPtr(c10d::Backend&)>;
  WorkPtr issue(
      c10d::OpType type, const char* title, std::vector<Part> parts,
      std::chrono::milliseconds timeout, const Carry& carry);
  WorkPtr issue(
      c10d::OpType type, const char* title, Part part, std::chrono::milliseconds timeout,
      const Carry& carry);
  // Adds what of the part is real to `real`.
  CallRecord issue_part(
      c10d::OpType type, Part& part, std::chrono::milliseconds timeout,
      std::vector<std::shared_ptr<RealPart>>& real);
  // Connects the members that run for real, once they are known: as gloo would, when the
  // group is created.
  void connect_mates();

  Transport transport_of(const Call& call, const Group& members) const;
  // What gloo would hold for the call; null where gloo itself does, or nobody asks.
  std::shared_ptr<Footprint> take_footprint(c10d::OpType type, const std::vector<Part>& parts);
  WorkPtr all_gather_flat(
      c10d::OpType type, const Tensors& outputs, const Tensors& inputs,
      const c10d::AllgatherOptions& opts, const Carry& carry);

  const Flavour flavour_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<VirtualOptions> options_;
  const std::shared_ptr<World> world_;
  const Checks checks_;
  std::mutex group_mutex_;
  std::shared_ptr<Group> group_;
  c10::intrusive_ptr<c10d::Backend> carrier_;
  std::once_flag connected_;
  std::shared_ptr<Mates> mates_; // null: all peers are virtual, or all are real
  uint64_t sequence_ = 0;
  int64_t splits_ = 0;

  // Between startCoalescing and endCoalescing.
  int64_t batch_ = -1;
  bool is_batch_begun_ = false; // and has calls
  End batch_end_;
  CallRecord batch_last_;
  Tensors batch_held_;
  std::vector<std::shared_ptr<RealPart>> batch_real_;
};

// Types of their own, since torch asks isinstance(backend, ProcessGroupGloo).
class GlooBackend : public VirtualBackend {
 public:
  using VirtualBackend::VirtualBackend;
};
class NcclBackend : public VirtualBackend {
 public:
  using VirtualBackend::VirtualBackend;
};

} // namespace crystal
