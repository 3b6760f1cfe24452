#include "c10d/reduction.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>

namespace crystal {
namespace {

using c10d::ReduceOp;

// Elements that are folded at a time: their wide values stay in a first-level cache.
constexpr int64_t kBlock = 1024;
// Elements below which a second thread does not pay.
constexpr int64_t kGrain = 32768;

// What elements are folded in: integers wrap as unsigned numbers.
template <class T>
using Fast = std::conditional_t<
    std::is_integral_v<T>, uint64_t, std::conditional_t<std::is_same_v<T, double>, double, float>>;
// What holds any sum of finite elements, where the other does not.
template <class T>
using Wide = std::conditional_t<
    std::is_integral_v<T>, uint64_t,
    std::conditional_t<std::is_same_v<T, double>, long double, double>>;

template <class Into, class T>
Into widen(T x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<Into>(x);
  } else { // half, bfloat16 and 8 bits convert to float only
    return static_cast<float>(x);
  }
}

// The nearest T; what is finite stays so.
template <class T, class From>
T narrow(From y) {
  if constexpr (std::is_integral_v<T> || std::is_same_v<T, From>) {
    return static_cast<T>(y);
  } else {
    const auto most = widen<From>(std::numeric_limits<T>::max());
    const From cut = y > most ? most : y < -most ? -most : y;
    y = std::abs(y) <= std::numeric_limits<From>::max() ? cut : y;
    if constexpr (std::is_arithmetic_v<T>) {
      return static_cast<T>(y);
    } else {
      return static_cast<T>(static_cast<float>(y));
    }
  }
}

template <class T>
struct Shares {
  std::vector<const T*> data;
  std::vector<int64_t> copies;
};

// Blocks of folded elements: next(... next(first(x0[i]), x1[i], 1) ..., xk[i], k),
// which done(folded, i of the first, how many) takes.
template <class T, class First, class Next, class Done>
void fold_blocks(const Shares<T>& shares, int64_t n, First first, Next next, Done done) {
  at::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    decltype(first(shares.data[0][0])) folded[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t length = std::min(kBlock, end - at);
      const T* data = shares.data[0] + at;
      for (int64_t i = 0; i < length; ++i) {
        folded[i] = first(data[i]);
      }
      for (size_t j = 1; j < shares.data.size(); ++j) {
        data = shares.data[j] + at;
        for (int64_t i = 0; i < length; ++i) {
          folded[i] = next(folded[i], data[i], j);
        }
      }
      done(folded, at, length);
    }
  });
}

template <class T, class First, class Next, class Last>
void fold(T* into, const Shares<T>& shares, int64_t n, First first, Next next, Last last) {
  fold_blocks(shares, n, first, next, [&](const auto* folded, int64_t at, int64_t length) {
    for (int64_t i = 0; i < length; ++i) {
      into[at + i] = last(folded[i]);
    }
  });
}

// All exponent bits are set in infinities and NaNs, and in no other number. Integers
// make a loop of this that the compiler turns into vectors.
template <class T>
bool all_finite(const T* data, int64_t n) {
  using Bits = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;
  constexpr auto kExponent = std::bit_cast<Bits>(std::numeric_limits<T>::infinity());
  Bits odd = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits exponent = std::bit_cast<Bits>(data[i]) & kExponent;
    odd |= exponent == kExponent ? Bits{1} : Bits{0};
  }
  return odd == 0;
}

// The sum of the copies, divided. Where it is not finite it is taken again in the
// wider type, element by element, so that it depends on nothing but the element.
template <class T>
void sum(T* into, const Shares<T>& shares, int64_t n, int64_t divisor) {
  std::vector<Fast<T>> copies(shares.copies.begin(), shares.copies.end());
  const auto* times = copies.data();
  const auto first = [by = times[0]](T x) { return by * widen<Fast<T>>(x); };
  const auto next = [times](Fast<T> y, T x, size_t j) { return y + times[j] * widen<Fast<T>>(x); };
  if constexpr (std::is_integral_v<T>) {
    fold(into, shares, n, first, next, [divisor](uint64_t y) {
      return static_cast<T>(divisor == 1 ? y : static_cast<int64_t>(y) / divisor);
    });
  } else {
    const auto by = static_cast<Fast<T>>(divisor);
    const auto again = [&](int64_t i) {
      Wide<T> y = 0;
      for (size_t j = 0; j < shares.data.size(); ++j) {
        y += static_cast<Wide<T>>(shares.copies[j]) * widen<Wide<T>>(shares.data[j][i]);
      }
      return narrow<T>(y / static_cast<Wide<T>>(divisor));
    };
    fold_blocks(shares, n, first, next, [&](const Fast<T>* folded, int64_t at, int64_t length) {
      if (!all_finite(folded, length)) {
        for (int64_t i = 0; i < length; ++i) {
          into[at + i] =
              std::isfinite(folded[i]) ? narrow<T>(folded[i] / by) : again(at + i);
        }
      } else if (divisor == 1) {
        for (int64_t i = 0; i < length; ++i) {
          into[at + i] = narrow<T>(folded[i]);
        }
      } else {
        for (int64_t i = 0; i < length; ++i) {
          into[at + i] = narrow<T>(folded[i] / by);
        }
      }
    });
  }
}

