#include "sandbox/live_rule.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

#include "core/call_record.h"
#include "core/clock.h"

namespace crystal {
namespace {

// The library keeps 1024 tickets of a rank.
constexpr size_t kRecent = 512;
// Iterations by which a rank's slowness is told: one that something held up is not followed.
constexpr size_t kRemembered = 3;

// The second of the message's three sentences: what the call waits for.
std::string reason_in(const std::string& message) {
  const size_t begin = message.find(". ");
  const size_t end = message.rfind(". ");
  return begin == std::string::npos || end <= begin
      ? message
      : message.substr(begin + 2, end - begin - 2);
}

// By ordinal of the captured call; 0 where there is none.
int64_t of_call(const std::vector<int64_t>& times, const CallRecord& record) {
  const int64_t call = record.captured_call;
  return call >= 0 && call < static_cast<int64_t>(times.size()) ? times[call] : 0;
}

} // namespace

ReplayLibrary::ReplayLibrary(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); // stays to the end of the process
  if (library == nullptr) {
    throw std::runtime_error("The replay library cannot be loaded. File " + path + ": " +
                             dlerror() + ". Build it with python -m crystalllm build.");
  }
  const auto find = [&](auto& function, const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) {
      throw std::runtime_error(std::string("The replay library lacks a function. File ") + path +
                               ", " + name + ". Build it with python -m crystalllm build.");
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  find(message, "crystal_live_message");
  find(attach, "crystal_client_attach");
  find(detach, "crystal_client_detach");
  find(now, "crystal_client_now");
  find(arrive, "crystal_client_arrive");
  find(mark, "crystal_client_mark");
  find(slowness, "crystal_client_slowness");
  find(wait, "crystal_client_wait");
  find(watch, "crystal_client_watch");
}

// Releases may outlive the rule, so they share this with it.
class LiveRule::Connection {
 public:
  Connection(const std::string& path, const std::string& address, int32_t rank,
             int32_t num_threads)
      : library_(path), client_(library_.attach(address.c_str(), rank, num_threads)) {
    if (client_ == nullptr) {
      throw std::runtime_error(library_.message());
    }
  }
  ~Connection() { close(); }

  // Waits for those that are in a call.
  void close() {
    const std::unique_lock lock(mutex_);
    if (client_ != nullptr) {
      library_.detach(client_);
      client_ = nullptr;
    }
  }

  // `call` with library and client. Once closed, `otherwise`.
  template <class Result, class Function>
  Result with(Result otherwise, Function call) const {
    const std::shared_lock lock(mutex_);
    return client_ != nullptr ? call(library_, client_) : otherwise;
  }

 private:
  const ReplayLibrary library_;
  crystal_client* client_;
  mutable std::shared_mutex mutex_;
};

class LiveRule::LiveRelease final : public Release {
 public:
  LiveRelease(std::shared_ptr<Connection> connection, int64_t ticket, int64_t epoch_ns,
              int64_t limit_ns)
      : connection_(std::move(connection)), ticket_(ticket), epoch_ns_(epoch_ns),
        limit_ns_(limit_ns) {}

  bool poll() override { return is_known_ || ask(0, true, nullptr); }
  bool wait(int64_t limit_ns, bool makes_calls, std::string* reason) override {
    return is_known_ || ask(std::min(limit_ns, limit_ns_), makes_calls, reason);
  }
  int64_t start_ns() const override { return start_ns_; }
  int64_t end_ns() const override { return end_ns_; }

 private:
  bool ask(int64_t limit_ns, bool makes_calls, std::string* reason) {
    return connection_->with(false, [&](const ReplayLibrary& library, crystal_client* client) {
      crystal_release release;
      const auto function = makes_calls ? library.wait : library.watch;
      const int code = function(client, ticket_, limit_ns, &release);
      if (code == CRYSTAL_REPLAY_TIMEOUT) {
        if (reason != nullptr) {
          *reason = reason_in(library.message());
        }
        return false;
      }
      if (code != 0) {
        throw std::runtime_error(library.message());
      }
      start_ns_ = epoch_ns_ + release.start_ns;
      end_ns_ = epoch_ns_ + release.end_ns;
      is_known_ = true;
      return true;
    });
  }

