#include "c10d/backend.h"

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/version.h>

#include <algorithm>
#include <numeric>
#include <string_view>
#include <thread>
#include <utility>

#include "c10d/memory.h"
#include "c10d/recognise.h"
#include "c10d/work.h"
#include "core/busy.h"
#include "core/clock.h"

namespace crystal {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;

Call call_of(Kind kind, const at::Tensor& tensor, int64_t count) {
  Call call;
  call.kind = kind;
  call.dtype = dtype_name(tensor.scalar_type());
  call.count = count;
  call.in_elements = count;
  call.out_elements = count;
  return call;
}

int64_t total(const Tensors& tensors) {
  return std::accumulate(
      tensors.begin(), tensors.end(), int64_t{0},
      [](int64_t sum, const at::Tensor& t) { return sum + t.numel(); });
}

// Where the sizes differ, which list calls do not say in any other way.
std::vector<int64_t> uneven_sizes(const Tensors& tensors) {
  const bool even = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
    return t.numel() == tensors[0].numel();
  });
  std::vector<int64_t> sizes;
  if (!even) {
    for (const auto& t : tensors) {
      sizes.push_back(t.numel());
    }
  }
  return sizes;
}

// What ProcessGroupNCCL calls the collective in record_param_comms, by which
// tools that read profiles know it.
const char* profiled_name(OpType type, const CallRecord& record) {
  switch (type) {
    case OpType::_ALLGATHER_BASE: return "_allgather_base";
    case OpType::_REDUCE_SCATTER_BASE: return "_reduce_scatter_base";
    default: break;
  }
  switch (record.kind) {
    case Kind::all_reduce: return "allreduce";
    case Kind::all_gather: return "all_gather";
    case Kind::all_to_all: return record.count < 0 ? "all_to_allv" : "all_to_all";
    default: return to_string(record.kind);
  }
}

} // namespace

VirtualBackend::VirtualBackend(
    Flavour flavour, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    c10::intrusive_ptr<VirtualOptions> options)
    : c10d::Backend(rank, size),
      flavour_(flavour),
      store_(store),
      options_(std::move(options)),
      world_(the_world()),
      checks_(flavour, rank, size) {
  TORCH_CHECK(
      world_ != nullptr,
      "A virtual backend was created before the logical world. Group rank ", rank, " of ", size,
      ". Start the program with python -m crystalllm run.");
  init();
}

void VirtualBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  world_->name_group(uid, getSize());
  connect_mates();
}

void VirtualBackend::connect_mates() {
  std::call_once(connected_, [this] {
    Group& members = group();
    if (members.mates().empty()) {
      return;
    }
    auto real = connect(*world_, members, options_->timeout);
    // Among mates only, gloo is gloo. What NCCL accepts and gloo refuses (types,
    // reductions, uneven lists) has to be taken apart.
    if (members.all_mates() && flavour_ == Flavour::gloo) {
      carrier_ = std::move(real);
    } else {
      mates_ = std::make_shared<Mates>(std::move(real), members);
    }
  });
}

Group& VirtualBackend::group() {
  std::lock_guard<std::mutex> lock(group_mutex_);
  if (!group_) {
    const auto& given = options_->global_ranks_in_group;
    std::vector<int> members(given.begin(), given.end());
    TORCH_CHECK(
        !members.empty() || getSize() == world_->size(),
        "A communicator's members are not known. Rank ", world_->rank(), ", group of ", getSize(),
        " in a world of ", world_->size(),
        ". Create it with torch.distributed.new_group or split_group, which say who is in it.");
    TORCH_CHECK_VALUE(
        members.empty() || static_cast<int>(members.size()) == getSize(),
        "A communicator of ", getSize(), " ranks was given ", members.size(), " members. Rank ",
        world_->rank(), ". Give as many members as the group has ranks.");
    group_ = world_->create_group(std::move(members));
    group_->set_backend(to_string(flavour_));
    TORCH_CHECK_VALUE(
        group_->rank() == getRank(), "This rank's place in its group is not where it says. Rank ",
        world_->rank(), " claims group rank ", getRank(), ", the member list says ",
        group_->rank(), ". Pass the rank that the launcher gave to init_process_group.");
  }
  return *group_;
}

