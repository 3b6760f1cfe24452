#include "replay/engine.h"

#include <algorithm>

namespace crystal::replay {

int64_t Engine::perturbed(const Lane& lane, int32_t index, int64_t ns) {
  const bool is_first_lane = index == ranks_[lane.rank].first_lane;
  int64_t pauses = 0;
  for (size_t i = 0; i < perturbations_.size(); ++i) {
    const auto& p = perturbations_[i];
    if (p.rank != lane.rank) {
      continue;
    }
    const int32_t since = lane.iteration - p.first;
    const bool in_iteration = lane.iteration >= 1 && lane.iteration <= num_iterations_ &&
        since >= 0 && (p.every == 0 || since % p.every == 0);
    if (p.kind == CRYSTAL_SLOW) {
      ns = in_iteration ? scaled(ns, p.factor) : ns;
    } else if (p.kind == CRYSTAL_PAUSE_IN && is_first_lane && in_iteration &&
               used_in_[i] != lane.iteration) {
      used_in_[i] = lane.iteration;
      pauses += p.pause_ns;
    }
  }
  for (size_t i = 0; i < perturbations_.size(); ++i) {
    const auto& p = perturbations_[i];
    if (p.rank == lane.rank && p.kind == CRYSTAL_PAUSE_AT && is_first_lane && !is_used_[i] &&
        lane.t + ns + pauses > p.at_ns) {
      is_used_[i] = 1;
      pauses += p.pause_ns;
    }
  }
  return ns + pauses;
}

void Engine::reset(int32_t num_iterations) {
  is_used_.assign(perturbations_.size(), 0);
  used_in_.assign(perturbations_.size(), 0);
  moments_.clear();
  if (traced_ > 0) {
    moments_.resize(lanes_.size());
    for (const auto& rank : ranks_) {
      const auto& shapes = programs_[rank.program].lanes;
      for (size_t l = 0; l < shapes.size(); ++l) {
        moments_[rank.first_lane + l].resize(shapes[l].body);
      }
    }
  }
  num_iterations_ = num_iterations;
  num_participations_ = 0;
  under_way_.assign(ranks_.size() * static_cast<size_t>(num_link_classes_), {});
  agenda_ = {};
  happened_ns_ = 0;
  instances_.clear();
  free_instance_ = kNone;
  notes_.clear();
  events_.clear();
  marks_.assign(ranks_.size(), {});
  parts_.assign(ranks_.size(), {});
  for (auto& c : connections_) {
    c.seq = 0;
  }
  for (auto& c : comms_) {
    c.first = c.last = kNone;
  }
  std::fill(handles_.begin(), handles_.end(), Handle{});
  for (auto& c : channels_) {
    c.signals.clear();
    c.taken = 0;
    c.waiter = kNone;
  }
  queue_.assign(lanes_.size() + 1, 0);
  queue_begin_ = queue_size_ = 0;
  woken_.clear();
  soonest_.clear();
  parked_.clear();
  tickets_.clear();
  free_ticket_ = kNone;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const Program& program = programs_[ranks_[r].program];
    for (size_t l = 0; l < program.lanes.size(); ++l) {
      const int64_t index = ranks_[r].first_lane + static_cast<int64_t>(l);
      Lane& lane = lanes_[index];
      lane = Lane{};
      lane.rank = static_cast<int32_t>(r);
      lane.at = program.instructions.data() + program.lanes[l].begin;
      lane.section_end = lane.at + program.lanes[l].prologue;
      if (!ranks_[r].is_external) {
        put_last(static_cast<int32_t>(index));
      }
    }
  }
}

// --- running ----------------------------------------------------------------------

void Engine::put_last(int32_t lane) {
  if (is_live()) {
    soonest_.push(lanes_, lane);
    return;
  }
  size_t at = queue_begin_ + queue_size_++;
  if (at >= queue_.size()) {
    at -= queue_.size();
  }
  queue_[at] = lane;
}

// Who has just been woken goes on first: its group is still in the cache. In a live
// run it is whom an arrival has woken, for the same rank may call again soon, and then
// whoever is needed soonest.
void Engine::wake_lane(int32_t lane) {
  if (is_live() && new_ticket_ == kNone) {
    soonest_.push(lanes_, lane);
  } else {
    woken_.push_back(lane);
  }
}

