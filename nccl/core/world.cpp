#include "core/world.h"

#include "core/clock.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace crystal {
namespace {

// Enough to see where values were invented; the count goes on.
constexpr size_t kInventionsKept = 100;

thread_local int64_t lane_override = -1;

std::shared_ptr<World>& world_slot() {
  static auto* slot = new std::shared_ptr<World>;
  return *slot;
}

} // namespace

std::shared_ptr<World> the_world() { return world_slot(); }
void set_world(std::shared_ptr<World> world) { world_slot() = std::move(world); }

World::World(int rank, int size, uint64_t seed)
    : rank_(rank), size_(size), seed_(seed), rule_(fixed_release(0)) {}

void World::set_mates(std::vector<int> ranks, int64_t limit_ms) {
  std::sort(ranks.begin(), ranks.end());
  const bool twice = std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end();
  if (twice || !std::binary_search(ranks.begin(), ranks.end(), rank_) || ranks.front() < 0 ||
      ranks.back() >= size_) {
    throw std::invalid_argument(
        "These are no ranks that run side by side. " + std::to_string(ranks.size()) +
        " ranks were given to rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
        ". Give different ranks of the world, this one among them.");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  mates_ = std::move(ranks);
  mates_limit_ms_ = limit_ms;
}

std::shared_ptr<Group> World::create_group(std::vector<int> members) {
  if (members.empty()) {
    members.resize(size_);
    std::iota(members.begin(), members.end(), 0);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const int creation = created_[members]++;
  auto group = std::make_shared<Group>(
      static_cast<int>(groups_.size()), std::move(members), rank_, creation);
  if (mates_.size() > 1) {
    std::vector<int> mates;
    for (int v = 0; v < group->size(); ++v) {
      if (std::binary_search(mates_.begin(), mates_.end(), group->global(v))) {
        mates.push_back(v);
      }
    }
    if (mates.size() > 1) {
      group->set_mates(std::move(mates));
    }
  }
  groups_.push_back(group);
  return group;
}

std::vector<std::shared_ptr<Group>> World::groups() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return groups_;
}

void World::name_group(const std::string& name, int size) {
  std::lock_guard<std::mutex> lock(mutex_);
  group_sizes_[name] = size;
}

int World::size_of_group_named_in(const std::string& store_key, int otherwise) const {
  // A prefix store writes "<name>/<key>"; names nest from the outside in, and
  // the innermost group that we know of is the one that counts.
  std::lock_guard<std::mutex> lock(mutex_);
  int size = otherwise;
  for (size_t begin = 0; begin < store_key.size();) {
    const size_t end = std::min(store_key.find('/', begin), store_key.size());
    const auto known = group_sizes_.find(store_key.substr(begin, end - begin));
    if (known != group_sizes_.end()) {
      size = known->second;
    }
    begin = end + 1;
  }
  return size;
}

CallRecord World::arrive(const Call& call, Group& group, int64_t arrival_ns,
                         Transport transport) {
  std::lock_guard<std::mutex> lock(mutex_);
  CallRecord record = make_record(call, group, arrival_ns);
  record.transport = transport;
  if (trace_) {
    record.captured_call = trace_->follow(record, group);
  }
  if (transport != Transport::real) {
    record.release = rule_->arrive(record, group);
  }
  keep(record);
  return record;
}

CallRecord World::record(const Call& call, Group& group, int64_t arrival_ns, int64_t release_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  CallRecord record = make_record(call, group, arrival_ns);
  record.release = known_release(arrival_ns, release_ns);
  keep(record);
  return record;
}

CallRecord World::make_record(const Call& call, Group& group, int64_t arrival_ns) {
  CallRecord record = make_call_record(call, group, num_calls_++, mark_);
  record.batch_in_mark = call.batch < 0 ? -1 : call.batch - batches_at_mark_;
  record.arrival_ns = arrival_ns;
  record.event = num_events_++;
  record.returned_ns = arrival_ns;
  return record;
}

void World::keep(const CallRecord& record) {
  if (keep_records_) {
    records_.push_back(record);
  }
}

void World::keep_records(bool keep) {
  std::lock_guard<std::mutex> lock(mutex_);
  keep_records_ = keep;
  begin_ns_ = now_ns();
}

void World::returned(int64_t call, int64_t at_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t kept = records_.empty() ? -1 : call - records_.front().call;
  if (kept >= 0 && kept < static_cast<int64_t>(records_.size())) {
    records_[kept].returned_ns = at_ns;
  }
}

void World::waited(int64_t call, int64_t begin_ns, int64_t end_ns) {
  if (!keep_records_) {
    return;
  }
  const int64_t lane = this_thread();
  std::lock_guard<std::mutex> lock(mutex_);
  waits_.push_back(Wait{num_events_++, call, lane, mark_, begin_ns, end_ns});
}

World::Events World::events() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Events{records_, waits_, mark_times_, allocations_, begin_ns_, mark_};
}

