#include "core/clock.h"

#include <cerrno>
#include <condition_variable>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <sys/prctl.h>
#include <thread>

namespace crystal {
namespace {

// A sleeping thread is woken up to its timer slack late, 50 us by default;
// with a slack of 1 ns what is left is the scheduler, some 10 us on a quiet
// core. Spinning over the last 100 us absorbs that at little cost.
constexpr int64_t kSpinNs = 100'000;

void sleep_until_ns(int64_t deadline_ns) {
  thread_local const bool precise = prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0) == 0;
  (void)precise;
  timespec when{deadline_ns / 1'000'000'000, deadline_ns % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, nullptr) == EINTR) {
  }
}

class Timer {
 public:
  void add(int64_t deadline_ns, std::function<void()> action) {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.emplace(deadline_ns, std::move(action));
    if (!thread_.joinable()) {
      stopping_ = false;
      thread_ = std::thread([this] { loop(); });
    }
    changed_.notify_one();
  }

  void stop() {
    std::thread thread;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      thread = std::move(thread_);
      changed_.notify_one();
    }
    if (thread.joinable()) {
      thread.join();
    }
  }

 private:
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (pending_.empty()) {
        if (stopping_) {
          return;
        }
        changed_.wait(lock);
        continue;
      }
      const int64_t deadline = pending_.begin()->first;
      const int64_t left = deadline - now_ns();
      if (!stopping_ && left > kSpinNs) {
        // An earlier action may come in meanwhile, so wait where it can wake us.
        changed_.wait_for(lock, std::chrono::nanoseconds(left - kSpinNs));
        continue;
      }
      auto action = std::move(pending_.begin()->second);
      pending_.erase(pending_.begin());
      lock.unlock();
      if (!stopping_) {
        wait_until_ns(deadline);
      }
      action();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<int64_t, std::function<void()>> pending_;
  std::thread thread_;
  bool stopping_ = false;
};

Timer* timer = nullptr;
std::once_flag* timer_once = new std::once_flag;

// A forked child has the parent's timer without its thread: it starts anew.
// The old one is left where it is, since its mutex may be held for ever.
void forget_timer_in_child() {
  timer = nullptr;
  timer_once = new std::once_flag;
}

Timer& the_timer() {
  std::call_once(*timer_once, [] {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_timer_in_child);
    (void)registered;
    timer = new Timer; // outlives every static destructor that might wait on it
  });
  return *timer;
}

} // namespace

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void wait_until_ns(int64_t deadline_ns) {
  if (deadline_ns - now_ns() > kSpinNs) {
    sleep_until_ns(deadline_ns - kSpinNs);
  }
  while (now_ns() < deadline_ns) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

void run_at_ns(int64_t deadline_ns, std::function<void()> action) {
  the_timer().add(deadline_ns, std::move(action));
}

void stop_timer() {
  if (timer != nullptr) {
    timer->stop();
  }
}

} // namespace crystal
