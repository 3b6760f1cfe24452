// Calls end when the replay of everybody else says so.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "core/release.h"
#include "replay/replay.h"

namespace crystal {

// The functions of the replay library that a sandbox rank needs. The library is loaded
// at run time: it knows nothing of torch, and is built by itself.
struct ReplayLibrary {
  // Throws std::runtime_error.
  explicit ReplayLibrary(const std::string& path);

  decltype(&crystal_live_message) message;
  decltype(&crystal_client_attach) attach;
  decltype(&crystal_client_detach) detach;
  decltype(&crystal_client_now) now;
  decltype(&crystal_client_arrive) arrive;
  decltype(&crystal_client_mark) mark;
  decltype(&crystal_client_slowness) slowness;
  decltype(&crystal_client_wait) wait;
  decltype(&crystal_client_watch) watch;
};

class LiveRule final : public ReleaseRule {
 public:
  struct Options {
    std::string library;
    std::string address; // of the live run
    int32_t rank = 0;
    int32_t num_threads = 1; // that make calls
    // By ordinal of the call in the capture of the rank's role.
    std::vector<crystal_instruction> instructions;
    std::vector<int64_t> cpu_ns;  // empty: no CPU time is taken
    std::vector<int64_t> call_ns; // empty: calls take what they take here
    // Marks at which the replay's iterations end: `first_mark` (if > 0), and every
    // `period` after it.
    int64_t first_mark = 0;
    int64_t period = 1;
    int64_t limit_ns = 0; // of every wait
    // Computation of one iteration as the durations have it. If it is known, the run is told
    // how many times as long the rank takes.
    int64_t body_ns = 0;
  };
  // Attaches to the run. Throws std::runtime_error with the library's message.
  explicit LiveRule(Options options);

  std::shared_ptr<Release> arrive(const CallRecord& record, const Group& group) override;
  void marked(int64_t marks, int64_t at_ns, int64_t computed_ns) override;
  int64_t cpu_ns(const CallRecord& record) const override;
  int64_t call_ns(const CallRecord& record) const override;
  // The rank makes no more calls. What is not released by now never will be.
  void close();
  // CLOCK_MONOTONIC at which the run's time is 0.
  int64_t epoch_ns() const { return epoch_ns_; }

 private:
  class Connection;
  class LiveRelease;

  // Tells how slow the rank is, by the median of its last iterations.
  void tell_slowness(int64_t computed_ns);

  const Options options_;
  std::shared_ptr<Connection> connection_;
  int64_t epoch_ns_ = 0;
  int64_t computed_ns_ = 0; // since the last iteration of the replay's
  std::deque<double> slownesses_;
  std::deque<std::weak_ptr<LiveRelease>> recent_; // calls whose tickets are still good
};

} // namespace crystal
