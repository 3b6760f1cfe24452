#include "c10d/content.h"

#include <cstring>
#include <numeric>

#include "c10d/memory.h"
#include "c10d/tensors.h"

namespace crystal {

using c10d::ReduceOp;


void Peers::reduce(at::Tensor tensor, const ReduceOp& op, int root) {
  Unseen unseen;
  if (tensor.is_sparse()) { // all members hold the same indices
    // The tensor gets other storages, which are the program's; gloo's worker makes them.
    const Watched watched;
    const ByLibrary by_library;
    const at::Tensor whole = tensor.coalesce();
    at::Tensor values = whole._values().clone();
    reduce_equal(values, group_.size(), op);
    tensor.copy_(at::_sparse_coo_tensor_unsafe(whole._indices(), values, whole.sizes())
                     ._coalesced_(true));
    return;
  }
  const bool receives = root < 0 || root == group_.rank();
  exchange_control(tensor, tensor, receives ? virtual_members() : std::vector<int>{});
  if (!receives) {
    return;
  }
  reduce_known(tensor, known_slices(tensor.scalar_type(), 0, tensor.numel()), op);
}

void Peers::reduce_scatter(at::Tensor output, const at::Tensor& input, const ReduceOp& op) {
  Unseen unseen;
  const int64_t chunk = output.numel();
  const int64_t begin = chunk * group_.rank();
  exchange_control(input, input, virtual_members());
  output.copy_(flat(input).narrow(0, begin, chunk).view(output.sizes()));
  reduce_known(output, known_slices(output.scalar_type(), begin, chunk), op);
}

void Peers::reduce_scatter(at::Tensor output, const std::vector<at::Tensor>& inputs,
                           const ReduceOp& op) {
  Unseen unseen;
  if (steers(output)) {
    std::vector<at::Tensor> parts;
    for (const auto& in : inputs) {
      parts.push_back(flat(in));
    }
    exchange_control(output, at::cat(parts), virtual_members());
  }
  int64_t begin = 0;
  for (int v = 0; v < group_.rank(); ++v) {
    begin += inputs[v].numel();
  }
  output.copy_(inputs[group_.rank()].reshape(output.sizes()));
  reduce_known(output, known_slices(output.scalar_type(), begin, output.numel()), op);
}

void Peers::gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) {
  Unseen unseen;
  exchange_control(input, input, outputs.empty() ? std::vector<int>{} : virtual_members());
  if (outputs.empty()) { // gathered by another rank
    return;
  }
  bool all_known = true;
  for (int v = 0; v < group_.size(); ++v) {
    at::Tensor out = outputs[v];
    at::Tensor known = v == group_.rank() ? at::Tensor() : payload(v, out.scalar_type());
    if (known.defined()) {
      assign(out, known);
    } else if (out.sizes() == input.sizes()) {
      out.copy_(input);
      all_known &= v == group_.rank();
    } else {
      copy_cyclic(out, input);
      all_known &= v == group_.rank();
    }
  }
  if (!all_known) {
    note_invented(input, "mirrored");
  }
}

void Peers::gather(at::Tensor output, const at::Tensor& input) {
  Unseen unseen;
  exchange_control(input, input, virtual_members());
  const at::Tensor from = flat(input).contiguous();
  bool all_known = true;
  fill_flat(output, [&](at::Tensor& t) {
    const int64_t chunk = from.numel();
    if (chunk == 0) {
      return;
    }
    // In-place use (the input is a chunk of the output) is legal, and then this
    // rank's chunk must survive until it has been copied everywhere.
    auto* out = static_cast<char*>(t.data_ptr());
    const auto* in = static_cast<const char*>(from.const_data_ptr());
    for (int v = 0; v < group_.size(); ++v) {
      if (v == group_.rank()) {
        std::memmove(out + v * from.nbytes(), in, from.nbytes());
        continue;
      }
      at::Tensor known = payload(v, t.scalar_type());
      if (known.defined()) {
        at::Tensor slot = t.narrow(0, v * chunk, chunk);
        assign(slot, known);
      } else {
        std::memmove(out + v * from.nbytes(), in, from.nbytes());
        all_known = false;
      }
    }
  });
  if (!all_known) {
    note_invented(input, "mirrored");
  }
}

void Peers::broadcast(at::Tensor tensor, int root) {
  Unseen unseen;
  exchange_control(tensor, root == group_.rank() ? tensor : at::Tensor(), {root});
  if (root != group_.rank()) {
    from_virtual(tensor, payload(root, tensor.scalar_type()));
  }
}