c10::intrusive_ptr<c10d::Backend> VirtualBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  ++splits_;
  const auto me = std::find(ranks.begin(), ranks.end(), getRank());
  if (me == ranks.end()) {
    return nullptr;
  }
  auto own = c10::make_intrusive<VirtualOptions>(
      getBackendName(), options ? options->timeout : options_->timeout);
  for (int rank : ranks) {
    TORCH_CHECK_VALUE(
        rank >= 0 && rank < getSize(), "Rank ", rank, " is not in the group that is split. Group ",
        group().identity(), " of ", getSize(), " ranks. Give ranks of the parent group.");
    own->global_ranks_in_group.push_back(group().global(rank));
  }
  if (options) {
    own->group_name = options->group_name;
  }
  TORCH_CHECK(
      !carrier_ || group().all_mates(),
      "A group whose communication is real cannot be split. Group ", group().identity(),
      ". Create the parts with torch.distributed.new_group.");
  const int rank = static_cast<int>(me - ranks.begin());
  const int size = static_cast<int>(ranks.size());
  c10::intrusive_ptr<VirtualBackend> child;
  if (flavour_ == Flavour::gloo) {
    child = c10::make_intrusive<GlooBackend>(flavour_, store, rank, size, own);
  } else {
    child = c10::make_intrusive<NcclBackend>(flavour_, store, rank, size, own);
  }
  // torch splits once per device type and keeps one of the children, so the
  // communicator is made when the child gets its name.
  return child;
}

// --- issuing ----------------------------------------------------------------

Transport VirtualBackend::transport_of(const Call& call, const Group& members) const {
  if (carrier_) {
    return Transport::real;
  }
  if (!mates_) {
    return Transport::timed;
  }
  if (call.kind == Kind::send || call.kind == Kind::recv) {
    return members.is_mate(call.peer) && call.peer != getRank() ? Transport::real
                                                                : Transport::timed;
  }
  return members.all_mates() ? Transport::real : Transport::mixed;
}

CallRecord VirtualBackend::issue_part(
    OpType type, Part& part, std::chrono::milliseconds timeout,
    std::vector<std::shared_ptr<RealPart>>& real) {
  const int64_t arrival_ns = now_ns();
  Group& members = group();
  for (const auto* side : {&part.inputs, &part.outputs}) {
    for (const auto& tensor : *side) {
      TORCH_CHECK(
          tensor.device().is_cpu(), "The virtual ", getBackendName(),
          " backend moves CPU tensors only. Rank ", world_->rank(), ", ",
          to_string(part.call.kind), " of a tensor of shape ", tensor.sizes(), " on ",
          tensor.device(), ". Run the program on the CPU, with CUDA_VISIBLE_DEVICES empty.");
    }
  }
  if (members.description().empty() && !pg_desc_.empty()) {
    members.describe(pg_desc_);
  }
  recognise(part.inputs, Recognised::communication);
  recognise(part.outputs, Recognised::communication);
  part.call.stream = world_->this_thread();
  CallRecord record =
      world_->arrive(part.call, members, arrival_ns, transport_of(part.call, members));
  const int start = members.global(0);
  const int stride = members.size() > 1 ? members.global(1) - start : 1;
  const bool p2p = record.kind == Kind::send || record.kind == Kind::recv;
  RECORD_PARAM_COMMS_DATA(
      std::make_tuple(record.position.seq, p2p),
      std::make_tuple(pg_uid_, pg_desc_),
      part.inputs,
      part.outputs,
      p2p ? record.peer_rank : getRank(),
      profiled_name(type, record),
      p2p ? record.count : record.in_elements,
      p2p ? record.count : record.out_elements,
      part.inputs.empty() ? at::kByte : part.inputs[0].scalar_type(),
      record.in_splits,
      record.out_splits,
      start,
      stride,
      getSize());
  int64_t filled_ns = 0;
  const int64_t begin_ns = now_ns();
  const Unwatched unwatched;
  if (mates_) {
    const std::chrono::milliseconds limit(world_->mates_limit_ms());
    MixedPeers peers(world_, group_, record, mates_, limit.count() > 0 ? limit : timeout);
    part.fill(peers);
    if (auto real_part = peers.part()) {
      real.push_back(std::move(real_part));
    }
    filled_ns = now_ns() - begin_ns;
  } else if (!carrier_) {
    Peers peers(*world_, members, record);
    part.fill(peers);
    filled_ns = now_ns() - begin_ns;
  }
  // Where peers are real, the library takes its time itself.
  if (record.transport == Transport::timed) {
    const auto rule = world_->release_rule();
    const int64_t call_ns = rule->call_ns(record);
    // What is filled in stands for what they move, in the call and after it.
    const int64_t owed_ns = rule->cpu_ns(record) - std::max<int64_t>(0, filled_ns - call_ns);
    // Its threads wake up in a call, and take turns with the caller on its core.
    for (; filled_ns < call_ns; filled_ns = now_ns() - begin_ns) {
      std::this_thread::yield();
    }
    if (owed_ns > 0) {
      keep_core_busy(owed_ns);
    }
  }
  // Filling in stands for what the library does meanwhile; the rest is the caller's time.
  world_->returned(record.call, arrival_ns + filled_ns);
  return record;
}

