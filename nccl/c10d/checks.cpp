#include "c10d/checks.h"

#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <algorithm>
#include <functional>

#include "c10d/content.h"

namespace crystal {
namespace {

using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

std::function<void(const std::string&)> refuse(Flavour flavour, const char* call) {
  const std::string who = flavour == Flavour::gloo ? "ProcessGroupGloo::" : "ProcessGroupNCCL::";
  return [prefix = who + call + ": "](const std::string& why) { TORCH_CHECK(false, prefix + why); };
}

// The element types of torch's gloo and NCCL process groups (observed with
// torch 2.11 and 2.13 for gloo; NCCL's own list as of 2.24, where 8-bit floats
// came in).
bool supports(Flavour flavour, at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
    case at::kBool: return true;
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2: return flavour == Flavour::nccl;
    default: return false;
  }
}

void same_device_dtype(const std::function<void(const std::string&)>& no, const Tensors& tensors) {
  for (const auto& t : tensors) {
    if (!t.options().type_equal(tensors[0].options())) {
      no("tensors must all have the same type");
    }
    if (t.device() != tensors[0].device()) {
      no("tensors must all be on the same device");
    }
  }
}

// What a root passes to gather or scatter: one list with a tensor per member.
void one_list_of(const std::function<void(const std::string&)>& no, const std::string& side,
                 const std::vector<Tensors>& lists, int size) {
  if (lists.size() != 1) {
    no("requires a single-element " + side + " list containing a list with " +
       std::to_string(size) + " tensors.");
  }
  if (lists[0].size() != static_cast<size_t>(size)) {
    no("Incorrect " + side + " list size " + std::to_string(lists[0].size()) + ". " +
       (side == "input" ? "Input" : "Output") + " list size should be " + std::to_string(size) +
       ", same as size of the process group.");
  }
}

} // namespace

const char* to_string(Flavour flavour) { return flavour == Flavour::gloo ? "gloo" : "nccl"; }

void Checks::dtype(const at::Tensor& tensor) const {
  const auto type = tensor.scalar_type();
  TORCH_CHECK_VALUE(
      flavour_ == Flavour::gloo || tensor.is_contiguous(tensor.suggest_memory_format()),
      "Tensors must be contiguous");
  if (supports(flavour_, type)) {
    return;
  }
  if (flavour_ == Flavour::gloo) {
    TORCH_CHECK(false, "Invalid scalar type");
  }
  TORCH_CHECK_TYPE(
      false, "Input tensor data type is not supported for NCCL process group: ", type);
}

void Checks::reducible(const at::Tensor& tensor, const ReduceOp& op) const {
  // torch's gloo sums complex tensors where the Python layer does not already
  // pass them as pairs of real numbers.
  if (flavour_ != Flavour::gloo || !at::isComplexType(tensor.scalar_type())) {
    dtype(tensor);
  }
  const auto type = tensor.scalar_type();
  const bool bitwise =
      op.op_ == ReduceOp::BAND || op.op_ == ReduceOp::BOR || op.op_ == ReduceOp::BXOR;
  const auto name = [&] {
    std::string upper = reduce_op_name(op);
    std::transform(upper.begin(), upper.end(), upper.begin(), ::toupper);
    return upper;
  };
  if (flavour_ == Flavour::gloo) {
    TORCH_CHECK(
        !bitwise || at::isIntegralType(type, /*includeBool=*/true), "Cannot use ReduceOp.", name(),
        " with non-integral dtype");
    TORCH_CHECK(
        op.op_ != ReduceOp::AVG || !at::isIntegralType(type, /*includeBool=*/true),
        "result type Float can't be cast to the desired output type ", c10::toString(type));
    TORCH_CHECK(op.op_ != ReduceOp::PREMUL_SUM, "Cannot use ReduceOp.PREMUL_SUM with Gloo");
    return;
  }
  TORCH_CHECK_VALUE(!bitwise, "Cannot use ReduceOp.", name(), " with NCCL");
  TORCH_CHECK_TYPE(
      op.op_ != ReduceOp::AVG || type != at::kBool,
      "Cannot use ReduceOp.AVG with boolean inputs");
}

void Checks::peer_in_group(const char* what, int64_t peer) const {
  TORCH_CHECK_VALUE(
      peer >= 0 && peer < size_, "Invalid ", what, " rank ", peer, " in a group of ", size_,
      " ranks. Called by group rank ", rank_, ". Use a rank from 0 to ", size_ - 1, ".");
}

void Checks::all_reduce(const Tensors& tensors, const ReduceOp& op) const {
  const auto no = refuse(flavour_, "allreduce");
  c10d::assertNonEmpty(no, tensors);
  c10d::assertLayoutMatch(no, tensors);
  c10d::assertTypeAndSizesMatch(no, tensors);
  if (tensors[0].layout() == c10::kSparse) {
    if (op.op_ != ReduceOp::SUM) {
      no("unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)");
    }
  } else if (tensors[0].layout() != c10::kStrided) {
    no("unsupported layout");
  }
  reducible(tensors[0], op);
}

