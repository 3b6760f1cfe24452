#include "core/events.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace crystal {
namespace {

const char* kind_of(const CallRecord& call) {
  switch (call.kind) {
    case Kind::send: return "COMM_SEND";
    case Kind::recv: return "COMM_RECV";
    default: return "COMM_COLL";
  }
}

class Sequence {
 public:
  explicit Sequence(int64_t begin_ns) { free_at_[0] = begin_ns; }

  // The lane computed until `at_ns`; nothing is known before its first event.
  void compute_until(int64_t lane, int64_t mark, int64_t at_ns) {
    const auto free = free_at_.find(lane);
    if (free != free_at_.end()) {
      const int64_t start = std::min(free->second, at_ns);
      events_.push_back(Event{"COMP", lane, mark, -1, -1, start, at_ns - start});
    }
    free_at_[lane] = at_ns;
    auto& waiting = waiting_[lane];
    events_.insert(events_.end(), waiting.begin(), waiting.end());
    waiting.clear();
  }
  int64_t add(Event event, int64_t free_at_ns) {
    compute_until(event.lane, event.mark, event.start_ns);
    free_at_[event.lane] = free_at_ns;
    events_.push_back(event);
    return static_cast<int64_t>(events_.size()) - 1;
  }
  // Kept until the computation that it lies in has its place.
  void allocate(const Allocation& a) {
    const char* kind = a.bytes > 0 ? "ALLOC" : "FREE";
    waiting_[a.lane].push_back(
        Event{kind, a.lane, a.mark, -1, -1, a.at_ns, 0, a.bytes > 0 ? a.bytes : -a.bytes});
  }
  std::vector<Event> take() { return std::move(events_); }

 private:
  std::vector<Event> events_;
  std::map<int64_t, int64_t> free_at_;
  std::map<int64_t, std::vector<Event>> waiting_;
};

} // namespace

std::vector<Event> events_of(const World::Events& happened, int64_t end_ns) {
  // By ordinal: each of the lists is sorted, and together they have all.
  size_t call = 0, wait = 0, mark = 0, allocation = 0;
  int64_t marks = 0;
  std::unordered_map<int64_t, int64_t> event_of_call;
  Sequence sequence(happened.begin_ns);
  const auto next = [](const auto& list, size_t at) {
    return at < list.size() ? list[at].event : INT64_MAX;
  };
  for (;;) {
    const int64_t of_call = next(happened.calls, call);
    const int64_t of_wait = next(happened.waits, wait);
    const int64_t of_mark = next(happened.marks, mark);
    const int64_t of_allocation = next(happened.allocations, allocation);
    const int64_t first = std::min({of_call, of_wait, of_mark, of_allocation});
    if (first == INT64_MAX) {
      break;
    }
    if (first == of_call) {
      const auto& c = happened.calls[call++];
      const bool is_known = c.release && c.release->poll();
      const int64_t duration_ns = is_known ? c.release->end_ns() - c.arrival_ns : 0;
      event_of_call[c.call] = sequence.add(
          Event{kind_of(c), c.stream, c.position.mark, c.call, -1, c.arrival_ns,
                std::max<int64_t>(0, duration_ns)},
          c.returned_ns);
    } else if (first == of_wait) {
      const auto& w = happened.waits[wait++];
      const auto waited_for = event_of_call.find(w.call);
      sequence.add(
          Event{"WAIT", w.lane, w.mark, w.call,
                waited_for == event_of_call.end() ? -1 : waited_for->second, w.begin_ns,
                w.end_ns - w.begin_ns},
          w.end_ns);
    } else if (first == of_allocation) {
      sequence.allocate(happened.allocations[allocation++]);
    } else {
      const auto& m = happened.marks[mark++];
      sequence.compute_until(m.lane, marks++, m.at_ns);
    }
  }
  sequence.compute_until(0, happened.num_marks, end_ns);
  return sequence.take();
}

} // namespace crystal
