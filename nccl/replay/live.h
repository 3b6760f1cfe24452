// The engine beside running programs: requests of external ranks are served as
// they come, and what does not wait for one of these is computed ahead.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "replay/engine.h"
#include "replay/shared.h"

namespace crystal::replay {

// Who holds the lock owns the engine: its own thread, if there is one, and any
// thread of the process that waits and would have nothing else to do.
class Live final : public Helper, private Engine::Listener {
 public:
  Live(Engine& engine, const std::vector<int32_t>& external, const crystal_live_options& options);
  ~Live() override;

  std::shared_ptr<Segment> segment() const { return segment_; }
  // Until everything is computed that the arrivals so far determine; false at the limit.
  bool settle(int64_t limit_ns);
  crystal_live_stats stats();
  // In any state: wakes all that wait, joins the thread. The engine is the caller's again.
  void stop();

  bool help() override;
  bool look() override;
  bool has_thread() const override { return has_thread_; }

 private:
  const std::vector<int32_t>& begun(Engine& engine, const std::vector<int32_t>& external,
                                    const crystal_live_options& options);
  void serve();
  // With the lock; false if there was nothing to do.
  bool step(bool is_helper = false);
  bool look_with_lock();
  void take(const Request& request);
  bool find_circle();
  bool nobody_can_arrive();
  void known(int32_t rank, int64_t ticket, int64_t start_ns, int64_t end_ns) override;
  void close(int code, const std::string& text);
  int64_t now_ns() const { return monotonic_ns() - epoch_ns_; }

  const std::vector<int32_t> external_;
  const bool has_thread_;
  const bool helps_;
  const int64_t spin_ns_;
  const int64_t epoch_ns_;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Port> port_;
  Bell& bell_;

  std::mutex lock_; // of what follows
  Engine* engine_;  // null once stopped
  bool is_over_ = false;
  std::string over_text_;
  int over_code_ = 0;
  std::vector<uint8_t> has_finished_; // by rank
  const Request* at_hand_ = nullptr;
  crystal_live_stats stats_{};

  std::atomic<bool> is_ready_{true}; // the engine can go on without a request
  std::atomic<int64_t> due_ns_{-1};  // when a shared transfer begins or ends next
  std::atomic<bool> stopping_{false};
  std::mutex stop_lock_;
  std::thread thread_;
};

} // namespace crystal::replay