void Checks::all_reduce_coalesced(const Tensors& tensors, const ReduceOp& op) const {
  const auto no = refuse(flavour_, "allreduce_coalesced");
  c10d::assertNonEmpty(no, tensors);
  c10d::assertLayoutMatch(no, tensors);
  same_device_dtype(no, tensors);
  if (tensors[0].layout() != c10::kStrided) {
    no("unsupported layout");
  }
  reducible(tensors[0], op);
}

void Checks::reduce(const Tensors& tensors, int64_t root, int64_t root_tensor,
                    const ReduceOp& op) const {
  const auto no = refuse(flavour_, "reduce");
  c10d::assertRootRank(no, root, size_);
  c10d::assertRootTensor(no, root_tensor, static_cast<int64_t>(tensors.size()));
  c10d::assertSingleElement(no, tensors);
  c10d::assertDense(no, tensors);
  reducible(tensors[0], op);
}

void Checks::broadcast(const Tensors& tensors, int64_t root, int64_t root_tensor) const {
  const auto no = refuse(flavour_, "broadcast");
  c10d::assertRootRank(no, root, size_);
  c10d::assertRootTensor(no, root_tensor, static_cast<int64_t>(tensors.size()));
  c10d::assertDense(no, tensors);
  c10d::assertTypeAndSizesMatch(no, tensors);
  dtype(tensors[0]);
}

void Checks::all_gather(const std::vector<Tensors>& outputs, const Tensors& inputs) const {
  const auto no = refuse(flavour_, "allgather");
  if (inputs.empty()) {
    no("requires non-empty input tensor list");
  }
  if (inputs.size() != outputs.size()) {
    no("requires input/output tensor lists to have the same length");
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto expected = inputs.size() * size_;
    if (outputs[i].size() != expected) {
      no("invalid output tensor list at index " + std::to_string(i) + " (expected length " +
         std::to_string(expected) + ", got " + std::to_string(outputs[i].size()) + ")");
    }
  }
  c10d::assertDense(no, inputs);
  if (flavour_ == Flavour::gloo) {
    c10d::assertTypeAndSizesMatch(no, inputs, inputs[0].options(), inputs[0].sizes());
    for (const auto& output : outputs) {
      c10d::assertTypeAndSizesMatch(no, output, inputs[0].options(), inputs[0].sizes());
    }
  } else { // uneven sizes are legal with NCCL: one broadcast per member then
    for (const auto& output : outputs) {
      for (size_t i = 0; i < output.size(); ++i) {
        c10d::assertTypeMatch(no, inputs[0].options(), output, i);
      }
    }
  }
  dtype(inputs[0]);
}

void Checks::all_gather_flat(const at::Tensor& output, const at::Tensor& input) const {
  if (flavour_ == Flavour::gloo) {
    // torch gathers into `size` chunks of the output, and its errors speak of
    // those; they are only made where there is an error, as they cost O(world).
    const auto no = refuse(flavour_, "allgather");
    const bool whole = output.numel() == input.numel() * size_;
    const bool concatenated = output.dim() == input.dim() && whole &&
        (output.dim() == 0 || output.sizes().slice(1).equals(input.sizes().slice(1)));
    if (!concatenated || !output.options().type_equal(input.options())) {
      const auto chunks = output.tensor_split(size_, 0);
      c10d::assertTypeMatch(no, input.options(), chunks, 0);
      for (size_t i = 0; i < chunks.size(); ++i) {
        c10d::assertSizesMatch(no, input.sizes(), chunks, i);
      }
    }
  } else {
    TORCH_CHECK_TYPE(
        input.dtype() == output.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK_VALUE(
        input.numel() * size_ == output.numel(),
        "output tensor size must be equal to world_size times input tensor size");
  }
  dtype(input);
}

void Checks::all_gather_coalesced(const std::vector<Tensors>& outputs,
                                  const Tensors& inputs) const {
  const auto no = refuse(flavour_, "allgather_coalesced");
  if (inputs.empty()) {
    no("requires non-empty input tensor list");
  }
  if (outputs.size() != static_cast<size_t>(size_)) {
    no("output lists should be equal to world size");
  }
  same_device_dtype(no, inputs);
  for (const auto& list : outputs) {
    if (list.size() != inputs.size()) {
      no("invalid output size: (expected length " + std::to_string(inputs.size()) + ", got " +
         std::to_string(list.size()) + ")");
    }
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i].sizes() != inputs[i].sizes()) {
        no("invalid size of output tensor at index " + std::to_string(i) + " (expected length " +
           c10d::toString(inputs[i].sizes()) + ", got " + c10d::toString(list[i].sizes()) + ")");
      }
    }
  }
  dtype(inputs[0]);
}

