#include "core/busy.h"

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace crystal {
namespace {

// Larger than a core's caches close to it, so that the moves displace what the program
// has there.
constexpr size_t kBufferBytes = 2 << 20;
// A move at a time; some microseconds.
constexpr size_t kMoveBytes = 32 << 10;

int64_t thread_cpu_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

class Busy {
 public:
  void take(int64_t cpu_ns) {
    const std::lock_guard lock(mutex_);
    owed_ns_ += cpu_ns;
    is_left_ = false;
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { serve(); }).detach(); // this outlives every thread
    }
    changed_.notify_one();
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    owed_ns_ = 0;
    is_left_ = true;
  }

 private:
  void serve() {
    std::vector<char> from(kBufferBytes, 1), to(kBufferBytes);
    size_t at = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return owed_ns_ > 0; });
      const int64_t owed_ns = owed_ns_;
      owed_ns_ = 0;
      lock.unlock();
      for (const int64_t until = thread_cpu_ns() + owed_ns; !is_left_ && thread_cpu_ns() < until;) {
        std::memcpy(to.data() + at, from.data() + at, kMoveBytes);
        at = (at + kMoveBytes) % kBufferBytes;
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t owed_ns_ = 0;
  std::atomic<bool> is_left_{false};
  bool has_thread_ = false;
};

std::atomic<Busy*> busy{nullptr};
std::mutex* busy_mutex = new std::mutex;

// The thread is not there in a forked child, and the mutexes may be held for ever.
void forget_in_child() {
  busy = nullptr;
  busy_mutex = new std::mutex;
}

} // namespace

void keep_core_busy(int64_t cpu_ns) {
  const std::lock_guard lock(*busy_mutex);
  if (busy == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);
    (void)registered;
    busy = new Busy;
  }
  busy.load()->take(cpu_ns);
}

void leave_core() {
  if (Busy* there = busy; there != nullptr) {
    there->leave();
  }
}

} // namespace crystal
