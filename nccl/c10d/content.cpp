#include "c10d/content.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

namespace crystal {
namespace {

using c10d::ReduceOp;

// Integer tensors up to this size steer programs (sizes, seeds, shapes);
// larger ones are data (token ids). Bytes of pickled objects are of any size.
constexpr size_t kControlBytes = 64 * 1024;

// Elements of the template that stands for floating point data of virtual
// peers: small enough to stay in a cache, long enough not to be periodic
// within a row of a matrix.
constexpr int64_t kTemplateElements = 1 << 18;
// As for freshly initialised weights.
constexpr double kTemplateStd = 0.02;

// Work on the bytes of user tensors without traces of it.
struct Unseen {
  at::AutoDispatchBelowADInplaceOrView below;
  at::DisableRecordFunctionGuard unrecorded;
};

bool is_control(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) &&
      (tensor.scalar_type() == at::kByte || tensor.nbytes() <= kControlBytes);
}

// A contiguous flat tensor with the same elements: a view where possible.
at::Tensor flat(const at::Tensor& tensor) { return tensor.reshape({-1}); }

// Runs `fill` on a flat view of `tensor`, or on a flat copy that is written back.
template <class Fill>
void fill_flat(at::Tensor& tensor, Fill fill) {
  if (tensor.is_contiguous()) {
    at::Tensor view = tensor.view({-1});
    fill(view);
  } else {
    at::Tensor copy = tensor.contiguous().view({-1});
    fill(copy);
    tensor.copy_(copy.view(tensor.sizes()));
  }
}

template <class T>
void scale_saturating(T* data, int64_t n, double factor) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const Wide most = static_cast<Wide>(std::numeric_limits<T>::max());
  const Wide scale = static_cast<Wide>(factor);
  at::parallel_for(0, n, 32768, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Wide x = static_cast<Wide>(data[i]);
      Wide y = x * scale;
      // What the program itself made infinite stays so; our factor makes nothing infinite.
      y = y > most && x <= most ? most : y;
      y = y < -most && x >= -most ? -most : y;
      data[i] = static_cast<T>(y);
    }
  });
}

// tensor *= factor, where no finite element becomes infinite.
void scale(at::Tensor& tensor, double factor) {
  if (factor == 1.0 || tensor.numel() == 0) {
    return;
  }
  const auto type = tensor.scalar_type();
  if (at::isIntegralType(type, /*includeBool=*/true)) {
    if (type != at::kBool) {
      tensor.mul_(static_cast<int64_t>(factor));
    }
    return;
  }
  if (at::isComplexType(type)) {
    at::Tensor parts = at::view_as_real(tensor);
    scale(parts, factor);
    return;
  }
  fill_flat(tensor, [&](at::Tensor& t) {
    switch (type) {
      case at::kDouble: scale_saturating(t.data_ptr<double>(), t.numel(), factor); break;
      case at::kFloat: scale_saturating(t.data_ptr<float>(), t.numel(), factor); break;
      case at::kHalf: scale_saturating(t.data_ptr<at::Half>(), t.numel(), factor); break;
      case at::kBFloat16: scale_saturating(t.data_ptr<at::BFloat16>(), t.numel(), factor); break;
      default: { // 8-bit floats: through float, whose conversion overflows to NaN
        const double most = type == at::kFloat8_e4m3fn ? 448.0
            : type == at::kFloat8_e5m2                 ? 57344.0
            : type == at::kFloat8_e4m3fnuz             ? 240.0
                                                       : 57344.0;
        at::Tensor wide = t.to(at::kFloat);
        const at::Tensor finite = wide.isfinite();
        t.copy_(at::where(finite, wide.mul(factor).clamp(-most, most), wide));
      }
    }
  });
}

bool even(int64_t n) { return n % 2 == 0; }

