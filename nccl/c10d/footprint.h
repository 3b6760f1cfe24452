// What gloo itself holds while it carries out a call: copies that ProcessGroupGloo
// makes in tensors, and the tensors that its handles and its queue keep alive. A
// virtual rank has to hold the same, or it would need another amount of memory than a
// real one.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "core/release.h"

namespace crystal {

// The tensors of a call of a group, or of one member of a coalesced call.
struct CallTensors {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
};

class Footprint {
 public:
  // Takes what gloo takes for a call that arrives now, in the order in which it does.
  //   calls     one, or the members of a coalesced call
  //   rank      of this member of the group
  //   averages  the reduction is an average
  Footprint(c10d::OpType type, const std::vector<CallTensors>& calls, int rank, bool averages);

  // Lets go of what is held for the transfer when that ends, whatever becomes of this.
  void until(const End& end);
  // The transfer is over: gives what was held for it, to be let go of. The rest is held
  // as long as the footprint lives.
  std::shared_ptr<void> transferred();

 private:
  using Tensors = std::vector<at::Tensor>;
  // Lets go of the last one first, as the locals of a function are.
  struct Transfer {
    Tensors held;
    ~Transfer();
  };

  void keep_in_handle(const CallTensors& call);
  void keep_in_queue(const CallTensors& call);
  // A worker's flat copy of inputs, where they do not lie flat in memory.
  void flatten(const Tensors& inputs);
  // A worker's tensor of so many bytes.
  void take(int64_t bytes);
  // A worker divides a sum by the number of ranks.
  static void divide(const at::Tensor& sum);

  // Shared with whatever waits for the end: the queue's share outlives the handle.
  const std::shared_ptr<Transfer> transfer_ = std::make_shared<Transfer>();
  Tensors handle_;
};

// What a monitored barrier sends, for as long as it lasts.
at::Tensor monitored_barrier_message();

} // namespace crystal