  const std::shared_ptr<Connection> connection_;
  const int64_t ticket_;
  const int64_t epoch_ns_;
  const int64_t limit_ns_;
  std::atomic<int64_t> start_ns_{-1};
  std::atomic<int64_t> end_ns_{-1};
  std::atomic<bool> is_known_{false};
};

LiveRule::LiveRule(Options options)
    : options_(std::move(options)),
      connection_(std::make_shared<Connection>(
          options_.library, options_.address, options_.rank, options_.num_threads)) {
  // The closest of some readings of both clocks.
  int64_t least_ns = INT64_MAX;
  for (int i = 0; i < 16; ++i) {
    const int64_t before = now_ns();
    const int64_t run_ns = connection_->with(
        int64_t{0}, [](const ReplayLibrary& library, crystal_client* c) { return library.now(c); });
    const int64_t after = now_ns();
    if (after - before < least_ns) {
      least_ns = after - before;
      epoch_ns_ = before + (after - before) / 2 - run_ns;
    }
  }
}

std::shared_ptr<Release> LiveRule::arrive(const CallRecord& record, const Group&) {
  if (record.captured_call < 0 ||
      record.captured_call >= static_cast<int64_t>(options_.instructions.size())) {
    throw std::logic_error("A call is not part of the trace. Rank " +
                           std::to_string(options_.rank) + ", call " +
                           std::to_string(record.call) + ". Follow the trace of the rank's role.");
  }
  const auto& instruction = options_.instructions[record.captured_call];
  const int64_t at_ns = std::max<int64_t>(record.arrival_ns - epoch_ns_, 0);
  const int64_t ticket = connection_->with(
      int64_t{CRYSTAL_REPLAY_CLOSED}, [&](const ReplayLibrary& library, crystal_client* client) {
        const int64_t given = library.arrive(client, &instruction, at_ns);
        if (given < 0) {
          throw std::runtime_error(library.message());
        }
        return given;
      });
  if (ticket < 0) {
    throw std::runtime_error("A call came after the rank's end. Rank " +
                             std::to_string(options_.rank) + ", call " +
                             std::to_string(record.call) + ". Make it before the program ends.");
  }
  auto release =
      std::make_shared<LiveRelease>(connection_, ticket, epoch_ns_, options_.limit_ns);
  recent_.push_back(release);
  while (recent_.size() > kRecent) {
    // Whoever asks for it later finds it known.
    if (const auto old = recent_.front().lock(); old && !old->poll()) {
      std::string reason;
      if (!old->wait(options_.limit_ns, true, &reason)) {
        throw std::runtime_error("A call is not released within its limit. " + reason +
                                 ". Look at the rank that is named last.");
      }
    }
    recent_.pop_front();
  }
  return release;
}

void LiveRule::marked(int64_t marks, int64_t at_ns, int64_t computed_ns) {
  // Once one mark is not known, neither is its iteration.
  computed_ns_ = computed_ns < 0 || computed_ns_ < 0 ? -1 : computed_ns_ + computed_ns;
  const int64_t after = marks - options_.first_mark;
  if (after < 0 || (after == 0 && options_.first_mark == 0) || after % options_.period != 0) {
    return;
  }
  // Before the mark: peers may begin their next iteration with it.
  if (after > 0 && computed_ns_ > 0 && options_.body_ns > 0) {
    tell_slowness(computed_ns_);
  }
  connection_->with(0, [&](const ReplayLibrary& library, crystal_client* client) {
    if (library.mark(client, std::max<int64_t>(at_ns - epoch_ns_, 0)) != 0) {
      throw std::runtime_error(library.message());
    }
    return 0;
  });
  computed_ns_ = 0;
}

void LiveRule::tell_slowness(int64_t computed_ns) {
  slownesses_.push_back(static_cast<double>(computed_ns) / static_cast<double>(options_.body_ns));
  if (slownesses_.size() > kRemembered) {
    slownesses_.pop_front();
  }
  std::vector<double> sorted(slownesses_.begin(), slownesses_.end());
  std::sort(sorted.begin(), sorted.end());
  connection_->with(0, [&](const ReplayLibrary& library, crystal_client* client) {
    if (library.slowness(client, sorted[sorted.size() / 2]) != 0) {
      throw std::runtime_error(library.message());
    }
    return 0;
  });
}

int64_t LiveRule::cpu_ns(const CallRecord& record) const {
  return of_call(options_.cpu_ns, record);
}

int64_t LiveRule::call_ns(const CallRecord& record) const {
  return of_call(options_.call_ns, record);
}

void LiveRule::close() { connection_->close(); }

} // namespace crystal
