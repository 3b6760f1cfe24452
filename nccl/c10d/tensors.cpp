#include "c10d/tensors.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <random>
#include <unordered_map>

namespace crystal {
namespace {

using c10d::ReduceOp;

// Elements of the template that stands for floating point data of virtual
// peers: small enough to stay in a cache, long enough not to be periodic
// within a row of a matrix.
constexpr int64_t kTemplateElements = 1 << 18;
// As for freshly initialised weights.
constexpr double kTemplateStd = 0.02;

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

bool even(int64_t n) { return n % 2 == 0; }

double premul_factor(const ReduceOp& op) {
  const auto* supplement =
      dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(supplement != nullptr, "PREMUL_SUM without its factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                             : supplement->double_factor;
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

// Rows (along the last dimension) of a sum of partial activations that are all
// zero are the parts that other members hold: a vocabulary-parallel embedding is
// zero for every token of another shard. Left at zero such a row stays zero
// through every layer, and each norm over it multiplies its gradient by
// 1/sqrt(eps). So they get what a row of the template holds, at the scale of the
// rest of the tensor. Activations have a batch, a sequence and a width; flags,
// counts, flat buckets and the gradients of matrices have fewer dimensions.
constexpr int64_t kLeastActivationDims = 3;
constexpr int64_t kLeastActivationWidth = 16;

// The sum of squares of a contiguous tensor. Pieces are summed apart and then in
// their order, so that ranks with other numbers of threads get the same.
double sum_of_squares(const at::Tensor& tensor) {
  constexpr int64_t kPiece = 16384;
  const at::Tensor wide = tensor.to(at::kFloat);
  const float* data = wide.const_data_ptr<float>();
  const int64_t n = wide.numel();
  std::vector<double> sums((n + kPiece - 1) / kPiece, 0.0);
  at::parallel_for(0, static_cast<int64_t>(sums.size()), 2, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      for (int64_t i = piece * kPiece; i < std::min(n, (piece + 1) * kPiece); ++i) {
        sums[piece] += static_cast<double>(data[i]) * data[i];
      }
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

} // namespace

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
    const double rms =
        std::sqrt(sum_of_squares(tensor) / static_cast<double>(held * rows.size(1)));
    scale_by = std::isfinite(rms) ? rms / kTemplateStd : 1.0;
  }
  at::Tensor filling = at::empty({static_cast<int64_t>(holes.size()), rows.size(1)}, at::kFloat);
  fill_with_template(filling, seed);
  const at::Tensor where = at::tensor(holes, at::kLong);
  rows.index_copy_(0, where, filling.mul_(scale_by).to(tensor.scalar_type()));
}

} // namespace crystal