int32_t Engine::take_next() {
  if (!woken_.empty()) {
    const int32_t lane = woken_.back();
    woken_.pop_back();
    return lane;
  }
  if (is_live()) {
    return soonest_.pop(lanes_);
  }
  const int32_t lane = queue_[queue_begin_];
  if (++queue_begin_ == queue_.size()) {
    queue_begin_ = 0;
  }
  --queue_size_;
  return lane;
}

void Engine::check_classes() const {
  for (const auto& program : programs_) {
    for (const auto& i : program.instructions) {
      if (i.cls >= durations_.size() &&
          (i.op == CRYSTAL_OP_RUN || i.op == CRYSTAL_OP_POST || i.op == CRYSTAL_OP_COMM)) {
        throw Failure(CRYSTAL_REPLAY_INVALID, "A duration class has no duration. Class " +
                                                  std::to_string(i.cls) + ", call " +
                                                  std::to_string(i.call) +
                                                  ". Set durations for every class.");
      }
    }
  }
}

void Engine::run(int32_t num_iterations) {
  check_classes();
  be_offline();
  reset(num_iterations);
  do {
    while (is_ready()) {
      advance(take_next());
    }
    // Everybody waits, so nothing can happen before what is due next.
  } while (!agenda_.empty() && (happen(), true));
  for (const auto& lane : lanes_) {
    if (!lane.is_done) {
      report_deadlock();
    }
  }
  for (size_t c = 0; c < comms_.size(); ++c) {
    if (comms_[c].first != kNone) {
      report_left_over(instances_[comms_[c].first]);
    }
  }
}

bool Engine::next_section(Lane& lane) const {
  const Program& program = programs_[ranks_[lane.rank].program];
  const int64_t index = &lane - lanes_.data() - ranks_[lane.rank].first_lane;
  const crystal_lane& shape = program.lanes[index];
  const crystal_instruction* begin = program.instructions.data() + shape.begin;
  if (lane.iteration > num_iterations_) {
    return false;
  }
  ++lane.iteration;
  if (lane.iteration <= num_iterations_) {
    lane.at = begin + shape.prologue;
    lane.section_end = lane.at + shape.body;
  } else {
    lane.at = begin + shape.prologue + shape.body;
    lane.section_end = lane.at + shape.epilogue;
  }
  return true;
}

void Engine::advance(int32_t index) {
  Lane& lane = lanes_[index];
  const Rank& rank = ranks_[lane.rank];
  for (int turn = 0; turn < turn_; ++turn) {
    while (lane.at == lane.section_end) {
      if (lane.iteration >= horizon_) {
        parked_.push_back(index);
        return;
      }
      if (!next_section(lane)) {
        lane.is_done = true;
        return;
      }
    }
    const crystal_instruction& i = *lane.at;
    const int64_t before = lane.t;
    switch (i.op) {
      case CRYSTAL_OP_RUN: {
        const auto offset =
            static_cast<uint64_t>(&i - programs_[rank.program].instructions.data());
        int64_t ns = durations_.get(i.cls, static_cast<uint64_t>(lane.rank),
                                    (static_cast<uint64_t>(lane.iteration) << 32) | offset);
        if (!rank_factors_.empty()) {
          ns = scaled(ns, rank_factors_[lane.rank]);
        }
        if (slowness_ != 1.0) {
          ns = scaled(ns, slowness_);
        }
        if (rank.is_perturbed) {
          ns = perturbed(lane, index, ns);
        }
        lane.t += ns;
        lane.parts.compute_ns += ns;
        break;
      }
      case CRYSTAL_OP_POST: {
        Handle& handle = handles_[rank.first_handle + i.handle];
        if (handle.instance != kNone) {
          release(handle.instance); // nobody waited for the last one
        }
        handle = post(index, i);
        break;
      }
      case CRYSTAL_OP_COMM: {
        const Handle handle = post(index, i);
        if (!take_end(lane, handle)) {
          return;
        }
        release(handle.instance);
        ++lane.at;
        continue; // take_end remembered
      }
      case CRYSTAL_OP_WAIT: {
        Handle& handle = handles_[rank.first_handle + i.handle];
        if (handle.instance == kNone) {
          break; // waited for already
        }
        const Handle taken = handle;
        handle.instance = kNone;
        if (!take_end(lane, taken)) {
          return;
        }
        release(taken.instance);
        ++lane.at;
        continue; // take_end remembered
      }
      case CRYSTAL_OP_SIGNAL: {
        Channel& channel = channels_[rank.first_channel + i.slot];
        if (channel.waiter != kNone) {
          Lane& other = lanes_[channel.waiter];
          await(other, {lane.t, index, traced_at(lane)});
          other.waits_in_channel = false;
          ++other.at;
          wake_lane(channel.waiter);
          channel.waiter = kNone;
        } else {
          channel.signals.push_back({lane.t, index, traced_at(lane)});
        }
        break;
      }
      case CRYSTAL_OP_AWAIT: {
        Channel& channel = channels_[rank.first_channel + i.slot];
        if (channel.is_empty()) {
          channel.waiter = index;
          lane.waits_in_channel = true;
          return;
        }
        await(lane, channel.take());
        ++lane.at;
        continue; // await remembered
      }
      case CRYSTAL_OP_MARK:
        marks_[lane.rank].push_back(lane.t);
        parts_[lane.rank].push_back(lane.parts);
        lane.parts = {};
        break;
    }
    remember(lane, before, -1);
    ++lane.at;
  }
  put_last(index);
}