VirtualBackend::WorkPtr VirtualBackend::issue(
    OpType type, const char* title, std::vector<Part> parts, std::chrono::milliseconds timeout,
    const Carry& carry) {
  connect_mates();
  if (timeout <= std::chrono::milliseconds(0)) {
    timeout = options_->timeout;
  }
  const InCall in_call;
  const auto footprint = take_footprint(type, parts);
  const bool coalescing = batch_ >= 0;
  const int64_t batch = coalescing ? batch_ : parts.size() > 1 ? world_->new_batch() : -1;
  ++sequence_;
  CallRecord last;
  End end;
  Tensors outputs;
  Tensors held;
  std::vector<std::shared_ptr<RealPart>> real;
  for (auto& part : parts) {
    part.call.batch = batch;
    last = issue_part(type, part, timeout, real);
    if (last.release) {
      (coalescing ? batch_end_ : end).add(last.release);
    }
    outputs.insert(outputs.end(), part.outputs.begin(), part.outputs.end());
    held.insert(held.end(), part.inputs.begin(), part.inputs.end());
  }
  if (carrier_) {
    WorkPtr work;
    naming_mates(*world_, *group_, last, [&] { work = carry(*carrier_); });
    world_->returned(last.call, now_ns());  // the real call may have waited
    return c10::make_intrusive<CarriedWork>(
        getRank(), type, std::move(work), last, group_, world_);
  }
  if (coalescing) {
    if (last.release) {
      end.add(last.release);
    }
    batch_last_ = last;
    is_batch_begun_ = true;
    batch_held_.insert(batch_held_.end(), held.begin(), held.end());
    batch_held_.insert(batch_held_.end(), outputs.begin(), outputs.end());
    batch_real_.insert(batch_real_.end(), real.begin(), real.end());
  }
  if (footprint) { // it knows what is held how long
    held.clear();
    footprint->until(end);
  }
  auto work = c10::make_intrusive<VirtualWork>(
      getRank(), type, title, std::move(outputs), std::move(held), last, std::move(end), group_,
      world_, timeout, join(std::move(real)));
  work->hold(footprint);
  return work;
}

