// Where the calls of external ranks come from and their releases go to. Shared
// memory (shared.h) is one kind; a socket to another host would be another, with
// an affine clock map at this seam.
#pragma once

#include <cstdint>
#include <ctime>
#include <string>

#include "replay/replay.h"

namespace crystal::replay {

// CLOCK_MONOTONIC, the clock that processes of one host share.
inline int64_t monotonic_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

enum class Ask : int32_t { kArrive, kMark, kFinish, kExplain, kSlowness };

struct Request {
  crystal_instruction call{};
  Ask ask = Ask::kArrive;
  int32_t rank = 0;
  int64_t ticket = 0;
  int64_t at_ns = 0;    // when the rank arrived, or its iteration ended
  int64_t asked_ns = 0; // when the request was made
  double slowness = 1.0;
};

class Port {
 public:
  virtual ~Port() = default;
  // The next request, false if there is none. A rank's come in the order in which it made them.
  virtual bool poll(Request* request) = 0;
  // Nothing to poll. The only call that any thread may make at any time.
  virtual bool is_quiet() const = 0;
  virtual void deliver(int32_t rank, int64_t ticket, int64_t start_ns, int64_t end_ns) = 0;
  // To kExplain.
  virtual void answer(int32_t rank, int64_t ticket, const std::string& text) = 0;
  // No request is taken any more, and all that wait are told why.
  virtual void close(int code, const std::string& text) = 0;
  // Says which rank's process is gone; empty if all are there.
  virtual std::string find_dead() = 0;
  // Makes no call before one of its open ones has ended; -1 or such an open call.
  virtual int64_t blocked_ticket(int32_t rank) const = 0;
};

} // namespace crystal::replay