void Engine::await(Lane& lane, const Channel::Signal& signal) {
  const int64_t before = lane.t;
  if (signal.t > before) {
    lane.t = signal.t;
    lane.parts.host_ns += lane.t - before;
    remember(lane, signal.t, lane.t - before, signal.lane, signal.at);
  } else {
    remember(lane, before, -1);
  }
}

Engine::Handle Engine::post(int32_t index, const crystal_instruction& i) {
  const Lane& lane = lanes_[index];
  const Rank& rank = ranks_[lane.rank];
  Connection& connection = connections_[rank.first_connection + i.slot];
  const int32_t seq = connection.seq++;
  const int32_t found = open_instance(connection.comm, seq, index, i);
  Instance& instance = instances_[found];
  ++num_participations_;
  ++instance.refs;
  ++instance.arrived;
  if (instance.arrived == 1 || lane.t > instance.last_arrival ||
      (lane.t == instance.last_arrival && index < instance.last_lane)) {
    instance.second_arrival = instance.arrived == 1 ? -1 : instance.last_arrival;
    instance.last_arrival = lane.t;
    instance.last_lane = index;
    instance.last_at = before(lane);
  } else {
    instance.second_arrival = std::max(instance.second_arrival, lane.t);
  }
  Handle handle{lane.t, found, i.cls, i.ends, (i.flags & CRYSTAL_FLAG_MESSAGE) != 0};
  if (i.ends == CRYSTAL_ENDS_ALL && !link_classes_.empty() &&
      link_classes_[connection.comm] >= 0) {
    instance.is_shared = true;
    instance.ranks.push_back(lane.rank);
  }
  if (i.ends == CRYSTAL_ENDS_ALL) {
    instance.transfer = std::max(instance.transfer, transfer_of(i.cls, connection.comm, seq));
  }
  if (rank.is_watched) {
    note(index, i, handle);
  }
  if (rank.is_external) {
    hold(handle);
  }
  if (i.flags & CRYSTAL_FLAG_ROOT) {
    instance.root_arrival = lane.t;
    settle_tickets(found);
    instance.root_lane = index;
    instance.root_at = before(lane);
    settle_notes(found);
    wake(&instance.wait_for_root, found);
  }
  if (instance.arrived == comms_[connection.comm].size) {
    complete(found);
  }
  return handle;
}

int32_t Engine::open_instance(int32_t comm, int32_t seq, int32_t lane,
                              const crystal_instruction& i) {
  Communicator& c = comms_[comm];
  if (c.last != kNone && instances_[c.last].seq >= seq) {
    // Late comers come to the oldest ones first.
    for (int32_t at = c.first; at != kNone; at = instances_[at].next) {
      if (instances_[at].seq == seq) {
        if (instances_[at].form != i.form) {
          report_mismatch(instances_[at], lane, i);
        }
        return at;
      }
    }
  }
  int32_t made = free_instance_;
  if (made != kNone) {
    free_instance_ = instances_[made].next;
  } else {
    made = static_cast<int32_t>(instances_.size());
    instances_.emplace_back();
  }
  Instance& instance = instances_[made];
  instance = Instance{};
  instance.comm = comm;
  instance.seq = seq;
  instance.form = i.form;
  instance.first_lane = lane;
  instance.first_call = i.call;
  if (c.last == kNone) {
    c.first = c.last = made;
  } else {
    instances_[c.last].next = made;
    c.last = made;
  }
  return made;
}