void Checks::reduce_scatter(const Tensors& outputs, const std::vector<Tensors>& inputs,
                            const ReduceOp& op) const {
  TORCH_CHECK(outputs.size() == 1, "requires a single-element output tensor list");
  TORCH_CHECK(
      inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(size_),
      "invalid input tensor list size, must be world size");
  TORCH_CHECK(
      inputs[0][rank_].numel() == outputs[0].numel(),
      "The output of reduce_scatter has another size than this rank's input. Group rank ", rank_,
      " of ", size_, ": output of ", outputs[0].numel(), " elements, input of ",
      inputs[0][rank_].numel(), ". Make the output as large as input ", rank_, ".");
  reducible(outputs[0], op);
}

void Checks::reduce_scatter_flat(const at::Tensor& output, const at::Tensor& input,
                                 const ReduceOp& op) const {
  TORCH_CHECK_TYPE(
      flavour_ == Flavour::gloo || input.dtype() == output.dtype(),
      "input tensor must be the same type as the output tensor.");
  if (flavour_ == Flavour::gloo) {
    TORCH_CHECK(
        output.numel() * size_ == input.numel(), "Check failed: output of ", output.numel(),
        " elements times ", size_, " ranks is not the input's ", input.numel());
  } else {
    TORCH_CHECK_VALUE(
        output.numel() * size_ == input.numel(),
        "input tensor must be the same size as output size times world size");
  }
  reducible(output, op);
}

void Checks::all_to_all(const Tensors& outputs, const Tensors& inputs) const {
  const auto no = refuse(flavour_, "alltoall");
  const auto length = [&](const char* which, size_t n) {
    if (n != static_cast<size_t>(size_)) {
      no(std::string(which) + " tensor list size " + std::to_string(n) +
         " does not match world size " + std::to_string(size_));
    }
  };
  length("input", inputs.size());
  length("output", outputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(
        inputs[i].scalar_type() == outputs[i].scalar_type(),
        "Tensors are not equal in size or data type");
  }
  if (flavour_ == Flavour::gloo) {
    c10d::assertTypeAndSizesMatch(no, inputs, inputs[0].options(), inputs[0].sizes());
    c10d::assertTypeAndSizesMatch(no, outputs, inputs[0].options(), inputs[0].sizes());
  }
  dtype(inputs[0]);
}

void Checks::all_to_all_flat(const at::Tensor& output, const at::Tensor& input,
                             const std::vector<int64_t>& out_splits,
                             const std::vector<int64_t>& in_splits) const {
  TORCH_CHECK(
      output.scalar_type() == input.scalar_type(), "Tensors are not equal in size or data type");
  TORCH_CHECK_VALUE(input.is_contiguous(), "Tensors must be contiguous");
  // Also for gloo, which leaves it unchecked that equal splits divide the rows
  // and then moves only some of them.
  c10d::checkSplitSizes(in_splits, input, size_);
  c10d::checkSplitSizes(out_splits, output, size_);
  dtype(input);
}

void Checks::gather(const std::vector<Tensors>& outputs, const Tensors& inputs,
                    int64_t root) const {
  const auto no = refuse(flavour_, "gather");
  c10d::assertRootRank(no, root, size_);
  c10d::assertSingleElementInput(no, inputs);
  c10d::assertDense(no, inputs);
  if (rank_ == root) {
    one_list_of(no, "output", outputs, size_);
    if (flavour_ == Flavour::gloo) {
      c10d::assertTypeAndSizesMatch(no, outputs[0], inputs[0].options(), inputs[0].sizes());
    }
  } else {
    if (!outputs.empty()) {
      no("requires empty output on non-root");
    }
  }
  dtype(inputs[0]);
}

void Checks::scatter(const Tensors& outputs, const std::vector<Tensors>& inputs,
                     int64_t root) const {
  const auto no = refuse(flavour_, "scatter");
  c10d::assertRootRank(no, root, size_);
  c10d::assertSingleElementOutput(no, outputs);
  c10d::assertDense(no, outputs);
  if (rank_ == root) {
    one_list_of(no, "input", inputs, size_);
    if (flavour_ == Flavour::gloo) {
      c10d::assertTypeAndSizesMatch(no, inputs[0], outputs[0].options(), outputs[0].sizes());
    }
  } else {
    if (!inputs.empty()) {
      no("requires empty input on non-root");
    }
  }
  dtype(outputs[0]);
}

void Checks::send(const Tensors& tensors, int64_t peer) const {
  TORCH_CHECK(
      tensors.size() == 1, flavour_ == Flavour::gloo ? "ProcessGroupGloo::send takes a single tensor"
                                                      : "ProcessGroupNCCL::send takes a single tensor");
  peer_in_group("destination", peer);
  if (flavour_ == Flavour::nccl) {
    dtype(tensors[0].contiguous()); // strided messages are legal
  }
}

void Checks::recv(const Tensors& tensors, int64_t peer) const {
  TORCH_CHECK(
      tensors.size() == 1, flavour_ == Flavour::gloo ? "ProcessGroupGloo::recv takes a single tensor"
                                                      : "ProcessGroupNCCL::recv takes a single tensor");
  peer_in_group("source", peer);
  if (flavour_ == Flavour::nccl) {
    dtype(tensors[0].contiguous());
  }
}

} // namespace crystal
