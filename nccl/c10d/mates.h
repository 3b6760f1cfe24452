// Ranks that run for real side by side, and what they exchange in groups whose
// other members are virtual.
//
// In such a group virtual member v holds what mate number v mod k holds, k being the
// number of mates and their order that of their group ranks. So each call gives
// what it would give among real ranks with these data, and every mate computes the
// same from the same. Only the mates' own contributions travel, from each to just those
// that need them: nobody waits for a mate whose data it does not get, as nobody
// would in gloo's own collectives.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "c10d/content.h"
#include "c10d/reduction.h"
#include "core/world.h"

namespace crystal {

// What of a call happens outside this process.
struct RealPart {
  virtual ~RealPart() = default;
  // Whether it is over, also where it failed. Does not wait.
  virtual bool is_done() = 0;
  // Waits for it, within the group's timeout, then fills the outputs. May be called
  // from several threads and again. Throws what went wrong, each time.
  virtual void finish() = 0;
};

// All of them as one; null where there are none.
std::shared_ptr<RealPart> join(std::vector<std::shared_ptr<RealPart>> parts);

// Runs `act`. Where that fails, and not because torch refuses the call, the error names
// the call and the mates of its group; without mates it is passed on as it is.
void naming_mates(
    const World& world, const Group& group, const CallRecord& record,
    const std::function<void()>& act);

// Makes a real backend among the mates of a group, in the order of their group
// ranks; returns when all are connected, or throws.
using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(
    const Group& group, std::chrono::milliseconds timeout)>;
void set_connect(Connect connect);
c10::intrusive_ptr<c10d::Backend> connect(
    const World& world, const Group& group, std::chrono::milliseconds timeout);

// A group's mates and the connection among them. Mates are counted 0 to k - 1.
class Mates {
 public:
  Mates(c10::intrusive_ptr<c10d::Backend> real, const Group& group);

  int count() const { return static_cast<int>(members_.size()); }
  int me() const { return me_; }
  // The group rank of mate j, and the other way round.
  int member(int j) const { return members_[j]; }
  int of(int member) const;
  // The mate whose data a member holds: itself, if it is one.
  int held_by(int member) const { return is_mate_[member] ? of(member) : member % count(); }
  bool is_mate(int member) const { return is_mate_[member]; }
  // How many members hold what mate j holds.
  int64_t copies(int j) const { return copies_[j]; }
  const std::vector<int>& virtual_members() const { return virtual_members_; }
  c10d::Backend& real() { return *real_; }

 private:
  const c10::intrusive_ptr<c10d::Backend> real_;
  const std::vector<int> members_;
  int me_ = 0;
  std::vector<bool> is_mate_;
  std::vector<int> virtual_members_;
  std::vector<int64_t> copies_;
};

// The messages of one call among mates, and what is done once they are there.
class Exchange {
 public:
  Exchange(
      std::shared_ptr<World> world, std::shared_ptr<Group> group, const CallRecord& record,
      std::shared_ptr<Mates> mates, std::chrono::milliseconds limit, int tag);

  // `data` is contiguous and stays as it is until the exchange is over. It leaves with
  // start(): gloo takes fewer steps where a receive comes before its send.
  void send(int mate, const at::Tensor& data);
  void receive(int mate, at::Tensor into);
  // Runs when everything is there, after what was given before.
  void then(std::function<void()> fill) { fills_.push_back(std::move(fill)); }
  void start();
  // Starts what has not been started, and waits for it all.
  void await();

  bool is_empty() const { return outgoing_.empty() && messages_.empty() && fills_.empty(); }
  bool is_over() const { return over_; }
  void finish();
  // Finishes on another thread. What went wrong is kept for who asks.
  static void finish_in_background(std::shared_ptr<Exchange> exchange);

 private:
  const std::shared_ptr<World> world_;
  const std::shared_ptr<Group> group_;
  const CallRecord record_;
  const std::shared_ptr<Mates> mates_;
  const std::chrono::milliseconds limit_;
  const int tag_;
  std::vector<std::pair<int, at::Tensor>> outgoing_; // to this mate
  std::vector<c10::intrusive_ptr<c10d::Work>> messages_;
  std::vector<std::function<void()>> fills_;
  std::mutex mutex_;
  std::atomic<bool> over_{false};
  std::exception_ptr error_;
};

// One call's view of peers of whom some are mates. A method posts what has to be
// exchanged; where that is nothing, it is done when the method returns, as with
// virtual peers only. What it could not give at once, part() gives.
class MixedPeers final : public Peers {
 public:
  // `record` outlives it.
  MixedPeers(
      std::shared_ptr<World> world, std::shared_ptr<Group> group, const CallRecord& record,
      std::shared_ptr<Mates> mates, std::chrono::milliseconds limit);

  void reduce(at::Tensor tensor, const c10d::ReduceOp& op, int root = -1) override;
  void reduce_scatter(
      at::Tensor output, const at::Tensor& input, const c10d::ReduceOp& op) override;
  void reduce_scatter(
      at::Tensor output, const std::vector<at::Tensor>& inputs,
      const c10d::ReduceOp& op) override;
  void gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) override;
  void gather(at::Tensor output, const at::Tensor& input) override;
  void broadcast(at::Tensor tensor, int root) override;
  void scatter(at::Tensor output, const std::vector<at::Tensor>& inputs, int root) override;
  void all_to_all(
      const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) override;
  void all_to_all(
      at::Tensor output, const at::Tensor& input, const std::vector<int64_t>& out_splits,
      const std::vector<int64_t>& in_splits) override;
  void receive(at::Tensor tensor, int source) override;
  void send(const at::Tensor& tensor, int destination) override;
  void barrier() override;

  std::shared_ptr<RealPart> part();

 private:
  using Tensors = std::vector<at::Tensor>;
  bool is_virtual(int v) const override { return !mates_->is_mate(v); }
  std::vector<int> virtual_members() const override { return mates_->virtual_members(); }
  Exchange& exchange();
  void send_to_others(const at::Tensor& data);
  at::Tensor receive_from(int mate, int64_t numel, at::ScalarType dtype);
  // What each mate holds, of the same size; `mine` is this one's.
  Tensors receive_from_others(const at::Tensor& mine);
  void receive_into(at::Tensor tensor, int mate);
  // What virtual members gave, where that is known, each as large as like(v).
  template <class Given, class Like>
  std::vector<Known> known_from(Given given_by, Like like);
  // output <- reduction of what all members hold, of which `mine` is this rank's.
  // Payloads hold it from element `begin`.
  void reduce_into(
      at::Tensor output, const at::Tensor& mine, int64_t begin, const c10d::ReduceOp& op);
  void reduce_sparse(at::Tensor tensor, const c10d::ReduceOp& op);

  const std::shared_ptr<World> world_held_;
  const std::shared_ptr<Group> group_held_;
  const std::shared_ptr<Mates> mates_;
  const std::chrono::milliseconds limit_;
  std::shared_ptr<Exchange> exchange_;
  bool is_eager_ = false; // has a second round, which must not wait for the program to wait
};

} // namespace crystal
