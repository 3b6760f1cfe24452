#include "replay/durations.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "replay/failure.h"

namespace crystal::replay {
namespace {

uint64_t mix(uint64_t x) { // splitmix64
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// In (0, 1], in steps of 2^-53.
double unit(uint64_t bits) { return static_cast<double>((bits >> 11) + 1) * 0x1.0p-53; }

} // namespace

int64_t scaled(int64_t ns, double factor) {
  return static_cast<int64_t>(std::floor(static_cast<double>(ns) * factor + 0.5));
}

void Durations::set(const int64_t* ns, const double* spread, const int64_t* drain, int32_t n,
                    uint64_t seed) {
  for (int32_t i = 0; i < n; ++i) {
    if (ns[i] < 0 || (drain && drain[i] < 0) || (spread && !(spread[i] >= 0))) {
      throw Failure(CRYSTAL_REPLAY_INVALID,
                    "A duration is negative. Class " + std::to_string(i) +
                        ". Give nanoseconds and spreads of 0 or more.");
    }
  }
  ns_.assign(ns, ns + n);
  spread_.assign(n, 0.0);
  if (spread) {
    spread_.assign(spread, spread + n);
  }
  drain_.assign(n, 0);
  if (drain) {
    drain_.assign(drain, drain + n);
  }
  seed_ = seed;
  choices_.clear();
  is_drawn_.assign(n, 0);
  for (int32_t i = 0; i < n; ++i) {
    is_drawn_[i] = spread_[i] != 0.0;
  }
}

void Durations::set_choices(int32_t cls, const int64_t* ns, const int64_t* weights, int32_t n) {
  Choices made;
  uint64_t sum = 0;
  bool is_valid = cls >= 0 && cls < size() && n > 0;
  for (int32_t i = 0; i < n && is_valid; ++i) {
    is_valid = ns[i] >= 0 && weights[i] > 0;
    sum += static_cast<uint64_t>(weights[i]);
    made.ns.push_back(ns[i]);
    made.up_to.push_back(sum);
  }
  if (!is_valid) {
    throw Failure(CRYSTAL_REPLAY_INVALID,
                  "The choices of a duration are none, or negative. Class " +
                      std::to_string(cls) +
                      ". Give durations of 0 or more with weights above 0 for a class that is "
                      "there.");
  }
  choices_[cls] = std::move(made);
  is_drawn_[cls] = 1;
}

int64_t Durations::draw(int32_t cls, uint64_t entity, uint64_t count) const {
  const uint64_t key = mix(mix(mix(seed_ ^ static_cast<uint64_t>(cls)) ^ entity) ^ count);
  if (const auto found = choices_.find(cls); found != choices_.end()) {
    const auto& up_to = found->second.up_to;
    const uint64_t at = key % up_to.back();
    const auto chosen = std::upper_bound(up_to.begin(), up_to.end(), at) - up_to.begin();
    return found->second.ns[chosen];
  }
  const double u = unit(key);
  const double v = unit(mix(key));
  const double normal = std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
  return scaled(ns_[cls], std::exp(spread_[cls] * normal));
}

} // namespace crystal::replay
