#include "c10d/mates.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "c10d/memory.h"
#include "c10d/tensors.h"
#include "core/clock.h"

namespace crystal {
namespace {

using c10d::ReduceOp;
using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

// Tags of messages that belong to collectives; what programs send is tagged below.
constexpr int kCollectiveTags = 1 << 30;

Connect& connect_slot() {
  static auto* slot = new Connect;
  return *slot;
}

// Memory that is no tensor of the program's: in a real run these bytes lie in the
// network, so the allocator that is watched must not see them.
at::Tensor unseen_tensor(at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto numel = c10::multiply_integers(sizes);
  void* data = std::malloc(std::max<size_t>(1, numel * c10::elementSize(dtype)));
  TORCH_CHECK(data != nullptr, "Out of memory for ", numel, " elements of another mate");
  return at::from_blob(data, sizes, [](void* p) { std::free(p); }, at::dtype(dtype));
}

at::Tensor contiguous(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return tensor.detach();
  }
  at::Tensor copy = unseen_tensor(tensor.sizes(), tensor.scalar_type());
  copy.copy_(tensor);
  return copy;
}

// Flat and contiguous, and multiplied by this rank's factor where the sum is of such.
at::Tensor contribution(const at::Tensor& tensor, const ReduceOp& op) {
  at::Tensor mine = contiguous(tensor).view({-1});
  if (op.op_ == ReduceOp::PREMUL_SUM) {
    at::Tensor scaled = unseen_tensor(mine.sizes(), mine.scalar_type());
    scaled.copy_(mine);
    reduce_equal(scaled, 1, op);
    return scaled;
  }
  return mine;
}

// The bytes of a contiguous tensor, which they keep alive. gloo moves bytes and would
// refuse some types.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())}, [tensor](void*) {}, at::kByte);
}

// What gloo says happened, without its source line and advice: "[file:line] Connection
// closed by peer [address]. This is typically …".
std::string cause_of(const std::exception& error) {
  std::string text = error.what();
  const auto place_end = text.find("] ");
  if (text.rfind('[', 0) == 0 && place_end != std::string::npos) {
    text.erase(0, place_end + 2);
  }
  return text.substr(0, std::min(text.find(". "), text.find('\n')));
}

class Joined : public RealPart {
 public:
  explicit Joined(std::vector<std::shared_ptr<RealPart>> parts) : parts_(std::move(parts)) {}
  bool is_done() override {
    bool done = true;
    for (const auto& part : parts_) { // ask each, as that sets it going
      done &= part->is_done();
    }
    return done;
  }
  void finish() override {
    for (const auto& part : parts_) {
      part->finish();
    }
  }

 private:
  const std::vector<std::shared_ptr<RealPart>> parts_;
};

// What the program holds of an exchange. The others need this rank's data also when
// the program drops its handle.
class Handle : public RealPart {
 public:
  explicit Handle(std::shared_ptr<Exchange> exchange) : exchange_(std::move(exchange)) {}
  ~Handle() override {
    if (!exchange_->is_over() && !in_background_) {
      Exchange::finish_in_background(exchange_);
    }
  }
  bool is_done() override {
    if (!exchange_->is_over() && !in_background_.exchange(true)) {
      Exchange::finish_in_background(exchange_);
    }
    return exchange_->is_over();
  }
  void finish() override { exchange_->finish(); }

 private:
  const std::shared_ptr<Exchange> exchange_;
  std::atomic<bool> in_background_{false};
};

} // namespace

std::shared_ptr<RealPart> join(std::vector<std::shared_ptr<RealPart>> parts) {
  if (parts.size() <= 1) {
    return parts.empty() ? nullptr : parts.front();
  }
  return std::make_shared<Joined>(std::move(parts));
}

