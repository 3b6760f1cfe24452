// After ProcessGroupGloo.cpp of torch 2.11 to 2.13, and measured on both: a call is
// put into a queue by the caller, which records it (and for that makes a flat tensor of
// some calls' outputs, only to read its shape), and carried out by one of two workers.

#include "c10d/footprint.h"

#include <ATen/EmptyTensor.h>

#include <cmath>

#include "c10d/memory.h"

namespace crystal {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

at::Tensor memory_of(int64_t bytes) { return at::detail::empty_cpu({bytes}, at::kByte); }

// By the caller, only to record the call.
void take_and_give_back(int64_t bytes) { memory_of(bytes); }

// By a worker.
at::Tensor by_worker(int64_t bytes) {
  const ByLibrary scope;
  return memory_of(bytes);
}

// One list of all_gather's outputs; the members of the call are the pairs of an input
// and an output list, in the order of inputs.
int64_t gathered_bytes(const std::vector<CallTensors>& calls) {
  const auto num_inputs = static_cast<int64_t>(std::lround(std::sqrt(calls.size())));
  return num_inputs * bytes_of(calls[0].outputs);
}

// The inputs of these pairs, each once.
Tensors gathered_inputs(const std::vector<CallTensors>& calls) {
  const auto num_inputs = static_cast<size_t>(std::lround(std::sqrt(calls.size())));
  Tensors inputs;
  for (size_t i = 0; i < num_inputs; ++i) {
    inputs.push_back(calls[i * num_inputs].inputs[0]);
  }
  return inputs;
}

} // namespace

Footprint::Footprint(
    OpType type, const std::vector<CallTensors>& calls, int rank, bool averages) {
  Tensors inputs;
  for (const auto& call : calls) {
    inputs.insert(inputs.end(), call.inputs.begin(), call.inputs.end());
  }
  switch (type) {
    case OpType::SEND:
    case OpType::RECV:
    case OpType::RECVANYSOURCE:
      keep_in_handle(calls[0]); // no queue: gloo's threads work on the tensor
      return;

    case OpType::ALLGATHER:
    case OpType::_ALLGATHER_BASE:
      take_and_give_back(gathered_bytes(calls));
      flatten(gathered_inputs(calls));
      take(gathered_bytes(calls));
      break;

    case OpType::ALLGATHER_COALESCED: {
      // The recorded shape is that of as many copies of the first output.
      take_and_give_back(
          static_cast<int64_t>(calls.size()) * bytes_of({calls[0].inputs[0]}));
      flatten(inputs);
      int64_t bytes = 0;
      for (const auto& call : calls) {
        bytes += bytes_of(call.outputs);
      }
      take(bytes);
      break;
    }

    case OpType::GATHER:
      if (!calls[0].outputs.empty()) { // at the root
        take_and_give_back(bytes_of(calls[0].outputs));
        take(bytes_of(calls[0].outputs));
      }
      flatten(inputs);
      break;

    case OpType::SCATTER:
      if (!inputs.empty()) { // at the root
        take_and_give_back(bytes_of(inputs));
      }
      break;

    case OpType::ALLTOALL:
      flatten(inputs);
      take(bytes_of(calls[0].outputs));
      break;

    case OpType::ALLREDUCE_COALESCED:
      flatten(inputs);
      [[fallthrough]];
    case OpType::ALLREDUCE:
    case OpType::REDUCE:
      if (averages) {
        divide(inputs[0]);
      }
      break;

    // Reductions of copies, of which one part is then taken.
    case OpType::_REDUCE_SCATTER_BASE:
    case OpType::REDUCE_SCATTER: {
      CallTensors copies;
      for (size_t i = 0; i < inputs.size(); ++i) {
        const bool in_place =
            type == OpType::REDUCE_SCATTER && static_cast<int>(i) == rank;
        copies.inputs.push_back(
            in_place ? calls[0].outputs[0] : memory_of(bytes_of({inputs[i]})));
      }
      for (size_t i = 0; averages && i < inputs.size(); ++i) {
        divide(inputs[i]);
      }
      for (const auto& call : calls) {
        copies.outputs.insert(copies.outputs.end(), call.outputs.begin(), call.outputs.end());
      }
      keep_in_handle(copies);
      keep_in_queue(copies);
      return;
    }

    default:
      break;
  }
  for (const auto& call : calls) {
    keep_in_handle(call);
    keep_in_queue(call);
  }
}

Footprint::Transfer::~Transfer() {
  while (!held.empty()) {
    held.pop_back();
  }
}

void Footprint::take(int64_t bytes) { transfer_->held.push_back(by_worker(bytes)); }

void Footprint::flatten(const Tensors& inputs) {
  Tensors flat; // gone once they are joined
  for (const auto& input : inputs) {
    if (!input.is_contiguous()) {
      flat.push_back(by_worker(bytes_of({input})));
    }
  }
  if (inputs.size() > 1) {
    take(bytes_of(inputs));
  } else if (!flat.empty()) {
    transfer_->held.push_back(flat[0]);
  }
}

void Footprint::divide(const at::Tensor& sum) {
  const at::Tensor number = by_worker(sizeof(int64_t));
  const at::Tensor as_dtype = by_worker(static_cast<int64_t>(sum.element_size()));
}

void Footprint::keep_in_handle(const CallTensors& call) {
  handle_.insert(handle_.end(), call.inputs.begin(), call.inputs.end());
  handle_.insert(handle_.end(), call.outputs.begin(), call.outputs.end());
}

void Footprint::keep_in_queue(const CallTensors& call) {
  auto& held = transfer_->held;
  held.insert(held.begin(), call.inputs.begin(), call.inputs.end());
  held.insert(held.begin(), call.outputs.begin(), call.outputs.end());
}

void Footprint::until(const End& end) {
  if (!transfer_->held.empty()) {
    release_at_end(end, transfer_);
  }
}

std::shared_ptr<void> Footprint::transferred() {
  auto over = std::make_shared<Transfer>();
  over->held.swap(transfer_->held);
  return over;
}

at::Tensor monitored_barrier_message() { return memory_of(sizeof(int32_t)); }

} // namespace crystal
