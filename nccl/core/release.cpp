#include "core/release.h"

#include <algorithm>

#include "core/call_record.h"
#include "core/clock.h"

namespace crystal {
namespace {

class KnownRelease final : public Release {
 public:
  KnownRelease(int64_t start_ns, int64_t end_ns) : start_ns_(start_ns), end_ns_(end_ns) {}
  bool poll() override { return true; }
  bool wait(int64_t, bool, std::string*) override { return true; }
  int64_t start_ns() const override { return start_ns_; }
  int64_t end_ns() const override { return end_ns_; }

 private:
  const int64_t start_ns_;
  const int64_t end_ns_;
};

class FixedRule final : public ReleaseRule {
 public:
  explicit FixedRule(int64_t transfer_ns) : transfer_ns_(transfer_ns) {}
  std::shared_ptr<Release> arrive(const CallRecord& record, const Group&) override {
    return known_release(record.arrival_ns, record.arrival_ns + transfer_ns_);
  }

 private:
  const int64_t transfer_ns_;
};

} // namespace

std::shared_ptr<ReleaseRule> fixed_release(int64_t transfer_ns) {
  return std::make_shared<FixedRule>(transfer_ns);
}

std::shared_ptr<Release> known_release(int64_t start_ns, int64_t end_ns) {
  return std::make_shared<KnownRelease>(start_ns, end_ns);
}

int64_t End::poll() const {
  int64_t last = 0;
  for (const auto& release : releases_) {
    if (!release->poll()) {
      return -1;
    }
    last = std::max(last, release->end_ns());
  }
  return last;
}

int64_t End::wait(int64_t limit_ns, bool makes_calls, std::string* reason) const {
  const int64_t until = now_ns() + std::min(limit_ns, INT64_MAX / 2);
  for (const auto& release : releases_) {
    if (!release->poll() &&
        !release->wait(std::max<int64_t>(until - now_ns(), 1), makes_calls, reason)) {
      return -1;
    }
  }
  return poll();
}

} // namespace crystal
