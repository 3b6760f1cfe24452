// What torch's CPU allocator gives out and gets back: as events of a capture, and
// in a ledger that may have a limit.
#pragma once

#include <functional>
#include <memory>

#include "core/ledger.h"
#include "core/release.h"
#include "core/world.h"

namespace crystal {

// From here on `world` hears of every allocation and deallocation of CPU tensors by
// the program, on every thread.
void watch_memory(std::shared_ptr<World> world);

// From here on there is a ledger of them. A request that passes `limit_bytes` (none
// if negative) ends in c10::OutOfMemoryError.
void keep_ledger(std::shared_ptr<World> world, int64_t limit_bytes);

// Null where none is kept.
Ledger* the_ledger();
// Whether anybody hears of allocations.
bool memory_is_watched();

// --- scopes of the calling thread

class ThreadScope {
 public:
  explicit ThreadScope(int& depth) : depth_(depth) { ++depth_; }
  ~ThreadScope() { --depth_; }
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  int& depth_;
};
// Memory that is taken meanwhile is ours, and nobody hears of it.
struct Unwatched : ThreadScope {
  Unwatched();
};
// Ends an Unwatched meanwhile.
class Watched {
 public:
  Watched();
  ~Watched();
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

 private:
  const int before_;
};
// Meanwhile the thread is in a communication call.
struct InCall : ThreadScope {
  InCall();
};
// Meanwhile the thread does what one of the communication library would do.
struct ByLibrary : ThreadScope {
  ByLibrary();
};
// The same as Unwatched, for callers without scopes.
void unwatch(bool begin);

// --- phases

// The thread begins an optimizer's step, or ends it. An exception out of a step
// leaves it begun; what the program does then with gradients on is not taken for it.
void in_optimizer(bool begin);
// Whether a block of the calling thread's last step is held and not recognised.
bool step_kept_memory();
// The model is called for the first time: what came before was no forward.
void forward_begins();

// --- ends

// Lets go of `held` when `end` is known and past: before the next allocation, so that
// no later one finds the memory taken. What becomes free by that is free since then.
void release_at_end(End end, std::shared_ptr<void> held);

// Called where it is known best what blocks are for: at the end of every backward,
// and when a request is refused.
void set_look(std::function<void()> look);

} // namespace crystal