void World::allocated(int64_t bytes) {
  if (!keep_memory_ || bytes == 0) {
    return;
  }
  const int64_t at_ns = now_ns();
  const int64_t lane = this_thread();
  std::lock_guard<std::mutex> lock(mutex_);
  allocations_.push_back(Allocation{num_events_++, lane, mark_, at_ns, bytes});
}

void World::mark(bool by_hand) {
  const int64_t lane = this_thread();
  std::lock_guard<std::mutex> lock(mutex_);
  marked_by_hand_ |= by_hand;
  if (by_hand == marked_by_hand_) {
    ++mark_;
    const int64_t at_ns = now_ns();
    const int64_t computed_ns = computed_since_mark(lane, at_ns);
    if (keep_records_) {
      mark_times_.push_back(Mark{num_events_++, lane, at_ns});
    }
    batches_at_mark_ = num_batches_;
    rule_->marked(mark_, at_ns, computed_ns);
  }
}

int64_t World::computed_since_mark(int64_t lane, int64_t at_ns) {
  if (!keep_records_ || mark_times_.empty() || mark_times_.back().lane != lane) {
    counted_waits_ = waits_.size();
    return -1;
  }
  const int64_t since_ns = mark_times_.back().at_ns;
  int64_t computed_ns = at_ns - since_ns;
  for (; counted_waits_ < waits_.size(); ++counted_waits_) {
    const Wait& wait = waits_[counted_waits_];
    if (wait.lane == lane) {
      computed_ns -= wait.end_ns - std::max(wait.begin_ns, since_ns);
    }
  }
  return std::max<int64_t>(0, computed_ns);
}

int64_t World::new_batch() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_batches_++;
}

World::Lane::Lane(int64_t lane) : before(lane_override) { lane_override = lane; }
World::Lane::~Lane() { lane_override = before; }

void World::send_to_self(int group, std::string bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  to_self_[group].push_back(std::move(bytes));
}

std::string World::receive_from_self(int group) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& waiting = to_self_[group];
  if (waiting.empty()) {
    return {};
  }
  std::string bytes = std::move(waiting.front());
  waiting.pop_front();
  return bytes;
}

int64_t World::this_thread() {
  if (lane_override >= 0) {
    return lane_override;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return threads_.emplace(std::this_thread::get_id(), threads_.size()).first->second;
}

std::vector<CallRecord> World::take_records() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(records_, {});
}

void World::add_payload(const std::string& group, int64_t seq, int rank, int peer,
                        Payload payload) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& call = payloads_[{group, seq}];
  if (!call) {
    call = std::make_shared<CallPayloads>();
  }
  (*call)[{rank, peer}] = std::move(payload);
}

void World::drop_payload(const std::string& group, int64_t seq, int rank, int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto call = payloads_.find({group, seq});
  if (call != payloads_.end()) {
    call->second->erase({rank, peer});
    if (call->second->empty()) {
      payloads_.erase(call);
    }
  }
}

std::shared_ptr<const World::CallPayloads> World::payloads(const Group& group, int64_t seq) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (payloads_.empty()) {
    return nullptr;
  }
  const auto found = payloads_.find({group.identity(), seq});
  return found == payloads_.end() ? nullptr : found->second;
}

bool World::fetch(const Group& group, int64_t seq, const std::vector<int>& ranks, int peer,
                  const std::string& key) {
  if (!source_) {
    return false;
  }
  std::vector<int> missing;
  const auto known = payloads(group, seq);
  for (int rank : ranks) {
    if (!known || known->count({rank, peer}) == 0) {
      missing.push_back(rank);
    }
  }
  if (missing.empty()) {
    return false;
  }
  source_(group, seq, missing, peer, key); // without the lock: it waits
  return true;
}

void World::contribute(Contribution contribution) {
  std::lock_guard<std::mutex> lock(mutex_);
  contributions_.push_back(std::move(contribution));
}

std::vector<Contribution> World::take_contributions() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(contributions_, {});
}

void World::invented(const CallRecord& record, const Group& group, const char* how) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (strict_) {
    throw std::runtime_error(
        "A control value of a virtual peer is not in the payload book. Rank " +
        std::to_string(rank_) + ", call " + std::to_string(record.call) + " (" +
        key(record, group) + "), group " + group.identity() + ", sequence number " +
        std::to_string(record.position.seq) +
        ". Capture the job again, or run without --strict to have such values invented.");
  }
  ++num_invented_;
  if (inventions_.size() < kInventionsKept) {
    inventions_.push_back(Invented{record.call, key(record, group), how});
  }
}

int64_t World::num_calls() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_calls_;
}

int64_t World::num_invented() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_invented_;
}

void World::note_invented(const std::string& what, const std::string& how) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (strict_) {
    throw std::runtime_error(
        "A control value of a virtual peer is not in the payload book. Rank " +
        std::to_string(rank_) + ", before call " + std::to_string(num_calls_) + ": " + what +
        ". Capture the job again, or run without --strict to have such values invented.");
  }
  ++num_invented_;
  if (inventions_.size() < kInventionsKept) {
    inventions_.push_back(Invented{num_calls_, what, how});
  }
}

std::vector<Invented> World::inventions() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return inventions_;
}

} // namespace crystal
