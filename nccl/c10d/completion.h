// When a call that a real backend carries was done.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <memory>

#include "core/clock.h"

namespace crystal {

// Stamped by the backend's own thread, whatever the program does meanwhile: who waits later
// learns only that it has ended. Messages of gloo's have no future and cannot be stamped so.
class Completion {
 public:
  explicit Completion(c10d::Work& work) : ns_(std::make_shared<std::atomic<int64_t>>(0)) {
    work.getFuture()->addCallback(
        [ns = ns_](c10::ivalue::Future&) { ns->store(now_ns()); }, /*uses_future=*/true);
  }

  // By the monotonic clock; 0 until it is done.
  int64_t ns() const { return ns_->load(); }

 private:
  std::shared_ptr<std::atomic<int64_t>> ns_;
};

} // namespace crystal