void Engine::complete(int32_t index) {
  Instance& instance = instances_[index];
  instance.is_complete = true;
  Communicator& c = comms_[instance.comm];
  if (c.first == index) {
    c.first = instance.next;
    if (c.first == kNone) {
      c.last = kNone;
    }
  } else {
    int32_t before = c.first;
    while (instances_[before].next != index) {
      before = instances_[before].next;
    }
    instances_[before].next = instance.next;
    if (c.last == index) {
      c.last = before;
    }
  }
  instance.next = kNone;
  settle_tickets(index); // before others are woken: somebody waits for it in real time
  if (instance.is_shared) {
    ++instance.refs; // the agenda's
    // Only an external rank can come late, with a time that has been gone through.
    agenda_.push({std::max(instance.last_arrival, happened_ns_), true, instance.comm,
                  instance.seq, index});
  }
  settle_notes(index);
  wake(&instance.wait_for_root, index);
  if (!instance.is_shared) {
    wake(&instance.wait_for_all, index);
  }
}

void Engine::wake(int32_t* list, int32_t instance) {
  for (int32_t at = *list; at != kNone;) {
    Lane& lane = lanes_[at];
    const int32_t next = lane.next;
    lane.next = kNone;
    take_end(lane, lane.waits_for);
    lane.waits_for.instance = kNone;
    ++lane.at;
    --instances_[instance].refs; // the caller still holds one, or it is not complete
    wake_lane(at);
    at = next;
  }
  *list = kNone;
}

bool Engine::is_determined(const Handle& handle) const {
  const Instance& instance = instances_[handle.instance];
  switch (handle.ends) {
    case CRYSTAL_ENDS_ALL:
      return instance.is_complete && (!instance.is_shared || instance.settled_end >= 0);
    case CRYSTAL_ENDS_SELF: return true;
    default: return instance.root_arrival >= 0;
  }
}

int64_t Engine::transfer_of(int32_t cls, int32_t comm, int32_t seq) const {
  const int64_t ns =
      durations_.get(cls, static_cast<uint64_t>(comm) | (1ULL << 40), static_cast<uint64_t>(seq));
  return link_factors_.empty() ? ns : scaled(ns, link_factors_[comm]);
}

int64_t Engine::end_of(const Handle& handle, int64_t* start) const {
  const Instance& instance = instances_[handle.instance];
  if (handle.ends == CRYSTAL_ENDS_ALL) {
    *start = instance.last_arrival;
    return instance.is_shared ? instance.settled_end : instance.last_arrival + instance.transfer;
  }
  const int64_t transfer = transfer_of(handle.cls, instance.comm, instance.seq);
  switch (handle.ends) {
    case CRYSTAL_ENDS_ROOT:
      *start = std::max(handle.arrival, instance.root_arrival);
      return *start + transfer;
    case CRYSTAL_ENDS_SELF:
      *start = handle.arrival;
      return *start + transfer;
    default: // AFTER_DATA
      *start = instance.root_arrival;
      return std::max(handle.arrival, instance.root_arrival + transfer) +
             durations_.drain(handle.cls);
  }
}