void naming_mates(
    const World& world, const Group& group, const CallRecord& record,
    const std::function<void()>& act) {
  std::string text;
  try {
    act();
    return;
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    if (group.mates().empty()) {
      throw;
    }
    text = cause_of(error);
  }
  std::string mates;
  for (size_t j = 0; j < group.mates().size(); ++j) {
    mates += (j == 0 ? "" : j + 1 == group.mates().size() ? " and " : ", ") +
        std::to_string(group.global(group.mates()[j]));
  }
  const std::string name = group.description().empty() ? "" : " (" + group.description() + ")";
  TORCH_CHECK_WITH(
      DistBackendError, false, "A call between ranks that run side by side failed. Rank ",
      world.rank(), ", call ", record.call, " (", key(record, group), "), group ",
      group.identity(), name, ", whose ranks ", mates, " run here: ", text,
      ". Look at the logs of the others: one of them has ended, or waits for something else.");
}

void set_connect(Connect connect) { connect_slot() = std::move(connect); }

c10::intrusive_ptr<c10d::Backend> connect(
    const World& world, const Group& group, milliseconds timeout) {
  TORCH_CHECK(
      connect_slot(), "It is not known how ranks that run side by side find each other. Rank ",
      world.rank(), ", group ", group.identity(), ". Pass mates to crystalllm.logical.enter.");
  return connect_slot()(group, timeout);
}

// --- mates --------------------------------------------------------------------

Mates::Mates(c10::intrusive_ptr<c10d::Backend> real, const Group& group)
    : real_(std::move(real)),
      members_(group.mates()),
      is_mate_(group.size(), false),
      copies_(group.mates().size(), 0) {
  for (int member : members_) {
    is_mate_[member] = true;
  }
  me_ = of(group.rank());
  for (int v = 0; v < group.size(); ++v) {
    ++copies_[held_by(v)];
    if (!is_mate_[v]) {
      virtual_members_.push_back(v);
    }
  }
}

int Mates::of(int member) const {
  const auto found = std::lower_bound(members_.begin(), members_.end(), member);
  return static_cast<int>(found - members_.begin());
}

// --- exchange -----------------------------------------------------------------

Exchange::Exchange(
    std::shared_ptr<World> world, std::shared_ptr<Group> group, const CallRecord& record,
    std::shared_ptr<Mates> mates, milliseconds limit, int tag)
    : world_(std::move(world)),
      group_(std::move(group)),
      record_(record),
      mates_(std::move(mates)),
      limit_(limit),
      tag_(tag) {}

void Exchange::send(int mate, const at::Tensor& data) {
  if (data.numel() > 0) { // its receiver knows that nothing comes
    outgoing_.emplace_back(mate, bytes_of(data));
  }
}

void Exchange::start() {
  naming_mates(*world_, *group_, record_, [this] {
    for (const auto& [mate, bytes] : outgoing_) {
      Tensors one{bytes};
      messages_.push_back(mates_->real().send(one, mate, tag_));
    }
  });
  outgoing_.clear();
}

void Exchange::receive(int mate, at::Tensor into) {
  if (into.numel() > 0) {
    Tensors one{bytes_of(into)};
    naming_mates(*world_, *group_, record_, [&] {
      messages_.push_back(mates_->real().recv(one, mate, tag_));
    });
  }
}

void Exchange::await() {
  start();
  const auto deadline = std::chrono::steady_clock::now() + limit_;
  for (auto& message : messages_) {
    const auto left = std::chrono::duration_cast<milliseconds>(
        deadline - std::chrono::steady_clock::now());
    message->wait(std::max(left, milliseconds(1)));
  }
  messages_.clear();
}

void Exchange::finish() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!over_) {
    try {
      const Unseen unseen;
      const Unwatched unwatched; // as where peers are virtual and the call fills its outputs
      naming_mates(*world_, *group_, record_, [this] {
        await();
        for (const auto& fill : fills_) {
          fill();
        }
      });
    } catch (...) {
      error_ = std::current_exception();
    }
    // Before anybody learns of the end: what is given back may need the interpreter,
    // and who holds it may then ask for this lock.
    outgoing_.clear();
    messages_.clear();
    fills_.clear();
    over_ = true;
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
}

void Exchange::finish_in_background(std::shared_ptr<Exchange> exchange) {
  run_aside([exchange = std::move(exchange)] {
    const World::Lane lane(exchange->record_.stream);
    try {
      exchange->finish();
    } catch (...) { // finish() throws it again
    }
  });
}