void Peers::scatter(at::Tensor output, const std::vector<at::Tensor>& inputs, int root) {
  Unseen unseen;
  if (root == group_.rank()) {
    if (steers(output)) {
      std::vector<at::Tensor> parts;
      for (const auto& in : inputs) {
        parts.push_back(flat(in));
      }
      exchange_control(output, at::cat(parts), {});
    }
    output.copy_(inputs[root].reshape(output.sizes()));
    return;
  }
  exchange_control(output, at::Tensor(), {root});
  at::Tensor known = payload(root, output.scalar_type());
  if (known.defined() && known.numel() >= (group_.rank() + 1) * output.numel()) {
    known = known.narrow(0, group_.rank() * output.numel(), output.numel());
  }
  from_virtual(output, known);
}

void Peers::all_to_all(const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs) {
  Unseen unseen;
  if (steers(outputs[0])) {
    std::vector<at::Tensor> parts;
    std::vector<int64_t> splits;
    for (const auto& in : inputs) {
      parts.push_back(flat(in));
      splits.push_back(in.numel());
    }
    exchange_control(outputs[0], at::cat(parts), virtual_members(), -1, splits);
  }
  bool all_known = true;
  // Where this rank sends nothing to a peer that sends something, there is
  // nothing to mirror in that slot: the first slot with data stands in.
  at::Tensor any;
  for (const auto& in : inputs) {
    if (in.numel() > 0) {
      any = in;
      break;
    }
  }
  for (int v = 0; v < group_.size(); ++v) {
    at::Tensor out = outputs[v];
    if (out.numel() == 0) {
      continue;
    }
    const at::Tensor known =
        v == group_.rank() ? at::Tensor() : payload_for_me(v, out.scalar_type());
    if (known.defined()) {
      assign(out, known);
      continue;
    }
    all_known &= v == group_.rank();
    if (inputs[v].numel() > 0) {
      copy_cyclic(out, inputs[v]);
    } else if (any.defined()) {
      copy_cyclic(out, any);
    } else {
      fill_with_template(out, world_.seed());
    }
  }
  if (!all_known && !outputs.empty()) {
    for (const auto& out : outputs) {
      if (out.numel() > 0) {
        note_invented(out, "mirrored");
        break;
      }
    }
  }
}

std::vector<at::Tensor> Peers::slots(
    const at::Tensor& whole, const std::vector<int64_t>& splits) const {
  return splits.empty() ? whole.tensor_split(group_.size(), 0)
                        : whole.split_with_sizes(splits, 0);
}

void Peers::all_to_all(at::Tensor output, const at::Tensor& input,
                       const std::vector<int64_t>& out_splits,
                       const std::vector<int64_t>& in_splits) {
  if (!payloads_ && out_splits == in_splits && !steers(output)) { // every slot is as large there as here
    Unseen unseen;
    note_invented(output, "mirrored");
    fill_flat(output, [&](at::Tensor& t) { t.copy_(flat(input)); });
    return;
  }
  Unseen unseen;
  all_to_all(slots(output, out_splits), slots(input, in_splits));
}

void Peers::send(const at::Tensor& tensor, int destination) {
  Unseen unseen;
  if (destination == group_.rank()) {
    const at::Tensor bytes = flat(tensor).contiguous();
    world_.send_to_self(group_.id(), std::string(static_cast<const char*>(bytes.const_data_ptr()),
                                                 bytes.nbytes()));
    return;
  }
  exchange_control(tensor, tensor, {}, destination);
}

void Peers::receive(at::Tensor tensor, int source) {
  Unseen unseen;
  if (source == group_.rank()) {
    const std::string bytes = world_.receive_from_self(group_.id());
    if (bytes.size() == tensor.nbytes()) {
      fill_flat(tensor, [&](at::Tensor& t) {
        std::memcpy(t.data_ptr(), bytes.data(), bytes.size());
      });
      return;
    }
  }
  exchange_control(tensor, at::Tensor(), {source}, group_.rank());
  from_virtual(tensor, payload(source, tensor.scalar_type(), group_.rank()));
}

const char* dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kChar: return "int8";
    case at::kByte: return "uint8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kUInt16: return "uint16";
    case at::kUInt32: return "uint32";
    case at::kUInt64: return "uint64";
    case at::kBool: return "bool";
    case at::kComplexHalf: return "complex32";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    case at::kFloat8_e4m3fn: return "float8_e4m3fn";
    case at::kFloat8_e5m2: return "float8_e5m2";
    case at::kFloat8_e4m3fnuz: return "float8_e4m3fnuz";
    case at::kFloat8_e5m2fnuz: return "float8_e5m2fnuz";
    default: return c10::toString(type);
  }
}

const char* reduce_op_name(const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM: return "sum";
    case ReduceOp::AVG: return "avg";
    case ReduceOp::PRODUCT: return "product";
    case ReduceOp::MIN: return "min";
    case ReduceOp::MAX: return "max";
    case ReduceOp::BAND: return "band";
    case ReduceOp::BOR: return "bor";
    case ReduceOp::BXOR: return "bxor";
    case ReduceOp::PREMUL_SUM: return "premul_sum";
    default: return "?";
  }
}

} // namespace crystal