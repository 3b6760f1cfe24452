#include "replay/engine.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>

namespace crystal::replay {
namespace {

uint64_t mix(uint64_t x) { // splitmix64
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// In (0, 1], in steps of 2^-53.
double unit(uint64_t bits) { return static_cast<double>((bits >> 11) + 1) * 0x1.0p-53; }

} // namespace

int64_t scaled(int64_t ns, double factor) {
  return static_cast<int64_t>(std::floor(static_cast<double>(ns) * factor + 0.5));
}

void Durations::set(const int64_t* ns, const double* spread, const int64_t* drain, int32_t n,
                    uint64_t seed) {
  for (int32_t i = 0; i < n; ++i) {
    if (ns[i] < 0 || (drain && drain[i] < 0) || (spread && !(spread[i] >= 0))) {
      throw Failure(CRYSTAL_REPLAY_INVALID,
                    "A duration is negative. Class " + std::to_string(i) +
                        ". Give nanoseconds and spreads of 0 or more.");
    }
  }
  ns_.assign(ns, ns + n);
  spread_.assign(n, 0.0);
  if (spread) {
    spread_.assign(spread, spread + n);
  }
  drain_.assign(n, 0);
  if (drain) {
    drain_.assign(drain, drain + n);
  }
  seed_ = seed;
  choices_.clear();
  is_drawn_.assign(n, 0);
  for (int32_t i = 0; i < n; ++i) {
    is_drawn_[i] = spread_[i] != 0.0;
  }
}

void Durations::set_choices(int32_t cls, const int64_t* ns, const int64_t* weights, int32_t n) {
  Choices made;
  uint64_t sum = 0;
  bool is_valid = cls >= 0 && cls < size() && n > 0;
  for (int32_t i = 0; i < n && is_valid; ++i) {
    is_valid = ns[i] >= 0 && weights[i] > 0;
    sum += static_cast<uint64_t>(weights[i]);
    made.ns.push_back(ns[i]);
    made.up_to.push_back(sum);
  }
  if (!is_valid) {
    throw Failure(CRYSTAL_REPLAY_INVALID,
                  "The choices of a duration are none, or negative. Class " +
                      std::to_string(cls) +
                      ". Give durations of 0 or more with weights above 0 for a class that is "
                      "there.");
  }
  choices_[cls] = std::move(made);
  is_drawn_[cls] = 1;
}

int64_t Durations::draw(int32_t cls, uint64_t entity, uint64_t count) const {
  const uint64_t key = mix(mix(mix(seed_ ^ static_cast<uint64_t>(cls)) ^ entity) ^ count);
  if (const auto found = choices_.find(cls); found != choices_.end()) {
    const auto& up_to = found->second.up_to;
    const uint64_t at = key % up_to.back();
    const auto chosen = std::upper_bound(up_to.begin(), up_to.end(), at) - up_to.begin();
    return found->second.ns[chosen];
  }
  const double u = unit(key);
  const double v = unit(mix(key));
  const double normal = std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
  return scaled(ns_[cls], std::exp(spread_[cls] * normal));
}

// --- setting up -----------------------------------------------------------------

int Engine::add_program(Program program) {
  const auto invalid = [](const std::string& what) {
    throw Failure(CRYSTAL_REPLAY_INVALID, what + ". A program that is added. Mend the program.");
  };
  for (const auto& lane : program.lanes) {
    if (lane.begin < 0 || lane.prologue < 0 || lane.body < 0 || lane.epilogue < 0 ||
        lane.begin + lane.prologue + lane.body + lane.epilogue >
            static_cast<int64_t>(program.instructions.size())) {
      invalid("A lane reaches beyond the instructions");
    }
  }
  for (const auto& i : program.instructions) {
    const bool is_call = i.op == CRYSTAL_OP_POST || i.op == CRYSTAL_OP_COMM;
    const bool has_handle = i.op == CRYSTAL_OP_POST || i.op == CRYSTAL_OP_WAIT;
    const bool has_channel = i.op == CRYSTAL_OP_SIGNAL || i.op == CRYSTAL_OP_AWAIT;
    if (i.op > CRYSTAL_OP_MARK || i.ends > CRYSTAL_ENDS_AFTER_DATA || (is_call && i.slot < 0) ||
        (has_handle && (i.handle < 0 || i.handle >= program.num_handles)) ||
        (has_channel && (i.slot < 0 || i.slot >= program.num_channels)) || i.cls < 0) {
      invalid("An instruction names a handle, channel or class that is not there");
    }
  }
  programs_.push_back(std::move(program));
  return static_cast<int>(programs_.size()) - 1;
}

void Engine::set_communicators(const int32_t* sizes, int32_t n) {
  comms_.assign(n, {});
  for (int32_t i = 0; i < n; ++i) {
    if (sizes[i] < 1) {
      throw Failure(CRYSTAL_REPLAY_INVALID, "A communicator has no participants. Number " +
                                                std::to_string(i) + ". Give at least one.");
    }
    comms_[i].size = sizes[i];
  }
}

void Engine::add_ranks(int32_t n, const int32_t* programs, const int64_t* begin,
                       const int32_t* connections) {
  int64_t num_lanes = 0, num_handles = 0, num_channels = 0;
  for (int32_t r = 0; r < n; ++r) {
    if (programs[r] < 0 || programs[r] >= static_cast<int32_t>(programs_.size())) {
      throw Failure(CRYSTAL_REPLAY_INVALID, "A rank follows no program. Rank " +
                                                std::to_string(r) + ". Add its program first.");
    }
    const Program& program = programs_[programs[r]];
    const auto num_connections = static_cast<int32_t>(begin[r + 1] - begin[r]);
    for (const auto& i : program.instructions) {
      if ((i.op == CRYSTAL_OP_POST || i.op == CRYSTAL_OP_COMM) && i.slot >= num_connections) {
        throw Failure(CRYSTAL_REPLAY_INVALID,
                      "A rank has fewer connections than its program uses. Rank " +
                          std::to_string(r) + ", call " + std::to_string(i.call) +
                          ". Give a communicator for every slot.");
      }
    }
    ranks_.push_back(Rank{programs[r], num_lanes, static_cast<int64_t>(connections_.size()),
                          num_connections, num_handles, num_channels, false});
    num_lanes += static_cast<int64_t>(program.lanes.size());
    num_handles += program.num_handles;
    num_channels += program.num_channels;
    for (int64_t c = begin[r]; c < begin[r + 1]; ++c) {
      if (connections[c] < 0 || connections[c] >= static_cast<int32_t>(comms_.size())) {
        throw Failure(CRYSTAL_REPLAY_INVALID, "A connection names no communicator. Rank " +
                                                  std::to_string(r) +
                                                  ". Set the communicators first.");
      }
      connections_.push_back(Connection{connections[c], 0});
    }
  }
  lanes_.resize(num_lanes);
  handles_.resize(num_handles);
  channels_.resize(num_channels);
}

void Engine::set_rank_factors(const double* factors) {
  rank_factors_.clear();
  if (factors) {
    rank_factors_.assign(factors, factors + ranks_.size());
  }
}

void Engine::set_link_factors(const double* factors) {
  link_factors_.clear();
  if (factors) {
    link_factors_.assign(factors, factors + comms_.size());
  }
}

void Engine::set_link_classes(const int32_t* classes) {
  link_classes_.clear();
  num_link_classes_ = 0;
  if (classes) {
    link_classes_.assign(classes, classes + comms_.size());
    for (const int32_t c : link_classes_) {
      num_link_classes_ = std::max(num_link_classes_, c + 1);
    }
  }
}

void Engine::watch(int32_t rank) {
  if (rank < 0 || rank >= static_cast<int32_t>(ranks_.size())) {
    throw Failure(CRYSTAL_REPLAY_INVALID, "There is no such rank to watch. Rank " +
                                              std::to_string(rank) + ". Add the ranks first.");
  }
  ranks_[rank].is_watched = true;
}

void Engine::set_perturbations(const crystal_perturbation* list, int32_t n) {
  for (auto& rank : ranks_) {
    rank.is_perturbed = false;
  }
  for (int32_t i = 0; i < n; ++i) {
    const auto& p = list[i];
    if (p.rank < 0 || p.rank >= static_cast<int32_t>(ranks_.size()) || p.kind < CRYSTAL_SLOW ||
        p.kind > CRYSTAL_PAUSE_AT || p.every < 0 || p.pause_ns < 0 || !(p.factor >= 0)) {
      throw Failure(CRYSTAL_REPLAY_INVALID,
                    "A perturbation names no rank, or makes time negative. Perturbation " +
                        std::to_string(i) + ", rank " + std::to_string(p.rank) +
                        ". Give a rank of the world, and factors and pauses of 0 or more.");
    }
    ranks_[p.rank].is_perturbed = true;
  }
  perturbations_.assign(list, list + n);
}

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
    settle_notes(found, false);
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
  settle_notes(index, true);
  wake(&instance.wait_for_root, index);
  if (!instance.is_shared) {
    wake(&instance.wait_for_all, index);
  }
}

// --- transfers that share a link ------------------------------------------------

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
  settle_notes(now.instance, true);
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

std::vector<crystal_step> Engine::critical_path() const {
  std::vector<crystal_step> steps;
  int32_t lane = kNone, at = kNone;
  int64_t last = -1;
  for (size_t l = 0; l < moments_.size(); ++l) { // the last mark
    const Rank& rank = ranks_[lanes_[l].rank];
    const Program& program = programs_[rank.program];
    const auto& shape = program.lanes[l - rank.first_lane];
    for (int32_t i = 0; i < shape.body; ++i) {
      if (program.instructions[shape.begin + shape.prologue + i].op == CRYSTAL_OP_MARK &&
          moments_[l][i].end > last) {
        lane = static_cast<int32_t>(l);
        at = i;
        last = moments_[l][i].end;
      }
    }
  }
  while (at >= 0) {
    const Rank& rank = ranks_[lanes_[lane].rank];
    const Program& program = programs_[rank.program];
    const int64_t number = lane - rank.first_lane;
    const auto& shape = program.lanes[number];
    const auto& i = program.instructions[shape.begin + shape.prologue + at];
    const Moment& moment = moments_[lane][at];
    const bool is_bound = moment.by_lane != kNone;
    steps.push_back(crystal_step{lanes_[lane].rank, static_cast<int32_t>(number), at, i.op, i.call,
                                 i.cls, moment.start, moment.end, moment.slack});
    if (is_bound) {
      lane = moment.by_lane;
      at = moment.by_at; // none: it lies before the iteration
    } else {
      --at;
    }
  }
  return steps;
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
    settle_notes(handle.instance, false);
  }
}

void Engine::settle_notes(int32_t index, bool) {
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

// --- what can be wrong ------------------------------------------------------------

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
  std::string missing;
  for (size_t r = 0; r < ranks_.size() && missing.empty(); ++r) {
    for (int32_t c = 0; c < ranks_[r].num_connections; ++c) {
      const Connection& connection = connections_[ranks_[r].first_connection + c];
      if (connection.comm == instance.comm && connection.seq <= instance.seq) {
        missing = "rank " + std::to_string(r) + " has ended without it";
        break;
      }
    }
  }
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
  const Instance& instance = instances_[lane.waits_for.instance];
  int32_t absent = kNone;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    for (int32_t c = 0; c < ranks_[r].num_connections; ++c) {
      const Connection& connection = connections_[ranks_[r].first_connection + c];
      if (connection.comm == instance.comm && connection.seq <= instance.seq) {
        const int32_t found = other_lane(static_cast<int32_t>(r));
        if (found != kNone) {
          return found;
        }
        absent = static_cast<int32_t>(r);
      }
    }
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

} // namespace crystal::replay