// --- calls --------------------------------------------------------------------

MixedPeers::MixedPeers(
    std::shared_ptr<World> world, std::shared_ptr<Group> group, const CallRecord& record,
    std::shared_ptr<Mates> mates, milliseconds limit)
    : Peers(*world, *group, record),
      world_held_(std::move(world)),
      group_held_(std::move(group)),
      mates_(std::move(mates)),
      limit_(limit) {}

Exchange& MixedPeers::exchange() {
  if (!exchange_) {
    const bool p2p = record_.kind == Kind::send || record_.kind == Kind::recv;
    // NCCL knows no tags. The number of a collective is the same on all mates.
    const int tag = !p2p
        ? kCollectiveTags + static_cast<int>(record_.position.seq % kCollectiveTags)
        : group_.backend() == "nccl" ? 0 : record_.tag;
    exchange_ =
        std::make_shared<Exchange>(world_held_, group_held_, record_, mates_, limit_, tag);
  }
  return *exchange_;
}

std::shared_ptr<RealPart> MixedPeers::part() {
  if (!exchange_ || exchange_->is_empty()) {
    return nullptr;
  }
  exchange_->start();
  auto part = std::make_shared<Handle>(exchange_);
  if (is_eager_) {
    part->is_done();
  }
  return part;
}

void MixedPeers::send_to_others(const at::Tensor& data) {
  for (int j = 0; j < mates_->count(); ++j) {
    if (j != mates_->me()) {
      exchange().send(j, data);
    }
  }
}

at::Tensor MixedPeers::receive_from(int mate, int64_t numel, at::ScalarType dtype) {
  at::Tensor into = unseen_tensor({numel}, dtype);
  exchange().receive(mate, into);
  return into;
}

Tensors MixedPeers::receive_from_others(const at::Tensor& mine) {
  Tensors held;
  for (int j = 0; j < mates_->count(); ++j) {
    held.push_back(
        j == mates_->me() ? mine : receive_from(j, mine.numel(), mine.scalar_type()));
  }
  return held;
}

void MixedPeers::receive_into(at::Tensor tensor, int mate) {
  if (tensor.is_contiguous()) {
    exchange().receive(mate, tensor.detach());
    return;
  }
  const at::Tensor came = receive_from(mate, tensor.numel(), tensor.scalar_type());
  exchange().then([tensor, came] { tensor.copy_(came.view(tensor.sizes())); });
}

template <class Given, class Like>
std::vector<Peers::Known> MixedPeers::known_from(Given given_by, Like like) {
  std::vector<Known> known;
  for (size_t i = 0; payloads_ && i < mates_->virtual_members().size(); ++i) {
    const int v = mates_->virtual_members()[i];
    const at::Tensor given = given_by(v);
    if (given.defined()) {
      at::Tensor exact = unseen_tensor({like(v).numel()}, given.scalar_type());
      assign(exact, given);
      known.push_back({v, exact});
    }
  }
  return known;
}

void MixedPeers::reduce_into(
    at::Tensor output, const at::Tensor& mine, int64_t begin, const ReduceOp& op) {
  std::vector<Share> shares;
  for (const auto& held : receive_from_others(mine)) {
    shares.push_back({held, mates_->copies(static_cast<int>(shares.size()))});
  }
  const auto known = known_slices(output.scalar_type(), begin, output.numel());
  for (const auto& one : known) {
    --shares[mates_->held_by(one.member)].copies;
    shares.push_back({contribution(one.values, op), 1});
  }
  const bool invents = known.size() < mates_->virtual_members().size();
  if (invents) {
    note_invented(output, "mirrored");
  }
  const bool holes = invents && op.op_ == ReduceOp::SUM;
  exchange().then([output, shares, op, holes, seed = world_.seed()]() mutable {
    fill_flat(output, [&](at::Tensor& t) { reduce_shares(t, shares, op); });
    if (holes) {
      fill_holes(output, seed);
    }
  });
}