double premul_factor(const ReduceOp& op) {
  const auto* supplement =
      dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(supplement != nullptr, "PREMUL_SUM without its factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                             : supplement->double_factor;
}

// tensor <- reduction over n members that all hold it.
void reduce_equal(at::Tensor& tensor, int64_t n, const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM: scale(tensor, static_cast<double>(n)); break;
    case ReduceOp::PREMUL_SUM: scale(tensor, premul_factor(op) * static_cast<double>(n)); break;
    case ReduceOp::BXOR:
      if (even(n)) {
        tensor.zero_();
      }
      break;
    // PRODUCT of equal numbers leaves the range of any dtype within a few dozen
    // members, so it stays x, as AVG, MIN, MAX, BAND and BOR are.
    default: break;
  }
}

void combine(at::Tensor& into, const at::Tensor& other, const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM:
    case ReduceOp::AVG: into.scalar_type() == at::kBool ? into.logical_or_(other) : into.add_(other); break;
    case ReduceOp::PREMUL_SUM: into.add_(other, premul_factor(op)); break;
    case ReduceOp::PRODUCT: into.mul_(other); break;
    case ReduceOp::MIN: into.copy_(at::minimum(into, other)); break;
    case ReduceOp::MAX: into.copy_(at::maximum(into, other)); break;
    case ReduceOp::BAND: into.bitwise_and_(other); break;
    case ReduceOp::BOR: into.bitwise_or_(other); break;
    case ReduceOp::BXOR: into.bitwise_xor_(other); break;
    default: TORCH_CHECK(false, "Unhandled ReduceOp");
  }
}

// Seeded, finite, small: normal with standard deviation kTemplateStd.
const at::Tensor& template_of(at::ScalarType type, uint64_t seed) {
  static std::mutex mutex;
  static auto* templates = new std::unordered_map<int, at::Tensor>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& found = (*templates)[static_cast<int>(type)];
  if (!found.defined()) {
    at::Tensor base = at::empty({kTemplateElements}, at::kFloat);
    std::mt19937_64 generator(seed);
    std::normal_distribution<float> normal(0.0f, static_cast<float>(kTemplateStd));
    for (int64_t i = 0; i < kTemplateElements; ++i) {
      base.data_ptr<float>()[i] = normal(generator);
    }
    found = type == at::kFloat ? base : base.to(type);
  }
  return found;
}

// dst <- src cut, or repeated from its start, to dst's size.
void copy_cyclic(char* dst, size_t dst_bytes, const char* src, size_t src_bytes) {
  if (src_bytes == 0) {
    std::memset(dst, 0, dst_bytes);
    return;
  }
  for (size_t done = 0; done < dst_bytes; done += src_bytes) {
    std::memcpy(dst + done, src, std::min(src_bytes, dst_bytes - done));
  }
}

void copy_cyclic(at::Tensor& dst, const at::Tensor& src) {
  const at::Tensor from = flat(src).contiguous();
  fill_flat(dst, [&](at::Tensor& t) {
    copy_cyclic(static_cast<char*>(t.data_ptr()), t.nbytes(),
                static_cast<const char*>(from.const_data_ptr()), from.nbytes());
  });
}

void fill_with_template(at::Tensor& tensor, uint64_t seed) {
  if (at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
    tensor.zero_();
  } else {
    copy_cyclic(tensor, template_of(tensor.scalar_type(), seed));
  }
}

// Rows (along the last dimension) of a sum of partial activations that are all
// zero are the parts that other members hold: a vocabulary-parallel embedding is
// zero for every token of another shard. Left at zero such a row stays zero
// through every layer, and each norm over it multiplies its gradient by
// 1/sqrt(eps). So they get what a row of the template holds, at the scale of the
// rest of the tensor. Activations have a batch, a sequence and a width; flags,
// counts, flat buckets and the gradients of matrices have fewer dimensions.
constexpr int64_t kLeastActivationDims = 3;
constexpr int64_t kLeastActivationWidth = 16;

