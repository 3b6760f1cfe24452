#include "core/follow.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "core/clock.h"

namespace crystal {
namespace {

// Between looks at those that are not the oldest: ends of one group come in their
// order, those of another may come before.
constexpr int64_t kLookNs = 500'000;

class Followed {
 public:
  void add(End end, std::function<void(std::exception_ptr)> action) {
    std::unique_lock lock(mutex_);
    if (stopped_) {
      lock.unlock();
      action(nullptr);
      return;
    }
    items_.push_back(std::make_shared<Item>(Item{std::move(end), std::move(action)}));
    ++num_due_;
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { serve(); }).detach(); // this outlives every thread
    }
    changed_.notify_one();
  }

  bool any() const { return num_due_ > 0; }

  void stop() {
    std::unique_lock lock(mutex_);
    stopped_ = true;
    changed_.notify_one();
    idle_.wait_for(lock, std::chrono::seconds(5), [this] { return !has_thread_; });
  }

 private:
  struct Item {
    End end;
    std::function<void(std::exception_ptr)> action;
  };

  struct Known {
    int64_t at_ns; // negative: not yet
    std::exception_ptr error;
  };

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopped_ || !items_.empty(); });
      const auto all = items_;
      const bool is_last = stopped_;
      lock.unlock();
      if (is_last) {
        for (const auto& item : all) {
          run(*item, now_ns(), nullptr);
        }
      }
      const auto finished = is_last ? all : settled(all);
      lock.lock();
      if (is_last) {
        items_.clear();
        has_thread_ = false;
        idle_.notify_all();
        return;
      }
      for (const auto& item : finished) {
        items_.remove(item);
      }
    }
  }

  // Those whose ends are known; their actions have been handed on, in the order of `all`.
  // The youngest is asked first: where its end is known, those of older calls of its group
  // are too by the time that they are asked, so that none is overtaken.
  std::list<std::shared_ptr<Item>> settled(const std::list<std::shared_ptr<Item>>& all) {
    std::list<std::pair<std::shared_ptr<Item>, Known>> found;
    for (auto item = all.rbegin(); item != all.rend(); ++item) {
      const Known known = ask((*item)->end, *item == all.front() ? kLookNs : 0);
      if (known.at_ns >= 0) {
        found.emplace_front(*item, known);
      }
    }
    std::list<std::shared_ptr<Item>> items;
    for (const auto& [item, known] : found) {
      run(*item, known.at_ns, known.error);
      items.push_back(item);
    }
    return items;
  }

  Known ask(End& end, int64_t limit_ns) {
    try {
      const int64_t at_ns = end.poll();
      if (at_ns >= 0 || limit_ns == 0) {
        return {at_ns, nullptr};
      }
      return {end.wait(limit_ns, false, nullptr), nullptr};
    } catch (...) {
      return {now_ns(), std::current_exception()};
    }
  }

  void run(Item& item, int64_t at_ns, std::exception_ptr error) {
    run_at_ns(at_ns, [this, action = std::move(item.action), error] {
      action(error);
      --num_due_;
    });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable idle_;
  std::list<std::shared_ptr<Item>> items_;
  std::atomic<int> num_due_{0};
  bool stopped_ = false;
  bool has_thread_ = false;
};

std::atomic<Followed*> followed{nullptr};

// The thread is not there in a forked child: it starts anew. The old object is left
// where it is, since its mutex may be held for ever.
void forget_in_child() { followed = nullptr; }

Followed& the_followed() {
  static std::mutex* mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  if (followed == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);
    (void)registered;
    followed = new Followed;
  }
  return *followed;
}

} // namespace

void run_at_end(End end, std::function<void(std::exception_ptr)> action) {
  the_followed().add(std::move(end), std::move(action));
}

bool actions_are_due() {
  const Followed* all = followed;
  return all != nullptr && all->any();
}

void stop_following() {
  if (Followed* all = followed; all != nullptr) {
    all->stop();
  }
}

} // namespace crystal