void MixedPeers::reduce(at::Tensor tensor, const ReduceOp& op, int root) {
  Unseen unseen;
  if (tensor.is_sparse()) {
    reduce_sparse(tensor, op);
    return;
  }
  const bool receives = root < 0 || root == group_.rank();
  exchange_control(tensor, tensor, receives ? virtual_members() : std::vector<int>{});
  if (root >= 0 && is_virtual(root)) {
    return;
  }
  const at::Tensor mine = contribution(tensor, op);
  if (root < 0) {
    send_to_others(mine);
  } else if (!receives) {
    exchange().send(mates_->of(root), mine);
  }
  if (receives) {
    reduce_into(tensor, mine, 0, op);
  }
}

// Mates hold different rows, so their numbers travel first; then each is spread
// over the rows that any of them holds.
void MixedPeers::reduce_sparse(at::Tensor tensor, const ReduceOp& op) {
  const at::Tensor mine = tensor.coalesce();
  const at::Tensor indices = contiguous(mine._indices());
  const at::Tensor values = contiguous(mine._values());
  const at::Tensor rows = at::scalar_tensor(values.size(0), at::kLong).view({1});
  send_to_others(rows);
  const Tensors counts = receive_from_others(rows);
  exchange().then([=, mates = mates_, exchange = exchange_.get()]() mutable {
    Tensors parts;
    for (int j = 0; j < mates->count(); ++j) {
      if (j == mates->me()) {
        parts.push_back(mine);
        continue;
      }
      auto index_sizes = indices.sizes().vec();
      auto value_sizes = values.sizes().vec();
      index_sizes[1] = value_sizes[0] = counts[j].item<int64_t>();
      const at::Tensor their_indices = unseen_tensor(index_sizes, at::kLong);
      const at::Tensor their_values = unseen_tensor(value_sizes, values.scalar_type());
      exchange->send(j, indices);
      exchange->send(j, values);
      exchange->receive(j, their_indices);
      exchange->receive(j, their_values);
      parts.push_back(
          at::_sparse_coo_tensor_unsafe(their_indices, their_values, mine.sizes())
              ._coalesced_(true));
    }
    exchange->await();
    Tensors all;
    for (const auto& part : parts) {
      all.push_back(part._indices());
    }
    const auto [rows_of_all, places, _] =
        at::unique_dim(at::cat(all, 1), 1, /*sorted=*/true, /*return_inverse=*/true);
    auto sizes = values.sizes().vec();
    sizes[0] = rows_of_all.size(1);
    std::vector<Share> shares;
    int64_t begin = 0;
    for (const auto& part : parts) {
      const int64_t count = part._indices().size(1);
      at::Tensor spread = at::zeros(sizes, values.options());
      spread.index_copy_(0, places.narrow(0, begin, count), part._values());
      begin += count;
      shares.push_back({spread, mates->copies(static_cast<int>(shares.size()))});
    }
    at::Tensor reduced = at::empty(sizes, values.options());
    reduce_shares(reduced, shares, op);
    tensor.copy_(
        at::_sparse_coo_tensor_unsafe(rows_of_all, reduced, mine.sizes())._coalesced_(true));
  });
  is_eager_ = true; // the others need what the second round sends
}

void MixedPeers::reduce_scatter(
    at::Tensor output, const at::Tensor& input, const ReduceOp& op) {
  Unseen unseen;
  exchange_control(input, input, virtual_members());
  const at::Tensor whole = contribution(input, op);
  const int64_t chunk = output.numel();
  const auto chunk_of = [&](int member) { return whole.narrow(0, member * chunk, chunk); };
  for (int j = 0; j < mates_->count(); ++j) {
    if (j != mates_->me()) {
      exchange().send(j, chunk_of(mates_->member(j)));
    }
  }
  reduce_into(output, chunk_of(group_.rank()), chunk * group_.rank(), op);
}