void fill_holes(at::Tensor& tensor, uint64_t seed) {
  if (tensor.dim() < kLeastActivationDims || tensor.numel() == 0 ||
      tensor.size(-1) < kLeastActivationWidth || !at::isFloatingType(tensor.scalar_type()) ||
      !tensor.is_contiguous()) {
    return;
  }
  const at::Tensor rows = tensor.view({-1, tensor.size(-1)});
  const size_t row_bytes = rows.size(1) * rows.element_size();
  const auto* data = static_cast<const char*>(rows.const_data_ptr());
  std::vector<int64_t> holes;
  for (int64_t r = 0; r < rows.size(0); ++r) {
    const char* row = data + r * row_bytes;
    // All bytes equal to the next one, and the first is zero: the row is zero.
    if (row[0] == 0 && std::memcmp(row, row + 1, row_bytes - 1) == 0) {
      holes.push_back(r);
    }
  }
  if (holes.empty()) {
    return;
  }
  double scale_by = 1.0;
  const auto held = rows.size(0) - static_cast<int64_t>(holes.size());
  if (held > 0) {
    const double norm = tensor.to(at::kFloat).norm().item<double>();
    const double rms = norm / std::sqrt(static_cast<double>(held * rows.size(1)));
    scale_by = std::isfinite(rms) ? rms / kTemplateStd : 1.0;
  }
  at::Tensor filling = at::empty({static_cast<int64_t>(holes.size()), rows.size(1)}, at::kFloat);
  fill_with_template(filling, seed);
  const at::Tensor where = at::tensor(holes, at::kLong);
  rows.index_copy_(0, where, filling.mul_(scale_by).to(tensor.scalar_type()));
}

} // namespace

void Peers::note_invented(const at::Tensor& tensor, const char* how) {
  if (group_.size() > 1 && tensor.numel() > 0 && is_control(tensor)) {
    world_.invented(record_, group_, how);
  }
}

std::vector<int> Peers::others() const {
  std::vector<int> ranks;
  for (int v = 0; v < group_.size(); ++v) {
    if (v != group_.rank()) {
      ranks.push_back(v);
    }
  }
  return ranks;
}

