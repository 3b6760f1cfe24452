// What virtual peers' data looks like. The mirror policy: peers hold what I
// hold. Where a payload is known it takes the place of the invention.
//
// Nothing here leaves uninitialised memory, and finite input gives finite
// output. None of it shows up in a profiler or in autograd, since in a real
// run the bytes come from the network.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

#include "core/world.h"

namespace crystal {

// One call's view of its peers, all of whom are virtual.
class Peers {
 public:
  Peers(World& world, Group& group, const CallRecord& record)
      : world_(world), group_(group), record_(record),
        payloads_(world.payloads(group, record.position.seq)) {}
  virtual ~Peers() = default;

  // tensor <- reduction over all members, this rank's share being in it. With a
  // root other than this rank it stays as it is.
  virtual void reduce(at::Tensor tensor, const c10d::ReduceOp& op, int root = -1);
  // output <- chunk `rank()` of the reduction of `input`, which holds the
  // chunks of all members one after another, `output.numel()` each.
  virtual void reduce_scatter(at::Tensor output, const at::Tensor& input, const c10d::ReduceOp& op);
  // The same with one input tensor per member, of any sizes.
  virtual void reduce_scatter(at::Tensor output, const std::vector<at::Tensor>& inputs,
                              const c10d::ReduceOp& op);
  // outputs[v] <- what member v holds; `input` is this rank's.
  virtual void gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input);
  // The same into one tensor of size() * input.numel() elements.
  virtual void gather(at::Tensor output, const at::Tensor& input);
  // tensor <- what the root holds.
  virtual void broadcast(at::Tensor tensor, int root);
  // output <- the root's chunk for this rank. `inputs` is the root's list, or
  // empty elsewhere.
  virtual void scatter(at::Tensor output, const std::vector<at::Tensor>& inputs, int root);
  // outputs[v] <- what member v sends to this rank; inputs[v] is what this
  // rank sends to v. Sizes may differ freely.
  virtual void all_to_all(const std::vector<at::Tensor>& outputs,
                          const std::vector<at::Tensor>& inputs);
  // The same with both sides in one tensor each, split along the first
  // dimension; empty splits mean equal ones.
  virtual void all_to_all(at::Tensor output, const at::Tensor& input,
                          const std::vector<int64_t>& out_splits,
                          const std::vector<int64_t>& in_splits);
  virtual void receive(at::Tensor tensor, int source);
  virtual void send(const at::Tensor& tensor, int destination);
  virtual void barrier() {}

 protected:
  // Whether nobody runs as member v, so that its data are invented.
  virtual bool is_virtual(int v) const { return v != group_.rank(); }
  virtual std::vector<int> virtual_members() const;
  // Whether values like these steer programs, so that they have to be the peers' own.
  bool steers(const at::Tensor& tensor) const;
  // What member v contributed to this call, null where it is not known.
  const Payload* find(int v, int peer = -1) const;
  // The same as a flat tensor of `dtype`; undefined where it is not known.
  at::Tensor payload(int v, at::ScalarType dtype, int peer = -1);
  // The part of it for this rank, in an all_to_all.
  at::Tensor payload_for_me(int v, at::ScalarType dtype);
  // One tensor per member: parts of `whole` along its first dimension.
  std::vector<at::Tensor> slots(
      const at::Tensor& whole, const std::vector<int64_t>& splits) const;
  struct Known {
    int member;
    at::Tensor values; // flat
  };
  // The known payloads of virtual members, `length` elements from `begin` of each.
  std::vector<Known> known_slices(at::ScalarType dtype, int64_t begin, int64_t length);
  // mine <- reduction over `known` and as many copies of mine as are missing.
  void reduce_known(at::Tensor& mine, const std::vector<Known>& known,
                    const c10d::ReduceOp& op);
  void note_invented(const at::Tensor& tensor, const char* how);
  void assign(at::Tensor& tensor, const at::Tensor& known) const;
  void from_virtual(at::Tensor& tensor, const at::Tensor& known);

  World& world_;
  Group& group_;
  const CallRecord& record_;
  // Keeps what this rank contributes to the call, and asks for what `contributors`
  // do, where the values steer programs. `mine` is undefined where this rank
  // contributes nothing.
  void exchange_control(const at::Tensor& like, const at::Tensor& mine,
                        const std::vector<int>& contributors, int peer = -1,
                        const std::vector<int64_t>& splits = {});

  std::shared_ptr<const World::CallPayloads> payloads_; // null: nothing is known
};

// The dtype in torch's spelling, static text.
const char* dtype_name(at::ScalarType type);
const char* reduce_op_name(const c10d::ReduceOp& op);

} // namespace crystal