void MixedPeers::reduce_scatter(
    at::Tensor output, const Tensors& inputs, const ReduceOp& op) {
  Unseen unseen;
  if (steers(output)) {
    Tensors parts;
    for (const auto& in : inputs) {
      parts.push_back(flat(in));
    }
    exchange_control(output, at::cat(parts), virtual_members());
  }
  for (int j = 0; j < mates_->count(); ++j) {
    if (j != mates_->me()) {
      exchange().send(j, contribution(inputs[mates_->member(j)], op));
    }
  }
  const int64_t begin = std::accumulate(
      inputs.begin(), inputs.begin() + group_.rank(), int64_t{0},
      [](int64_t sum, const at::Tensor& t) { return sum + t.numel(); });
  reduce_into(output, contribution(inputs[group_.rank()], op), begin, op);
}

void MixedPeers::gather(const Tensors& outputs, const at::Tensor& input) {
  Unseen unseen;
  exchange_control(input, input, outputs.empty() ? std::vector<int>{} : virtual_members());
  const int root = record_.kind == Kind::gather ? record_.root_rank : -1;
  const at::Tensor mine = contiguous(input).view({-1});
  if (outputs.empty()) { // gathered by another rank
    if (!is_virtual(root)) {
      exchange().send(mates_->of(root), mine);
    }
    return;
  }
  if (root < 0) {
    send_to_others(mine);
  }
  Tensors held;
  for (int j = 0; j < mates_->count(); ++j) {
    const at::Tensor& out = outputs[mates_->member(j)];
    held.push_back(
        j == mates_->me() ? mine : receive_from(j, out.numel(), out.scalar_type()));
  }
  const auto known = known_from(
      [&](int v) { return payload(v, input.scalar_type()); },
      [&](int v) -> const at::Tensor& { return outputs[v]; });
  if (known.size() < mates_->virtual_members().size()) {
    note_invented(input, "mirrored");
  }
  exchange().then([outputs, held, known, mates = mates_] {
    auto next = known.begin();
    for (int v = 0; v < static_cast<int>(outputs.size()); ++v) {
      at::Tensor out = outputs[v];
      const bool is_known = next != known.end() && next->member == v;
      copy_cyclic(out, is_known ? (next++)->values : held[mates->held_by(v)]);
    }
  });
}

void MixedPeers::gather(at::Tensor output, const at::Tensor& input) {
  Unseen unseen;
  exchange_control(input, input, virtual_members());
  const at::Tensor mine = contiguous(input).view({-1});
  send_to_others(mine);
  const Tensors held = receive_from_others(mine);
  const auto known = known_from(
      [&](int v) { return payload(v, input.scalar_type()); },
      [&](int) -> const at::Tensor& { return mine; });
  if (known.size() < mates_->virtual_members().size()) {
    note_invented(input, "mirrored");
  }
  const int size = group_.size();
  exchange().then([output, held, known, size, mates = mates_]() mutable {
    fill_flat(output, [&](at::Tensor& t) {
      // In-place use (the input is this rank's chunk of the output) is legal.
      const auto bytes = held[0].nbytes();
      auto* to = static_cast<char*>(t.data_ptr());
      auto next = known.begin();
      for (int v = 0; v < size; ++v, to += bytes) {
        const bool is_known = next != known.end() && next->member == v;
        const auto& from = is_known ? (next++)->values : held[mates->held_by(v)];
        std::memmove(to, from.const_data_ptr(), bytes);
      }
    });
  });
}

void MixedPeers::broadcast(at::Tensor tensor, int root) {
  Unseen unseen;
  const bool sends = root == group_.rank();
  exchange_control(
      tensor, sends ? tensor : at::Tensor(),
      is_virtual(root) ? std::vector<int>{root} : std::vector<int>{});
  if (is_virtual(root)) {
    const at::Tensor known = payload(root, tensor.scalar_type());
    if (known.defined() || !world_.keeps_buffers()) {
      from_virtual(tensor, known);
      return;
    }
    // Buffers are kept, so mates that hold different ones all keep those of one of them.
    note_invented(tensor, "kept");
  }
  const int from = mates_->held_by(root);
  if (from == mates_->me()) {
    send_to_others(contiguous(tensor));
  } else {
    receive_into(tensor, from);
  }
}