std::shared_ptr<Footprint> VirtualBackend::take_footprint(
    OpType type, const std::vector<Part>& parts) {
  if (carrier_ || flavour_ != Flavour::gloo || !memory_is_watched()) {
    return nullptr;
  }
  std::vector<CallTensors> calls;
  for (const auto& part : parts) {
    calls.push_back(CallTensors{part.inputs, part.outputs});
  }
  return std::make_shared<Footprint>(
      type, calls, getRank(), std::string_view(parts[0].call.reduce_op) == "avg");
}

VirtualBackend::WorkPtr VirtualBackend::issue(
    OpType type, const char* title, Part part, std::chrono::milliseconds timeout,
    const Carry& carry) {
  std::vector<Part> parts;
  parts.push_back(std::move(part));
  return issue(type, title, std::move(parts), timeout, carry);
}

void VirtualBackend::startCoalescing() {
  if (flavour_ != Flavour::nccl) {
    Backend::startCoalescing();
  }
  batch_ = world_->new_batch();
  batch_end_.clear();
}

VirtualBackend::WorkPtr VirtualBackend::endCoalescing() {
  if (flavour_ != Flavour::nccl) {
    return Backend::endCoalescing();
  }
  batch_ = -1;
  if (!std::exchange(is_batch_begun_, false)) {
    return nullptr; // nothing was issued in between
  }
  Tensors held;
  held.swap(batch_held_);
  const End end = std::exchange(batch_end_, {});
  return c10::make_intrusive<VirtualWork>(
      getRank(), OpType::COALESCED, "nccl:coalesced", Tensors{}, std::move(held), batch_last_, end,
      group_, world_, options_->timeout, join(std::exchange(batch_real_, {})));
}

#define CRYSTAL_TITLE(name) (flavour_ == Flavour::gloo ? "gloo:" name : "nccl:" name)

// --- collectives --------------------------------------------------------------

VirtualBackend::WorkPtr VirtualBackend::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& opts) {
  checks_.broadcast(tensors, opts.rootRank, opts.rootTensor);
  const int root = static_cast<int>(opts.rootRank);
  Call call = call_of(Kind::broadcast, tensors[0], tensors[0].numel());
  call.root = root;
  call.is_async = opts.asyncOp;
  return issue(OpType::BROADCAST, CRYSTAL_TITLE("broadcast"),
               Part{call, tensors, tensors,
                    [tensors, root, first = opts.rootTensor, me = getRank()](Peers& peers) {
                      for (const auto& t : tensors) {
                        if (root == me && !t.is_same(tensors[first])) {
                          at::NoGradGuard no_grad;
                          t.copy_(tensors[first]);
                        }
                        peers.broadcast(t, root);
                      }
                    }},
               opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.broadcast(tensors, opts); });
}

std::vector<VirtualBackend::Part> VirtualBackend::all_reduce_parts(
    const Tensors& tensors, const c10d::AllreduceOptions& opts) {
  std::vector<Part> parts;
  for (const auto& tensor : tensors) {
    Call call = call_of(Kind::all_reduce, tensor, tensor.numel());
    call.reduce_op = reduce_op_name(opts.reduceOp);
    call.is_async = opts.asyncOp;
    parts.push_back(Part{call, {tensor}, {tensor}, [tensor, op = opts.reduceOp](Peers& peers) {
                           peers.reduce(tensor, op);
                         }});
  }
  return parts;
}

