// Ranks that are outside the engine: their calls arrive, everybody else's are
// computed as far as these allow.
#include <algorithm>
#include <set>

#include "replay/engine.h"

namespace crystal::replay {

void Engine::begin(int32_t num_iterations, const std::vector<int32_t>& external, int32_t ahead,
                   Listener* listener) {
  const auto invalid = [](const std::string& what, const std::string& where,
                          const std::string& action) {
    throw Failure(CRYSTAL_REPLAY_INVALID, what + ". " + where + ". " + action + ".");
  };
  check_classes();
  be_offline();
  if (external.empty() || num_iterations < 0 || ahead < 0) {
    invalid("A live run needs an external rank, and counts of 0 or more",
            std::to_string(external.size()) + " external ranks, " +
                std::to_string(num_iterations) + " iterations, " + std::to_string(ahead) + " ahead",
            "Name the ranks whose calls will arrive");
  }
  for (const int32_t r : external) {
    if (r < 0 || r >= static_cast<int32_t>(ranks_.size()) || ranks_[r].is_external ||
        programs_[ranks_[r].program].lanes.empty()) {
      be_offline();
      invalid("An external rank is not in the world, is named twice, or has no lane",
              "Rank " + std::to_string(r), "Name each once, with a program of one lane or more");
    }
    ranks_[r].is_external = true;
  }
  external_ = external;
  ahead_ = ahead;
  listener_ = listener;
  new_ticket_ = kNone;
  turn_ = kLiveTurn;
  reset(num_iterations);
  // Room for what is usually open, or its growth would fall into somebody's wait.
  instances_.resize(comms_.size() + 1);
  for (size_t i = 0; i < instances_.size(); ++i) {
    instances_[i].next = free_instance_;
    free_instance_ = static_cast<int32_t>(i);
  }
  set_horizon();
}

void Engine::be_offline() {
  for (auto& rank : ranks_) {
    rank.is_external = rank.has_finished = false;
  }
  external_.clear();
  listener_ = nullptr;
  turn_ = kTurn;
  horizon_ = kNoHorizon;
}

void Engine::arrive(int32_t r, const crystal_instruction& call, int64_t at_ns, int64_t ticket) {
  Rank& rank = ranks_.at(r);
  if (!rank.is_external || rank.has_finished || call.slot < 0 ||
      call.slot >= rank.num_connections || call.cls < 0 || call.cls >= durations_.size() ||
      call.ends > CRYSTAL_ENDS_AFTER_DATA || at_ns < 0) {
    throw Failure(CRYSTAL_REPLAY_INVALID,
                  "A call arrives that cannot be. Rank " + std::to_string(r) + ", call " +
                      std::to_string(call.call) + ", slot " + std::to_string(call.slot) + " of " +
                      std::to_string(rank.num_connections) + ", class " +
                      std::to_string(call.cls) + " of " + std::to_string(durations_.size()) +
                      ", time " + std::to_string(at_ns) +
                      " ns. Give a slot of the rank, a class that has a duration, and a time "
                      "from 0 on; arrive before the rank ends.");
  }
  if (free_ticket_ == kNone) {
    free_ticket_ = static_cast<int32_t>(tickets_.size());
    tickets_.emplace_back();
  }
  new_ticket_ = free_ticket_;
  Ticket& t = tickets_[new_ticket_];
  free_ticket_ = t.next;
  t = Ticket{};
  t.number = ticket;
  t.rank = r;
  t.call = call.call;
  // The first lane of an external rank, which never runs, stands where its calls arrive.
  const auto door = static_cast<int32_t>(rank.first_lane);
  lanes_[door].t = at_ns;
  const size_t num_events = events_.size();
  const Handle handle = post(door, call);
  if (events_.size() > num_events) {
    events_[num_events].lane = -1;
    events_[num_events].iteration = static_cast<int32_t>(marks_[r].size()) + 1;
  }
  release(handle.instance);
  new_ticket_ = kNone;
}

void Engine::hold(const Handle& handle) {
  Instance& instance = instances_[handle.instance];
  Ticket& ticket = tickets_[new_ticket_];
  ticket.handle = handle;
  ticket.next = instance.tickets;
  instance.tickets = new_ticket_;
  ++instance.refs;
  if (is_determined(handle)) {
    settle_tickets(handle.instance);
  }
}

void Engine::settle_tickets(int32_t index) {
  Instance& instance = instances_[index];
  int32_t* link = &instance.tickets;
  while (*link != kNone) {
    const int32_t at = *link;
    Ticket& ticket = tickets_[at];
    if (!is_determined(ticket.handle)) {
      link = &ticket.next;
      continue;
    }
    *link = ticket.next;
    ticket.next = free_ticket_;
    free_ticket_ = at;
    int64_t start = 0;
    const int64_t end = end_of(ticket.handle, &start);
    ticket.handle.instance = kNone;
    --instance.refs; // who arrives holds one
    listener_->known(ticket.rank, ticket.number, start, end);
  }
}

void Engine::mark(int32_t rank, int64_t at_ns) {
  marks_.at(rank).push_back(at_ns);
  parts_.at(rank).emplace_back();
  set_horizon();
}

void Engine::set_slowness(int32_t rank, double factor) {
  slowness_of_[rank] = factor;
  double sum = 0;
  for (const auto& [teller, told] : slowness_of_) {
    sum += told;
  }
  slowness_ = sum / static_cast<double>(slowness_of_.size());
}

void Engine::finish(int32_t rank) {
  ranks_.at(rank).has_finished = true;
  set_horizon();
}

void Engine::set_horizon() {
  int64_t slowest = kNoHorizon;
  for (const int32_t r : external_) {
    if (!ranks_[r].has_finished) {
      slowest = std::min(slowest, static_cast<int64_t>(marks_[r].size()));
    }
  }
  const auto wanted = static_cast<int32_t>(
      std::min(slowest + ahead_ + 1, static_cast<int64_t>(kNoHorizon)));
  if (horizon_ == kNoHorizon || wanted > horizon_) { // it may have been lifted beyond
    horizon_ = wanted;
    for (const int32_t lane : parked_) {
      put_last(lane);
    }
    parked_.clear();
  }
}

bool Engine::lift_horizon() {
  if (parked_.empty()) {
    return false;
  }
  ++horizon_;
  for (const int32_t lane : parked_) {
    put_last(lane);
  }
  parked_.clear();
  return true;
}

bool Engine::happen_until(int64_t at_ns) {
  if (is_ready() || agenda_.empty()) {
    return false;
  }
  for (const int32_t lane : parked_) { // what is held back may begin transfers, too
    at_ns = std::min(at_ns, lanes_[lane].t);
  }
  if (agenda_.top().at > at_ns) {
    return false;
  }
  happen();
  return true;
}

bool Engine::work(int num_lanes) {
  int done = 0;
  for (; done < num_lanes && is_ready(); ++done) {
    advance(take_next());
  }
  return done > 0;
}

} // namespace crystal::replay