void MixedPeers::scatter(at::Tensor output, const Tensors& inputs, int root) {
  if (is_virtual(root)) {
    Peers::scatter(output, inputs, root);
    return;
  }
  if (root == group_.rank()) {
    Peers::scatter(output, inputs, root); // its own part
    Unseen unseen;
    for (int j = 0; j < mates_->count(); ++j) {
      if (j != mates_->me()) {
        exchange().send(j, contiguous(inputs[mates_->member(j)]));
      }
    }
    return;
  }
  Unseen unseen;
  receive_into(output, mates_->of(root));
}

void MixedPeers::all_to_all(const Tensors& outputs, const Tensors& inputs) {
  Unseen unseen;
  if (steers(outputs[0])) {
    Tensors parts;
    std::vector<int64_t> splits;
    for (const auto& in : inputs) {
      parts.push_back(flat(in));
      splits.push_back(in.numel());
    }
    exchange_control(outputs[0], at::cat(parts), virtual_members(), -1, splits);
  }
  Tensors held; // what each mate has for this rank
  for (int j = 0; j < mates_->count(); ++j) {
    const int member = mates_->member(j);
    if (j == mates_->me()) {
      held.push_back(contiguous(inputs[member]).view({-1}));
    } else {
      exchange().send(j, contiguous(inputs[member]));
      held.push_back(receive_from(j, outputs[member].numel(), outputs[member].scalar_type()));
    }
  }
  const auto known = known_from(
      [&](int v) { return payload_for_me(v, outputs[v].scalar_type()); },
      [&](int v) -> const at::Tensor& { return outputs[v]; });
  size_t received = 0;
  at::Tensor any_output;
  for (int v : mates_->virtual_members()) {
    if (outputs[v].numel() > 0) {
      ++received;
      any_output = outputs[v];
    }
  }
  if (known.size() < received) {
    note_invented(any_output, "mirrored");
  }
  exchange().then([outputs, inputs, held, known, mates = mates_, seed = world_.seed()] {
    // Where a mate has nothing for this rank although the virtual member has, the first
    // slot with data stands in.
    at::Tensor any;
    for (const auto* slots : {&held, &inputs}) {
      for (const auto& slot : *slots) {
        any = !any.defined() && slot.numel() > 0 ? slot : any;
      }
    }
    auto next = known.begin();
    for (int v = 0; v < static_cast<int>(outputs.size()); ++v) {
      at::Tensor out = outputs[v];
      const bool is_known = next != known.end() && next->member == v;
      const at::Tensor& from = is_known ? (next++)->values : held[mates->held_by(v)];
      if (out.numel() == 0) {
        continue;
      }
      if (from.numel() > 0) {
        copy_cyclic(out, from);
      } else if (any.defined()) {
        copy_cyclic(out, any);
      } else {
        fill_with_template(out, seed);
      }
    }
  });
}

void MixedPeers::all_to_all(
    at::Tensor output, const at::Tensor& input, const std::vector<int64_t>& out_splits,
    const std::vector<int64_t>& in_splits) {
  Unseen unseen;
  all_to_all(slots(output, out_splits), slots(input, in_splits));
}

void MixedPeers::send(const at::Tensor& tensor, int destination) {
  if (is_virtual(destination) || destination == group_.rank()) {
    Peers::send(tensor, destination);
    return;
  }
  Unseen unseen;
  exchange_control(tensor, tensor, {}, destination);
  exchange().send(mates_->of(destination), contiguous(tensor));
}

void MixedPeers::receive(at::Tensor tensor, int source) {
  if (is_virtual(source) || source == group_.rank()) {
    Peers::receive(tensor, source);
    return;
  }
  Unseen unseen;
  receive_into(tensor, mates_->of(source));
}

void MixedPeers::barrier() {
  at::Tensor token = unseen_tensor({1}, at::kByte);
  token.data_ptr<uint8_t>()[0] = 0;
  send_to_others(token);
  receive_from_others(token);
}

} // namespace crystal
