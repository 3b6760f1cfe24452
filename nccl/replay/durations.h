// How long segments and transfers take: constants, choices and draws.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace crystal::replay {

// How long things take. Draws depend on what is drawn, not on when.
class Durations {
 public:
  void set(const int64_t* ns, const double* spread, const int64_t* drain, int32_t n, uint64_t seed);
  int32_t size() const { return static_cast<int32_t>(ns_.size()); }
  // `entity` is a rank or a communicator, `count` says which of its durations.
  int64_t get(int32_t cls, uint64_t entity, uint64_t count) const {
    return is_drawn_[cls] ? draw(cls, entity, count) : ns_[cls];
  }
  void set_choices(int32_t cls, const int64_t* ns, const int64_t* weights, int32_t n);
  int64_t drain(int32_t cls) const { return drain_[cls]; }

 private:
  int64_t draw(int32_t cls, uint64_t entity, uint64_t count) const;

  std::vector<int64_t> ns_;
  std::vector<double> spread_;
  std::vector<uint8_t> is_drawn_;
  struct Choices {
    std::vector<int64_t> ns;
    std::vector<uint64_t> up_to; // sums of weights
  };
  std::unordered_map<int32_t, Choices> choices_;
  std::vector<int64_t> drain_;
  uint64_t seed_ = 0;
};

// Rounded half up, as the reference does.
int64_t scaled(int64_t ns, double factor);

} // namespace crystal::replay