template <class T>
void product(T* into, const Shares<T>& shares, int64_t n) {
  // Cut after each factor, as several together leave the range of the wide type too.
  fold(
      into, shares, n, [](T x) { return x; },
      [](T y, T x, size_t) { return narrow<T>(widen<Wide<T>>(y) * widen<Wide<T>>(x)); },
      [](T y) { return y; });
}

// The least, or the greatest; a NaN stays one.
template <class T>
void extreme(T* into, const Shares<T>& shares, int64_t n, bool least) {
  const auto keep = [](T x) { return x; };
  const auto choose = [least](T y, T x, size_t) {
    const bool better = least ? x < y : x > y;
    return better || !(x == x) ? x : y;
  };
  fold(into, shares, n, keep, choose, keep);
}

template <class T>
void bits(T* into, const Shares<T>& shares, int64_t n, ReduceOp::RedOpType op) {
  const auto keep = [](T x) { return x; };
  switch (op) {
    case ReduceOp::BAND:
      fold(into, shares, n, keep, [](T y, T x, size_t) { return static_cast<T>(y & x); }, keep);
      break;
    case ReduceOp::BOR:
      fold(into, shares, n, keep, [](T y, T x, size_t) { return static_cast<T>(y | x); }, keep);
      break;
    default: { // what an even number of members holds cancels out
      const auto odd = [&](T x, size_t j) { return shares.copies[j] % 2 ? x : T{0}; };
      fold(
          into, shares, n, [&](T x) { return odd(x, 0); },
          [&](T y, T x, size_t j) { return static_cast<T>(y ^ odd(x, j)); }, keep);
    }
  }
}

template <class T>
void reduce_as(at::Tensor& into, const std::vector<Share>& given, ReduceOp::RedOpType op) {
  Shares<T> shares;
  for (const auto& share : given) {
    shares.data.push_back(static_cast<const T*>(share.data.const_data_ptr()));
    shares.copies.push_back(share.copies);
  }
  auto* data = static_cast<T*>(into.data_ptr());
  const int64_t n = into.numel();
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::PREMUL_SUM: sum(data, shares, n, 1); return;
    case ReduceOp::AVG: {
      sum(data, shares, n,
          std::accumulate(shares.copies.begin(), shares.copies.end(), int64_t{0}));
      return;
    }
    case ReduceOp::PRODUCT: product(data, shares, n); return;
    case ReduceOp::MIN: extreme(data, shares, n, true); return;
    case ReduceOp::MAX: extreme(data, shares, n, false); return;
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    bits(data, shares, n, op);
  } else {
    TORCH_CHECK(false, "Cannot use a bitwise ReduceOp with non-integral dtype");
  }
}

// Truth values as bytes of 0 and 1: any is their maximum, all their minimum.
ReduceOp::RedOpType of_bytes(ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::BOR: return ReduceOp::MAX;
    case ReduceOp::PRODUCT:
    case ReduceOp::BAND: return ReduceOp::MIN;
    default: return op;
  }
}

} // namespace

void reduce_shares(at::Tensor& into, const std::vector<Share>& shares, const ReduceOp& op) {
  const ReduceOp::RedOpType type = op.op_;
  switch (into.scalar_type()) {
    case at::kFloat: reduce_as<float>(into, shares, type); return;
    case at::kDouble: reduce_as<double>(into, shares, type); return;
    case at::kHalf: reduce_as<at::Half>(into, shares, type); return;
    case at::kBFloat16: reduce_as<at::BFloat16>(into, shares, type); return;
    case at::kFloat8_e4m3fn: reduce_as<at::Float8_e4m3fn>(into, shares, type); return;
    case at::kFloat8_e5m2: reduce_as<at::Float8_e5m2>(into, shares, type); return;
    case at::kByte: reduce_as<uint8_t>(into, shares, type); return;
    case at::kChar: reduce_as<int8_t>(into, shares, type); return;
    case at::kShort: reduce_as<int16_t>(into, shares, type); return;
    case at::kInt: reduce_as<int32_t>(into, shares, type); return;
    case at::kLong: reduce_as<int64_t>(into, shares, type); return;
    case at::kBool: reduce_as<uint8_t>(into, shares, of_bytes(type)); return;
    // Sums and averages are those of the parts.
    case at::kComplexFloat:
    case at::kComplexDouble: {
      TORCH_CHECK(
          type == ReduceOp::SUM || type == ReduceOp::AVG || type == ReduceOp::PREMUL_SUM,
          "Complex numbers are only summed and averaged");
      const bool is_float = into.scalar_type() == at::kComplexFloat;
      at::Tensor parts = at::view_as_real(into);
      std::vector<Share> of_parts;
      for (const auto& share : shares) {
        of_parts.push_back({at::view_as_real(share.data), share.copies});
      }
      is_float ? reduce_as<float>(parts, of_parts, type) : reduce_as<double>(parts, of_parts, type);
      return;
    }
    default: TORCH_CHECK(false, "Invalid scalar type");
  }
}

} // namespace crystal
