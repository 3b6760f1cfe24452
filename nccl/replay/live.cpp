#include "replay/live.h"

#include <algorithm>
#include <bit>
#include <new>

namespace crystal::replay {
namespace {

constexpr int kRequests = 64;          // between two looks at what can be computed
constexpr int kLanes = 8;              // between two looks at requests
constexpr int64_t kLookNs = 20'000'000; // between two looks for the dead
// Waking a thread costs who wakes it some microseconds (50 on a virtual machine), so a
// helper in a hurry leaves what is not urgent to the next one, or to the thread's tick.
constexpr int64_t kTickNs = 1'000'000;

void count(int64_t ns, int64_t* sum, int64_t* most, int64_t (&log2)[CRYSTAL_LIVE_BUCKETS]) {
  *sum += ns;
  *most = std::max(*most, ns);
  const int bucket = std::bit_width(static_cast<uint64_t>(std::max<int64_t>(ns, 1))) - 1;
  ++log2[std::min(bucket, CRYSTAL_LIVE_BUCKETS - 1)];
}

} // namespace

Live::Live(Engine& engine, const std::vector<int32_t>& external,
           const crystal_live_options& options)
    : external_(begun(engine, external, options)), has_thread_(options.has_thread != 0), helps_(options.helps != 0),
      spin_ns_(options.engine_spin_ns), epoch_ns_(monotonic_ns()),
      segment_(std::make_shared<Segment>(external, epoch_ns_, options.client_spin_ns,
                                         options.has_thread != 0)),
      port_(std::make_unique<SharedPort>(segment_)), bell_(segment_->header().bell),
      engine_(&engine) {
  has_finished_.assign(*std::max_element(external.begin(), external.end()) + 1, 0);
  if (has_thread_) {
    thread_ = std::thread([this] { serve(); });
  }
}

// First of all: it refuses what the rest relies on.
const std::vector<int32_t>& Live::begun(Engine& engine, const std::vector<int32_t>& external,
                                        const crystal_live_options& options) {
  engine.begin(options.num_iterations, external, options.ahead, this);
  return external;
}

Live::~Live() { stop(); }

void Live::stop() {
  const std::lock_guard once(stop_lock_);
  stopping_ = true;
  {
    const std::lock_guard guard(lock_);
    close(CRYSTAL_REPLAY_CLOSED,
          "The replay was stopped. A live run of " + std::to_string(external_.size()) +
              " external ranks. Start it again to go on.");
    engine_ = nullptr;
  }
  bell_.ring();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Live::close(int code, const std::string& text) {
  if (!is_over_) {
    is_over_ = true;
    over_code_ = code;
    over_text_ = text;
    port_->close(code, text);
  }
}

void Live::serve() {
  int64_t idle_since = monotonic_ns();
  int64_t looked = idle_since;
  while (!stopping_) {
    bool did = false;
    if (is_ready_ || !port_->is_quiet()) { // a lock that is free costs helpers nothing
      const std::lock_guard guard(lock_);
      did = step();
    }
    const int64_t now = monotonic_ns();
    if (now - looked >= kLookNs) {
      looked = now;
      const std::lock_guard guard(lock_);
      did = look_with_lock() || did;
    }
    if (did) {
      idle_since = now;
      continue;
    }
    if (now - idle_since < spin_ns_) {
      continue;
    }
    const uint32_t seen = bell_.count.load();
    bell_.is_asleep.store(1);
    {
      const std::lock_guard guard(lock_);
      did = look_with_lock();
    }
    looked = now;
    if (!did && !stopping_) {
      int64_t limit_ns = helps_ ? kTickNs : kLookNs;
      if (const int64_t due = due_ns_; due >= 0) { // on time for it
        limit_ns = std::clamp<int64_t>(due - now_ns(), 0, limit_ns);
      }
      bell_.sleep(seen, limit_ns);
    }
    bell_.is_asleep.store(0);
  }
}

bool Live::help() {
  std::unique_lock guard(lock_, std::defer_lock);
  if (!has_thread_) {
    guard.lock(); // nobody else would take the request
  } else if (!helps_ || !guard.try_lock()) {
    return false;
  }
  return step(true);
}

bool Live::look() {
  const std::lock_guard guard(lock_);
  return look_with_lock();
}

bool Live::step(bool is_helper) {
  if (is_over_) {
    return false;
  }
  bool did = false;
  Request request;
  try {
    for (int n = 0; n < kRequests && port_->poll(&request); ++n) {
      at_hand_ = &request;
      take(request);
      at_hand_ = nullptr;
      did = true;
    }
    if (!did || !is_helper) { // whose answer may be there now
      did = engine_->work(kLanes) || did;
    }
    if (!did && engine_->next_happening() >= 0) {
      did = engine_->happen_until(nobody_can_arrive() ? INT64_MAX : now_ns());
    }
  } catch (const Failure& failure) {
    close(failure.code, failure.what());
  } catch (const std::bad_alloc&) {
    close(CRYSTAL_REPLAY_MEMORY,
          "Out of memory. The replayed world. Replay fewer ranks, watch fewer, or compute less "
          "far ahead.");
  } catch (const std::exception& error) {
    close(CRYSTAL_REPLAY_INVALID,
          std::string("The replay engine failed. ") + error.what() + ". Report this.");
  }
  at_hand_ = nullptr;
  due_ns_ = is_over_ ? -1 : engine_->next_happening();
  is_ready_ = !is_over_ && (engine_->is_ready() || due_ns_ >= 0);
  return did;
}

void Live::take(const Request& request) {
  switch (request.ask) {
    case Ask::kArrive:
      ++stats_.num_arrivals;
      engine_->arrive(request.rank, request.call, request.at_ns, request.ticket);
      break;
    case Ask::kMark:
      engine_->mark(request.rank, request.at_ns);
      break;
    case Ask::kSlowness:
      engine_->set_slowness(request.rank, request.slowness);
      break;
    case Ask::kFinish:
      has_finished_[request.rank] = 1;
      engine_->finish(request.rank);
      break;
    case Ask::kExplain:
      port_->answer(request.rank, request.ticket,
                    engine_->explain(request.rank, request.ticket));
      break;
  }
}

void Live::known(int32_t rank, int64_t ticket, int64_t start_ns, int64_t end_ns) {
  port_->deliver(rank, ticket, start_ns, end_ns);
  const int64_t now = now_ns();
  ++stats_.num_releases;
  if (now > end_ns) {
    ++stats_.num_late;
    count(now - end_ns, &stats_.late_sum_ns, &stats_.late_max_ns, stats_.late_log2);
  }
  if (at_hand_ != nullptr && at_hand_->rank == rank && at_hand_->ticket == ticket) {
    ++stats_.num_answers;
    count(now - at_hand_->asked_ns, &stats_.answer_sum_ns, &stats_.answer_max_ns,
          stats_.answer_log2);
  }
}

// Also what is slow to find out: who has died, and whether anybody can go on.
bool Live::look_with_lock() {
  if (is_over_) {
    return false;
  }
  // First who waits, then whether there is something to do: what comes in between is seen.
  const bool is_circle = find_circle();
  if (step() || is_over_) {
    return true;
  }
  if (const std::string dead = port_->find_dead(); !dead.empty()) {
    close(CRYSTAL_REPLAY_DIED, "The process of an external rank has died. " + dead +
                                   ". Look at its log; the run cannot go on without it.");
    return true;
  }
  if (!is_circle) {
    return false;
  }
  if (engine_->lift_horizon()) {
    return true;
  }
  std::string text;
  for (const int32_t r : external_) {
    if (const int64_t ticket = port_->blocked_ticket(r); ticket >= 0 && !has_finished_[r]) {
      text = engine_->explain(r, ticket);
      break;
    }
  }
  close(CRYSTAL_REPLAY_DEADLOCK, "All external ranks wait, and nobody can go on. " + text +
                                     ". Look at the order of these calls.");
  return true;
}

// Every external rank has ended, or waits for a release before which it arrives at
// nothing: what is due next may happen ahead of its time.
bool Live::nobody_can_arrive() {
  return std::all_of(external_.begin(), external_.end(), [this](int32_t r) {
    return has_finished_[r] || port_->blocked_ticket(r) >= 0;
  });
}

bool Live::find_circle() {
  bool is_any = false;
  for (const int32_t r : external_) {
    if (!has_finished_[r]) {
      if (port_->blocked_ticket(r) < 0) {
        return false;
      }
      is_any = true;
    }
  }
  return is_any;
}

bool Live::settle(int64_t limit_ns) {
  for (const int64_t until = monotonic_ns() + limit_ns;;) {
    {
      const std::lock_guard guard(lock_);
      if (is_over_) {
        throw Failure(over_code_, over_text_);
      }
      if (!step() && !is_over_ && !engine_->is_ready() && port_->is_quiet()) {
        return true;
      }
    }
    if (monotonic_ns() > until) {
      return false;
    }
  }
}

crystal_live_stats Live::stats() {
  const std::lock_guard guard(lock_);
  return stats_;
}

} // namespace crystal::replay