void Peers::exchange_control(const at::Tensor& like, const at::Tensor& mine,
                             const std::vector<int>& contributors, int peer,
                             const std::vector<int64_t>& splits) {
  const bool wanted = world_.keeps_contributions() || world_.has_payload_source();
  if (!wanted || !is_control(like) || group_.size() == 1) {
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

// tensor <- known, which must be as large; pickled objects may be shorter, as
// their buffer is as long as the longest one's.
static void assign(at::Tensor& tensor, const at::Tensor& known, const CallRecord& record,
                   const Group& group) {
  const int64_t have = known.numel();
  const int64_t want = tensor.numel();
  TORCH_CHECK(
      have == want || (have < want && tensor.scalar_type() == at::kByte),
      "A payload has another size than the call. Call ", record.call, " (",
      key(record, group), "): ", have, " elements instead of ", want,
      ". Capture the job again with this program.");
  fill_flat(tensor, [&](at::Tensor& t) {
    std::memcpy(t.data_ptr(), known.const_data_ptr(), known.nbytes());
    std::memset(static_cast<char*>(t.data_ptr()) + known.nbytes(), 0, t.nbytes() - known.nbytes());
  });
}

void Peers::from_virtual(at::Tensor& tensor, const at::Tensor& known) {
  if (known.defined()) {
    assign(tensor, known, record_, group_);
  } else if (world_.keeps_buffers()) {
    note_invented(tensor, "kept");
  } else {
    note_invented(tensor, "zeros");
    fill_with_template(tensor, world_.seed());
  }
}

std::vector<at::Tensor> Peers::known_slices(at::ScalarType dtype, int64_t begin, int64_t length) {
  std::vector<at::Tensor> known;
  for (int v = 0; payloads_ && v < group_.size(); ++v) {
    at::Tensor other = v == group_.rank() ? at::Tensor() : payload(v, dtype);
    if (other.defined()) {
      TORCH_CHECK(
          other.numel() >= begin + length, "A payload has another size than the call. Call ",
          record_.call, " (", key(record_, group_), "), payload of rank ", group_.global(v), ": ",
          other.numel(), " elements instead of ", begin + length,
          ". Capture the job again with this program.");
      known.push_back(other.narrow(0, begin, length));
    }
  }
  return known;
}

void Peers::reduce_known(at::Tensor& mine, const std::vector<at::Tensor>& known,
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
    combine(mine, other.view(mine.sizes()), op);
  }
  if (average) {
    mine.div_(group_.size());
  }
}

void Peers::reduce(at::Tensor tensor, const ReduceOp& op, int root) {
  Unseen unseen;
  if (tensor.is_sparse()) { // all members hold the same indices
    const at::Tensor whole = tensor.coalesce();
    at::Tensor values = whole._values().clone();
    reduce_equal(values, group_.size(), op);
    tensor.copy_(at::_sparse_coo_tensor_unsafe(whole._indices(), values, whole.sizes())
                     ._coalesced_(true));
    return;
  }
  const bool receives = root < 0 || root == group_.rank();
  exchange_control(tensor, tensor, receives ? others() : std::vector<int>{});
  if (!receives) {
    return;
  }
  reduce_known(tensor, known_slices(tensor.scalar_type(), 0, tensor.numel()), op);
}

void Peers::reduce_scatter(at::Tensor output, const at::Tensor& input, const ReduceOp& op) {
  Unseen unseen;
  const int64_t chunk = output.numel();
  const int64_t begin = chunk * group_.rank();
  exchange_control(input, input, others());
  output.copy_(flat(input).narrow(0, begin, chunk).view(output.sizes()));
  reduce_known(output, known_slices(output.scalar_type(), begin, chunk), op);
}

void Peers::reduce_scatter(at::Tensor output, const std::vector<at::Tensor>& inputs,
                           const ReduceOp& op) {
  Unseen unseen;
  if (is_control(output)) {
    std::vector<at::Tensor> parts;
    for (const auto& in : inputs) {
      parts.push_back(flat(in));
    }
    exchange_control(output, at::cat(parts), others());
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
  exchange_control(input, input, outputs.empty() ? std::vector<int>{} : others());
  if (outputs.empty()) { // gathered by another rank
    return;
  }
  bool all_known = true;
  for (int v = 0; v < group_.size(); ++v) {
    at::Tensor out = outputs[v];
    at::Tensor known = v == group_.rank() ? at::Tensor() : payload(v, out.scalar_type());
    if (known.defined()) {
      assign(out, known, record_, group_);
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
  exchange_control(input, input, others());
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
        assign(slot, known, record_, group_);
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
    if (is_control(output)) {
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
  if (is_control(outputs[0])) {
    std::vector<at::Tensor> parts;
    std::vector<int64_t> splits;
    for (const auto& in : inputs) {
      parts.push_back(flat(in));
      splits.push_back(in.numel());
    }
    exchange_control(outputs[0], at::cat(parts), others(), -1, splits);
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
    const Payload* found = v == group_.rank() ? nullptr : find(v);
    if (found != nullptr) {
      const at::Tensor whole = payload(v, out.scalar_type());
      std::vector<int64_t> splits = found->splits;
      if (splits.empty()) {
        splits.assign(group_.size(), whole.numel() / group_.size());
      }
      const auto me = splits.begin() + group_.rank();
      const int64_t begin = std::accumulate(splits.begin(), me, int64_t{0});
      assign(out, whole.narrow(0, begin, *me), record_, group_);
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

void Peers::all_to_all(at::Tensor output, const at::Tensor& input,
                       const std::vector<int64_t>& out_splits,
                       const std::vector<int64_t>& in_splits) {
  if (!payloads_ && out_splits == in_splits && !is_control(output)) { // every slot is as large there as here
    Unseen unseen;
    note_invented(output, "mirrored");
    fill_flat(output, [&](at::Tensor& t) { t.copy_(flat(input)); });
    return;
  }
  const auto slots = [&](const at::Tensor& whole, const std::vector<int64_t>& splits) {
    return splits.empty() ? whole.tensor_split(group_.size(), 0)
                          : whole.split_with_sizes(splits, 0);
  };
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
