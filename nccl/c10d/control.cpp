// The control plane: values that steer programs, which have to be the peers' own.

#include "c10d/content.h"
#include "c10d/tensors.h"

#include <cstring>
#include <numeric>

namespace crystal {
namespace {

using c10d::ReduceOp;

// Integer tensors up to this size steer programs (sizes, seeds, shapes);
// larger ones are data (token ids, weights as bytes). Pickled objects are of any
// size.
constexpr size_t kControlBytes = 64 * 1024;

} // namespace

bool Peers::steers(const at::Tensor& tensor) const {
  if (!at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
    return false;
  }
  return tensor.nbytes() <= kControlBytes ||
      (tensor.scalar_type() == at::kByte && world_.moves_objects());
}

void Peers::note_invented(const at::Tensor& tensor, const char* how) {
  if (group_.size() > 1 && tensor.numel() > 0 && steers(tensor)) {
    world_.invented(record_, group_, how);
  }
}

std::vector<int> Peers::virtual_members() const {
  std::vector<int> members;
  for (int v = 0; v < group_.size(); ++v) {
    if (v != group_.rank()) {
      members.push_back(v);
    }
  }
  return members;
}

void Peers::exchange_control(const at::Tensor& like, const at::Tensor& mine,
                             const std::vector<int>& contributors, int peer,
                             const std::vector<int64_t>& splits) {
  const bool wanted = world_.keeps_contributions() || world_.has_payload_source();
  if (!wanted || !steers(like) || group_.size() == 1) {
    return;
  }
  if (mine.defined() && world_.keeps_contributions()) {
    const at::Tensor bytes = flat(mine).contiguous();
    world_.contribute(Contribution{
        group_.identity(), record_.position.seq, world_.rank(),
        peer < 0 ? -1 : group_.global(peer),
        Payload{dtype_name(like.scalar_type()),
                std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()),
                splits}});
  }
  std::vector<int> ranks;
  for (int v : contributors) {
    if (v != group_.rank()) {
      ranks.push_back(group_.global(v));
    }
  }
  const bool receives = !mine.defined() && peer >= 0;
  if (!ranks.empty() &&
      world_.fetch(group_, record_.position.seq, ranks, receives ? group_.global(peer) : -1,
                   key(record_, group_))) {
    payloads_ = world_.payloads(group_, record_.position.seq);
  }
}

const Payload* Peers::find(int v, int peer) const {
  if (!payloads_) {
    return nullptr;
  }
  const auto found =
      payloads_->find({group_.global(v), peer < 0 ? -1 : group_.global(peer)});
  return found == payloads_->end() ? nullptr : &found->second;
}

at::Tensor Peers::payload(int v, at::ScalarType dtype, int peer) {
  const Payload* found = find(v, peer);
  if (found == nullptr) {
    return {};
  }
  TORCH_CHECK(
      found->dtype == dtype_name(dtype),
      "A payload is of another dtype than the call. Rank ", world_.rank(), ", call ", record_.call,
      " (", key(record_, group_), "), payload of rank ", group_.global(v), ": ", found->dtype,
      " instead of ", dtype_name(dtype), ". Capture the job again with this program.");
  at::Tensor tensor = at::empty(
      {static_cast<int64_t>(found->bytes.size() / c10::elementSize(dtype))}, dtype);
  std::memcpy(tensor.data_ptr(), found->bytes.data(), tensor.nbytes());
  return tensor;
}

at::Tensor Peers::payload_for_me(int v, at::ScalarType dtype) {
  const Payload* found = find(v);
  if (found == nullptr) {
    return {};
  }
  const at::Tensor whole = payload(v, dtype);
  std::vector<int64_t> splits = found->splits;
  if (splits.empty()) {
    splits.assign(group_.size(), whole.numel() / group_.size());
  }
  const auto me = splits.begin() + group_.rank();
  return whole.narrow(0, std::accumulate(splits.begin(), me, int64_t{0}), *me);
}

// tensor <- known, which must be as large; pickled objects may be shorter, as
// their buffer is as long as the longest one's.
void Peers::assign(at::Tensor& tensor, const at::Tensor& known) const {
  const int64_t have = known.numel();
  const int64_t want = tensor.numel();
  TORCH_CHECK(
      have == want || (have < want && tensor.scalar_type() == at::kByte),
      "A payload has another size than the call. Call ", record_.call, " (",
      key(record_, group_), "): ", have, " elements instead of ", want,
      ". Capture the job again with this program.");
  fill_flat(tensor, [&](at::Tensor& t) {
    std::memcpy(t.data_ptr(), known.const_data_ptr(), known.nbytes());
    std::memset(static_cast<char*>(t.data_ptr()) + known.nbytes(), 0, t.nbytes() - known.nbytes());
  });
}

void Peers::from_virtual(at::Tensor& tensor, const at::Tensor& known) {
  if (known.defined()) {
    assign(tensor, known);
  } else if (world_.keeps_buffers()) {
    note_invented(tensor, "kept");
  } else {
    note_invented(tensor, "zeros");
    fill_with_template(tensor, world_.seed());
  }
}

std::vector<Peers::Known> Peers::known_slices(
    at::ScalarType dtype, int64_t begin, int64_t length) {
  std::vector<Known> known;
  for (int v = 0; payloads_ && v < group_.size(); ++v) {
    at::Tensor other = is_virtual(v) ? payload(v, dtype) : at::Tensor();
    if (other.defined()) {
      TORCH_CHECK(
          other.numel() >= begin + length, "A payload has another size than the call. Call ",
          record_.call, " (", key(record_, group_), "), payload of rank ", group_.global(v), ": ",
          other.numel(), " elements instead of ", begin + length,
          ". Capture the job again with this program.");
      known.push_back({v, other.narrow(0, begin, length)});
    }
  }
  return known;
}

void Peers::reduce_known(at::Tensor& mine, const std::vector<Known>& known,
                         const ReduceOp& op) {
  const int64_t equal = group_.size() - static_cast<int64_t>(known.size());
  if (equal > 1) {
    note_invented(mine, "mirrored");
  }
  const bool average = op.op_ == ReduceOp::AVG && !known.empty();
  reduce_equal(mine, equal, average ? ReduceOp(ReduceOp::SUM) : op);
  if (equal > 1 && op.op_ == ReduceOp::SUM) {
    fill_holes(mine, world_.seed());
  }
  for (const auto& other : known) {
    combine(mine, other.values.view(mine.sizes()), op);
  }
  if (average) {
    mine.div_(group_.size());
  }
}

} // namespace crystal
