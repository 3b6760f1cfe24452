// Transfers that share a link: the one place where what comes later changes an end.
#include <algorithm>
#include <set>

#include "replay/engine.h"

namespace crystal::replay {

void Engine::happen() {
  const Happening now = agenda_.top();
  agenda_.pop();
  happened_ns_ = now.at;
  Instance& instance = instances_[now.instance];
  const int32_t link_class = link_classes_[now.comm];
  if (now.is_start) {
    instance.planned_end = now.at + instance.transfer;
    instance.divisor = 1;
    for (const int32_t rank : instance.ranks) {
      under_way(rank, link_class).push_back(now.instance);
    }
    share_again(instance.ranks, link_class, now.at);
    agenda_.push({instance.planned_end, false, now.comm, now.seq, now.instance});
    return;
  }
  // Entries whose transfer has been replanned since are out of date.
  if (instance.comm != now.comm || instance.seq != now.seq || instance.settled_end >= 0 ||
      instance.planned_end != now.at) {
    return;
  }
  for (const int32_t rank : instance.ranks) {
    auto& list = under_way(rank, link_class);
    list.erase(std::find(list.begin(), list.end(), now.instance));
  }
  instance.settled_end = now.at;
  share_again(instance.ranks, link_class, now.at);
  settle_tickets(now.instance);
  settle_notes(now.instance);
  wake(&instance.wait_for_all, now.instance);
  release(now.instance);
}

void Engine::share_again(const std::vector<int32_t>& ranks, int32_t link_class, int64_t at) {
  std::set<int32_t> touched;
  for (const int32_t rank : ranks) {
    const auto& list = under_way(rank, link_class);
    touched.insert(list.begin(), list.end());
  }
  for (const int32_t index : touched) {
    Instance& instance = instances_[index];
    size_t busiest = 1;
    for (const int32_t rank : instance.ranks) {
      busiest = std::max(busiest, under_way(rank, link_class).size());
    }
    const auto divisor = static_cast<int32_t>(busiest);
    if (divisor != instance.divisor) { // what is left takes so much longer, rounded up
      const auto left = static_cast<__int128>(instance.planned_end - at) * divisor;
      instance.planned_end =
          at + static_cast<int64_t>((left + instance.divisor - 1) / instance.divisor);
      instance.divisor = divisor;
      agenda_.push({instance.planned_end, false, instance.comm, instance.seq, index});
    }
  }
}

} // namespace crystal::replay
