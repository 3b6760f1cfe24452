// What can be wrong, and what a call waits for, in words.
#include <algorithm>
#include <set>
#include <string>

#include "replay/engine.h"

namespace crystal::replay {

void Engine::report_mismatch(const Instance& instance, int32_t lane,
                             const crystal_instruction& i) const {
  throw Failure(
      CRYSTAL_REPLAY_MISMATCH,
      "Two ranks make calls that do not fit together. Rank " +
          std::to_string(lanes_[instance.first_lane].rank) + " in call " +
          std::to_string(instance.first_call) + " and rank " +
          std::to_string(lanes_[lane].rank) + " in call " + std::to_string(i.call) +
          ", communicator " + std::to_string(instance.comm) + ", sequence number " +
          std::to_string(instance.seq) + ". Capture the job again; matching names the difference.");
}

void Engine::report_left_over(const Instance& instance) const {
  const std::string missing =
      "rank " + std::to_string(missing_ranks(instance).front()) + " has ended without it";
  throw Failure(CRYSTAL_REPLAY_DEADLOCK,
                "A communication has no counterpart. Rank " +
                    std::to_string(lanes_[instance.first_lane].rank) + " in call " +
                    std::to_string(instance.first_call) + ", communicator " +
                    std::to_string(instance.comm) + ", sequence number " +
                    std::to_string(instance.seq) + "; " + missing +
                    ". Look at the calls of both.");
}

std::string Engine::describe(int32_t index) const {
  const Lane& lane = lanes_[index];
  std::string text = "rank " + std::to_string(lane.rank) + " (lane " +
      std::to_string(index - ranks_[lane.rank].first_lane) + ", iteration " +
      std::to_string(lane.iteration) + ")";
  if (lane.waits_in_channel) {
    return text + " waits for another of its lanes";
  }
  const Instance& instance = instances_[lane.waits_for.instance];
  return text + " in call " + std::to_string(lane.at->call) + ", communicator " +
      std::to_string(instance.comm) + ", sequence number " + std::to_string(instance.seq);
}

int32_t Engine::who_is_missing(int32_t index) const {
  const Lane& lane = lanes_[index];
  const auto other_lane = [&](int32_t rank) -> int32_t {
    const Rank& r = ranks_[rank];
    for (size_t l = 0; l < programs_[r.program].lanes.size(); ++l) {
      const auto candidate = static_cast<int32_t>(r.first_lane + static_cast<int64_t>(l));
      if (candidate != index && !lanes_[candidate].is_done) {
        return candidate;
      }
    }
    return kNone;
  };
  if (lane.waits_in_channel) {
    return other_lane(lane.rank);
  }
  int32_t absent = kNone;
  for (const int32_t rank : missing_ranks(instances_[lane.waits_for.instance])) {
    const int32_t found = other_lane(rank);
    if (found != kNone) {
      return found;
    }
    absent = rank;
  }
  return absent == kNone ? kNone : -2 - absent;
}

void Engine::report_deadlock() const {
  int32_t at = 0;
  while (lanes_[at].is_done) {
    ++at;
  }
  std::vector<int32_t> path;
  std::set<int32_t> seen;
  while (at >= 0 && seen.insert(at).second) {
    path.push_back(at);
    at = who_is_missing(at);
  }
  std::string text;
  if (at >= 0) { // from where the circle closes
    const auto first = std::find(path.begin(), path.end(), at);
    for (auto lane = first; lane != path.end(); ++lane) {
      text += describe(*lane) + ", waits for ";
    }
    text += "rank " + std::to_string(lanes_[at].rank);
    throw Failure(CRYSTAL_REPLAY_DEADLOCK, "Ranks wait for each other in a circle. " + text +
                                               ". Look at the order of these calls.");
  }
  text = describe(path.back());
  if (at < kNone) {
    text += ", which rank " + std::to_string(-2 - at) + " has ended without making";
  }
  throw Failure(CRYSTAL_REPLAY_DEADLOCK, "A rank waits for a call that another one never makes. " +
                                             text + ". Look at the calls of both.");
}

std::vector<int32_t> Engine::missing_ranks(const Instance& instance) const {
  std::vector<int32_t> missing;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const auto first = connections_.begin() + ranks_[r].first_connection;
    if (std::any_of(first, first + ranks_[r].num_connections, [&](const Connection& c) {
          return c.comm == instance.comm && c.seq <= instance.seq;
        })) {
      missing.push_back(static_cast<int32_t>(r));
    }
  }
  return missing;
}

std::string Engine::explain(int32_t rank, int64_t ticket) const {
  const auto found = std::find_if(tickets_.begin(), tickets_.end(), [&](const Ticket& t) {
    return t.handle.instance != kNone && t.rank == rank && t.number == ticket;
  });
  if (found == tickets_.end()) {
    return "Rank " + std::to_string(rank) + ": its call waits for nothing";
  }
  int32_t at = found->handle.instance;
  std::string text = "Rank " + std::to_string(rank) + " in call " + std::to_string(found->call) +
      ", communicator " + std::to_string(instances_[at].comm) + ", sequence number " +
      std::to_string(instances_[at].seq);
  std::set<int32_t> seen;
  for (;;) {
    if (instances_[at].is_complete && instances_[at].is_shared) {
      return text + ", whose transfer shares a link: its end is not known before its time";
    }
    const std::vector<int32_t> missing = missing_ranks(instances_[at]);
    if (missing.empty()) {
      return text + ", whose root never comes";
    }
    const int32_t r = missing.front();
    const std::string name = "rank " + std::to_string(r);
    if (ranks_[r].is_external) {
      return text + ", waits for external " + name +
          (ranks_[r].has_finished ? ", which has ended without making it"
                                  : ", which has not made this call");
    }
    if (!seen.insert(r).second) {
      return text + ", waits for " + name + ", which closes a circle";
    }
    // The lane that waits for a call says more than one that waits for that lane.
    int32_t lane = kNone;
    const auto num_lanes = static_cast<int32_t>(programs_[ranks_[r].program].lanes.size());
    for (int32_t l = 0; l < num_lanes; ++l) {
      const auto candidate = static_cast<int32_t>(ranks_[r].first_lane) + l;
      if (!lanes_[candidate].is_done &&
          (lane == kNone || lanes_[candidate].waits_for.instance != kNone)) {
        lane = candidate;
      }
    }
    if (lane == kNone) {
      return text + ", waits for " + name + ", which has ended without making it";
    }
    if (std::find(parked_.begin(), parked_.end(), lane) != parked_.end()) {
      return text + ", waits for " + name + ", which is " + std::to_string(ahead_) +
          " iterations ahead of the slowest external rank";
    }
    at = lanes_[lane].waits_for.instance;
    if (at == kNone) {
      return text + ", waits for " + name +
          (lanes_[lane].waits_in_channel ? ", which waits for another of its lanes"
                                         : ", which is being computed");
    }
    text += ", waits for " + describe(lane);
  }
}

} // namespace crystal::replay
