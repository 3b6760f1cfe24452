// What happened on a rank's host threads, as a sequence of events: the calls,
// the waits for them, and the computation between.
#pragma once

#include <cstdint>
#include <vector>

#include "core/world.h"

namespace crystal {

struct Event {
  const char* kind = ""; // COMP, COMM_COLL, COMM_SEND, COMM_RECV, WAIT, ALLOC, FREE
  int64_t lane = 0;
  int64_t mark = 0;
  int64_t call = -1;
  int64_t after = -1; // for a WAIT: index of the event whose end it waits for
  int64_t start_ns = 0;
  int64_t duration_ns = 0;
  int64_t bytes = 0; // of ALLOC and FREE
};

// In the order in which they began; ALLOC and FREE, which take no time, after the
// COMP that they lie in. Between two events of a lane lies a COMP,
// however short, so that the sequence depends on the program alone; an
// iteration mark divides it. The first lane computes from `happened.begin_ns` to
// `end_ns`, the others from their first event to their last.
std::vector<Event> events_of(const World::Events& happened, int64_t end_ns);

} // namespace crystal
