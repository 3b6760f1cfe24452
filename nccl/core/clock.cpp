#include "core/clock.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
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

// A sleeping thread is woken late: by its timer slack (50 us by default, 1 ns
// here), by the scheduler, and on a virtual machine by the host, from some 10 us
// on a quiet core to several 100 us. So a wait sleeps until shortly before its deadline
// and spins over the rest, which is as long as recent wakes were late.
constexpr int64_t kLeastSpinNs = 200'000;
constexpr int64_t kMostSpinNs = 2'000'000;
std::atomic<int64_t> spin_ns{300'000};

// Widens the spin at once when a wake came too late, narrows it slowly.
void learn_from_wake(int64_t late_ns) {
  const int64_t wanted = std::clamp(late_ns + late_ns / 2, kLeastSpinNs, kMostSpinNs);
  const int64_t held = spin_ns.load(std::memory_order_relaxed);
  spin_ns.store(
      wanted > held ? wanted : held - (held - wanted) / 256, std::memory_order_relaxed);
}

void sleep_until_ns(int64_t deadline_ns) {
  thread_local const bool precise = prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0) == 0;
  (void)precise;
  timespec when{deadline_ns / 1'000'000'000, deadline_ns % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, nullptr) == EINTR) {
  }
}

// So long may an action run before the next does not wait for it any more. A thread that
// wants the interpreter gets it within about 5 ms (sys.getswitchinterval).
constexpr int64_t kTurnNs = 5'000'000;

// Actions are callbacks of the program, which may wait for other actions. So a
// worker that runs one first makes sure that another watches the deadlines. They take
// turns all the same: two that begin at once would meet at the interpreter's lock, which
// keeps no order, and the calls that they make would come in another order in each run.
class Timer {
 public:
  void add(int64_t deadline_ns, std::function<void()> action, bool takes_turn) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!stopped_) {
        pending_.emplace(deadline_ns, Pending{std::move(action), takes_turn});
        if (watching_ == 0) {
          start_worker();
        }
        changed_.notify_one();
        return;
      }
    }
    wait_until_ns(deadline_ns); // the interpreter is ending: nobody else can run it
    action();
  }

  // Runs what is pending now, at once, and waits for what is running, at most
  // `limit`. Workers end; later actions run where they are added.
  void stop(std::chrono::seconds limit) {
    std::multimap<int64_t, Pending> rest;
    std::unique_lock<std::mutex> lock(mutex_);
    stopped_ = true;
    rest.swap(pending_);
    changed_.notify_all();
    lock.unlock();
    for (auto& entry : rest) {
      entry.second.action();
    }
    rest.clear();
    lock.lock();
    idle_.wait_for(lock, limit, [this] { return running_ == 0; });
  }

 private:
  struct Pending {
    std::function<void()> action;
    bool takes_turn;
  };

  void start_worker() { // the lock is held
    ++watching_;
    std::thread([this] { work(); }).detach(); // the timer outlives every thread
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_ && watching_ == 1) { // one watches; who comes back second ends
      if (pending_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const int64_t deadline = pending_.begin()->first;
      const int64_t left = deadline - now_ns();
      const int64_t spin = spin_ns.load(std::memory_order_relaxed);
      if (left > spin) {
        // An earlier action may come in meanwhile, so wait where it can wake us.
        changed_.wait_for(lock, std::chrono::nanoseconds(left - spin));
        continue;
      }
      const bool takes_turn = pending_.begin()->second.takes_turn;
      if (takes_turn && turn_ != 0 && turn_until_ns_ > now_ns()) {
        changed_.wait_for(lock, std::chrono::nanoseconds(turn_until_ns_ - now_ns()));
        continue;
      }
      auto action = std::move(pending_.begin()->second.action);
      pending_.erase(pending_.begin());
      int64_t turn = 0;
      if (takes_turn) {
        turn = turn_ = ++latest_turn_;
        turn_until_ns_ = std::max(deadline, now_ns()) + kTurnNs;
      }
      --watching_;
      ++running_;
      start_worker();
      lock.unlock();
      wait_until_ns(deadline);
      action();
      action = nullptr; // what it holds may need the interpreter, which others hold while they add
      lock.lock();
      --running_;
      if (takes_turn && turn_ == turn) {
        turn_ = 0;
        changed_.notify_all();
      }
      idle_.notify_all();
      ++watching_;
    }
    --watching_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable idle_;
  std::multimap<int64_t, Pending> pending_;
  int watching_ = 0; // workers that wait for a deadline
  int running_ = 0; // workers in an action
  int64_t latest_turn_ = 0; // turns are counted from 1
  int64_t turn_ = 0; // whose action runs; 0 if it has ended
  int64_t turn_until_ns_ = 0;
  bool stopped_ = false;
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
  const int64_t wake_ns = deadline_ns - spin_ns.load(std::memory_order_relaxed);
  if (now_ns() < wake_ns) {
    sleep_until_ns(wake_ns);
    learn_from_wake(now_ns() - wake_ns);
  }
  while (now_ns() < deadline_ns) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

void run_at_ns(int64_t deadline_ns, std::function<void()> action) {
  the_timer().add(deadline_ns, std::move(action), true);
}

void run_aside(std::function<void()> action) {
  the_timer().add(0, std::move(action), false); // before those that wait for their turn
}

void stop_timer() {
  if (timer != nullptr) {
    timer->stop(std::chrono::seconds(5));
  }
}

} // namespace crystal