bool Engine::take_end(Lane& lane, const Handle& handle) {
  if (!is_determined(handle)) {
    if (instances_[handle.instance].is_complete && handle.ends != CRYSTAL_ENDS_ALL) {
      throw Failure(CRYSTAL_REPLAY_MISMATCH,
                    "Nobody is the root of a rooted call. Rank " + std::to_string(lane.rank) +
                        ", communicator " + std::to_string(instances_[handle.instance].comm) +
                        ", sequence number " +
                        std::to_string(instances_[handle.instance].seq) +
                        ". Look at the calls of its participants.");
    }
    lane.waits_for = handle;
    Instance& instance = instances_[handle.instance];
    int32_t& list =
        handle.ends == CRYSTAL_ENDS_ALL ? instance.wait_for_all : instance.wait_for_root;
    lane.next = list;
    list = static_cast<int32_t>(&lane - lanes_.data());
    return false;
  }
  int64_t start = 0;
  const int64_t end = end_of(handle, &start);
  if (end <= lane.t) {
    remember(lane, lane.t, -1);
    return true;
  }
  const int64_t before = lane.t;
  const int64_t idle = std::clamp(start - before, int64_t{0}, end - before);
  (handle.is_message ? lane.parts.bubble_ns : lane.parts.wait_ns) += idle;
  lane.parts.exposed_ns += end - before - idle;
  lane.t = end;
  if (traced_at(lane) != kNone) {
    const Instance& instance = instances_[handle.instance];
    int64_t slack = end - before;
    if (handle.ends == CRYSTAL_ENDS_ALL) {
      if (instance.second_arrival >= 0) {
        slack = std::min(slack, instance.last_arrival - instance.second_arrival);
      }
      remember(lane, instance.last_arrival, slack, instance.last_lane, instance.last_at);
    } else if (handle.ends == CRYSTAL_ENDS_SELF || handle.arrival >= instance.root_arrival) {
      remember(lane, before, slack);
    } else {
      slack = std::min(slack, instance.root_arrival - handle.arrival);
      remember(lane, instance.root_arrival, slack, instance.root_lane, instance.root_at);
    }
  }
  return true;
}

void Engine::release(int32_t index) {
  Instance& instance = instances_[index];
  if (--instance.refs == 0 && instance.is_complete) {
    instance.next = free_instance_;
    free_instance_ = index;
  }
}

// --- the critical path ------------------------------------------------------------

int32_t Engine::traced_at(const Lane& lane) const {
  if (lane.iteration != traced_ || traced_ == 0) {
    return kNone;
  }
  const Rank& rank = ranks_[lane.rank];
  const Program& program = programs_[rank.program];
  const auto& shape = program.lanes[&lane - lanes_.data() - rank.first_lane];
  return static_cast<int32_t>(lane.at - program.instructions.data() - shape.begin -
                              shape.prologue);
}

int32_t Engine::before(const Lane& lane) const {
  const int32_t at = traced_at(lane);
  return at == kNone ? kNone : at - 1;
}

void Engine::remember(const Lane& lane, int64_t start, int64_t slack, int32_t by_lane,
                      int32_t by_at) {
  const int32_t at = traced_at(lane);
  if (at != kNone) {
    moments_[&lane - lanes_.data()][at] = Moment{lane.t, start, slack, by_lane, by_at};
  }
}

// --- watching ---------------------------------------------------------------------

void Engine::note(int32_t index, const crystal_instruction& i, const Handle& handle) {
  const Lane& lane = lanes_[index];
  const auto number = static_cast<int32_t>(index - ranks_[lane.rank].first_lane);
  events_.push_back(
      crystal_event{lane.rank, number, lane.iteration, i.call, handle.arrival, -1, -1});
  ++instances_[handle.instance].refs;
  notes_[handle.instance].push_back(Note{events_.size() - 1, handle});
  if (handle.ends == CRYSTAL_ENDS_SELF || instances_[handle.instance].root_arrival >= 0) {
    settle_notes(handle.instance);
  }
}

void Engine::settle_notes(int32_t index) {
  const auto found = notes_.find(index);
  if (found == notes_.end()) {
    return;
  }
  std::vector<Note> left;
  for (const auto& n : found->second) {
    if (!is_determined(n.handle)) {
      left.push_back(n);
      continue;
    }
    crystal_event& event = events_[n.event];
    event.end_ns = end_of(n.handle, &event.start_ns);
    --instances_[index].refs; // not complete, or the caller holds one
  }
  if (left.empty()) {
    notes_.erase(found);
  } else {
    found->second = std::move(left);
  }
}

std::vector<int64_t> Engine::lane_ends(int32_t rank) const {
  const Rank& r = ranks_.at(rank);
  std::vector<int64_t> ends;
  for (size_t l = 0; l < programs_[r.program].lanes.size(); ++l) {
    ends.push_back(lanes_[r.first_lane + static_cast<int64_t>(l)].t);
  }
  return ends;
}

} // namespace crystal::replay