VirtualBackend::WorkPtr VirtualBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& opts) {
  checks_.all_reduce(tensors, opts.reduceOp);
  return issue(
      OpType::ALLREDUCE, CRYSTAL_TITLE("all_reduce"), all_reduce_parts(tensors, opts),
      opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.allreduce(tensors, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

VirtualBackend::WorkPtr VirtualBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  checks_.all_reduce_coalesced(tensors, opts.reduceOp);
  return issue(
      OpType::ALLREDUCE_COALESCED, CRYSTAL_TITLE("all_reduce"), all_reduce_parts(tensors, opts),
      opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.allreduce_coalesced(tensors, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  checks_.reduce(tensors, opts.rootRank, opts.rootTensor, opts.reduceOp);
  const int root = static_cast<int>(opts.rootRank);
  Call call = call_of(Kind::reduce, tensors[0], tensors[0].numel());
  call.reduce_op = reduce_op_name(opts.reduceOp);
  call.root = root;
  call.is_async = opts.asyncOp;
  return issue(OpType::REDUCE, CRYSTAL_TITLE("reduce"),
               Part{call, tensors, tensors,
                    [tensor = tensors[0], root, op = opts.reduceOp](Peers& peers) {
                      peers.reduce(tensor, op, root);
                    }},
               opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.reduce(tensors, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  checks_.all_gather(outputs, inputs);
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    // With several inputs a rank, outputs[j] holds all inputs of all ranks.
    for (size_t j = 0; j < outputs.size(); ++j) {
      Tensors mine;
      for (int v = 0; v < getSize(); ++v) {
        mine.push_back(outputs[j][v * inputs.size() + i]);
      }
      Call call = call_of(Kind::all_gather, inputs[i], inputs[i].numel());
      call.out_elements = total(mine);
      call.out_splits = uneven_sizes(mine);
      call.is_async = opts.asyncOp;
      parts.push_back(Part{call, {inputs[i]}, mine, [mine, in = inputs[i]](Peers& peers) {
                             peers.gather(mine, in);
                           }});
    }
  }
  return issue(OpType::ALLGATHER, CRYSTAL_TITLE("all_gather"), std::move(parts), opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.allgather(outputs, inputs, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  return all_gather_flat(
      OpType::_ALLGATHER_BASE, {output}, {input}, opts,
      [&](c10d::Backend& carrier) { return carrier._allgather_base(output, input, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  checks_.all_gather_coalesced(outputs, inputs);
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors mine;
    for (const auto& list : outputs) {
      mine.push_back(list[i]);
    }
    Call call = call_of(Kind::all_gather, inputs[i], inputs[i].numel());
    call.out_elements = total(mine);
    call.is_async = opts.asyncOp;
    parts.push_back(Part{call, {inputs[i]}, mine, [mine, in = inputs[i]](Peers& peers) {
                           peers.gather(mine, in);
                         }});
  }
  return issue(OpType::ALLGATHER_COALESCED, CRYSTAL_TITLE("all_gather"), std::move(parts),
               opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.allgather_coalesced(outputs, inputs, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return all_gather_flat(
      OpType::ALLGATHER_COALESCED, outputs, inputs, opts, [&](c10d::Backend& carrier) {
        return carrier.allgather_into_tensor_coalesced(outputs, inputs, opts);
      });
}

VirtualBackend::WorkPtr VirtualBackend::all_gather_flat(
    OpType type, const Tensors& outputs, const Tensors& inputs,
    const c10d::AllgatherOptions& opts, const Carry& carry) {
  TORCH_CHECK(
      outputs.size() == inputs.size() && !inputs.empty(),
      "all_gather needs as many outputs as inputs, got ", outputs.size(), " and ", inputs.size(),
      ". Rank ", world_->rank(), ". Pass one output per input.");
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    checks_.all_gather_flat(outputs[i], inputs[i]);
    Call call = call_of(Kind::all_gather, inputs[i], inputs[i].numel());
    call.out_elements = outputs[i].numel();
    call.is_async = opts.asyncOp;
    parts.push_back(
        Part{call, {inputs[i]}, {outputs[i]}, [out = outputs[i], in = inputs[i]](Peers& peers) {
               peers.gather(out, in);
             }});
  }
  return issue(
      type, CRYSTAL_TITLE("_all_gather_base"), std::move(parts), opts.timeout, carry);
}

VirtualBackend::WorkPtr VirtualBackend::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  checks_.gather(outputs, inputs, opts.rootRank);
  const Tensors mine = outputs.empty() ? Tensors{} : outputs[0];
  Call call = call_of(Kind::gather, inputs[0], inputs[0].numel());
  call.root = static_cast<int>(opts.rootRank);
  call.out_elements = total(mine);
  call.is_async = opts.asyncOp;
  return issue(OpType::GATHER, CRYSTAL_TITLE("gather"),
               Part{call, inputs, mine,
                    [mine, in = inputs[0]](Peers& peers) { peers.gather(mine, in); }},
               opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.gather(outputs, inputs, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  checks_.scatter(outputs, inputs, opts.rootRank);
  const Tensors all = inputs.empty() ? Tensors{} : inputs[0];
  const int root = static_cast<int>(opts.rootRank);
  Call call = call_of(Kind::scatter, outputs[0], outputs[0].numel());
  call.root = root;
  call.in_elements = total(all);
  call.is_async = opts.asyncOp;
  return issue(OpType::SCATTER, CRYSTAL_TITLE("scatter"),
               Part{call, all, outputs,
                    [all, root, out = outputs[0]](Peers& peers) {
                      peers.scatter(out, all, root);
                    }},
               opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.scatter(outputs, inputs, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) {
  checks_.reduce_scatter(outputs, inputs, opts.reduceOp);
  Call call = call_of(Kind::reduce_scatter, outputs[0], outputs[0].numel());
  call.reduce_op = reduce_op_name(opts.reduceOp);
  call.in_elements = total(inputs[0]);
  call.in_splits = uneven_sizes(inputs[0]);
  call.is_async = opts.asyncOp;
  return issue(OpType::REDUCE_SCATTER, CRYSTAL_TITLE("reduce_scatter"),
               Part{call, inputs[0], outputs,
                    [out = outputs[0], in = inputs[0], op = opts.reduceOp](Peers& peers) {
                      peers.reduce_scatter(out, in, op);
                    }},
               opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.reduce_scatter(outputs, inputs, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

VirtualBackend::WorkPtr VirtualBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK(
      outputs.size() == inputs.size() && !inputs.empty(),
      "reduce_scatter needs as many outputs as inputs, got ", outputs.size(), " and ",
      inputs.size(), ". Rank ", world_->rank(), ". Pass one output per input.");
  std::vector<Part> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    checks_.reduce_scatter_flat(outputs[i], inputs[i], opts.reduceOp);
    Call call = call_of(Kind::reduce_scatter, outputs[i], outputs[i].numel());
    call.reduce_op = reduce_op_name(opts.reduceOp);
    call.in_elements = inputs[i].numel();
    call.is_async = opts.asyncOp;
    parts.push_back(Part{call, {inputs[i]}, {outputs[i]},
                         [out = outputs[i], in = inputs[i], op = opts.reduceOp](Peers& peers) {
                           peers.reduce_scatter(out, in, op);
                         }});
  }
  return issue(OpType::_REDUCE_SCATTER_BASE, CRYSTAL_TITLE("_reduce_scatter_base"),
               std::move(parts), opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.reduce_scatter_tensor_coalesced(outputs, inputs, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_splits,
    std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& opts) {
  checks_.all_to_all_flat(output, input, out_splits, in_splits);
  Call call = call_of(Kind::all_to_all, input, input.numel() / getSize());
  call.in_elements = input.numel();
  call.out_elements = output.numel();
  call.in_splits = in_splits;
  call.out_splits = out_splits;
  call.is_async = opts.asyncOp;
  return issue(OpType::ALLTOALL_BASE, CRYSTAL_TITLE("all_to_all"),
               Part{call, {input}, {output},
                    [output, input, out_splits, in_splits](Peers& peers) {
                      peers.all_to_all(output, input, out_splits, in_splits);
                    }},
               opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.alltoall_base(output, input, out_splits, in_splits, opts); });
}

VirtualBackend::WorkPtr VirtualBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
  if (flavour_ == Flavour::gloo) { // gloo learnt it later
    return Backend::alltoall(outputs, inputs, opts);
  }
#endif
  checks_.all_to_all(outputs, inputs);
  Call call = call_of(Kind::all_to_all, inputs[0], inputs[0].numel());
  call.in_elements = total(inputs);
  call.out_elements = total(outputs);
  call.in_splits = uneven_sizes(inputs);
  call.out_splits = uneven_sizes(outputs);
  call.is_async = opts.asyncOp;
  return issue(OpType::ALLTOALL, CRYSTAL_TITLE("all_to_all"),
               Part{call, inputs, outputs,
                    [outputs, inputs](Peers& peers) { peers.all_to_all(outputs, inputs); }},
               opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.alltoall(outputs, inputs, opts); });
}

// --- point to point -------------------------------------------------------------

VirtualBackend::WorkPtr VirtualBackend::send(Tensors& tensors, int peer, int tag) {
  checks_.send(tensors, peer);
  Call call = call_of(Kind::send, tensors[0], tensors[0].numel());
  call.peer = peer;
  call.tag = tag;
  call.out_elements = 0;
  call.is_async = true;
  return issue(OpType::SEND, CRYSTAL_TITLE("send"),
               Part{call, tensors, {},
                    [tensor = tensors[0], peer](Peers& peers) { peers.send(tensor, peer); }},
               c10d::kUnsetTimeout,
               [&](c10d::Backend& carrier) { return carrier.send(tensors, peer, tag); });
}

VirtualBackend::WorkPtr VirtualBackend::recv(Tensors& tensors, int peer, int tag) {
  checks_.recv(tensors, peer);
  Call call = call_of(Kind::recv, tensors[0], tensors[0].numel());
  call.peer = peer;
  call.tag = tag;
  call.in_elements = 0;
  call.is_async = true;
  return issue(OpType::RECV, CRYSTAL_TITLE("recv"),
               Part{call, {}, tensors,
                    [tensor = tensors[0], peer](Peers& peers) { peers.receive(tensor, peer); }},
               c10d::kUnsetTimeout,
               [&](c10d::Backend& carrier) { return carrier.recv(tensors, peer, tag); });
}

VirtualBackend::WorkPtr VirtualBackend::recvAnysource(Tensors& tensors, int tag) {
  if (flavour_ == Flavour::nccl) {
    return Backend::recvAnysource(tensors, tag);
  }
  TORCH_CHECK(
      getSize() > 1, "A receive from any source has nobody to receive from. Rank ",
      world_->rank(), ", group of one. Receive in a group with other members.");
  const int peer = group().next_source();
  checks_.recv(tensors, peer);
  Call call = call_of(Kind::recv, tensors[0], tensors[0].numel());
  call.peer = peer;
  call.any_source = true;
  call.tag = tag;
  call.in_elements = 0;
  call.is_async = true;
  return issue(OpType::RECVANYSOURCE, CRYSTAL_TITLE("recvAnySource"),
               Part{call, {}, tensors,
                    [tensor = tensors[0], peer](Peers& peers) { peers.receive(tensor, peer); }},
               c10d::kUnsetTimeout,
               [&](c10d::Backend& carrier) { return carrier.recvAnysource(tensors, tag); });
}

VirtualBackend::WorkPtr VirtualBackend::barrier(const c10d::BarrierOptions& opts) {
  Call call;
  call.kind = Kind::barrier;
  call.is_async = opts.asyncOp;
  return issue(OpType::BARRIER, CRYSTAL_TITLE("barrier"),
               Part{call, {}, {}, [](Peers& peers) { peers.barrier(); }},
               opts.timeout,
               [&](c10d::Backend& carrier) { return carrier.barrier(opts); });
}

void VirtualBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  if (flavour_ != Flavour::gloo) {
    Backend::monitoredBarrier(opts, wait_all_ranks);
  }
  const at::Tensor message =
      memory_is_watched() ? monitored_barrier_message() : at::Tensor();
  barrier(opts)->wait();
}

} // namespace crystal
