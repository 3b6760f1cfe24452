#include "c10d/store.h"

#include <c10/util/Exception.h>

#include <cctype>
#include <map>

namespace crystal {
namespace {

using Bytes = std::vector<uint8_t>;

std::mutex states_mutex;
auto& states = *new std::map<std::string, std::shared_ptr<StoreState>>;
auto& book = *new std::unordered_map<std::string, Bytes>;

Bytes to_bytes(const std::string& text) { return Bytes(text.begin(), text.end()); }

// The key with each whole number in it replaced in turn by `number`.
std::vector<std::string> with_numbers_replaced(const std::string& key, int number) {
  std::vector<std::string> found;
  for (size_t begin = 0; begin < key.size();) {
    if (!std::isdigit(static_cast<unsigned char>(key[begin]))) {
      ++begin;
      continue;
    }
    size_t end = begin;
    while (end < key.size() && std::isdigit(static_cast<unsigned char>(key[end]))) {
      ++end;
    }
    found.push_back(key.substr(0, begin) + std::to_string(number) + key.substr(end));
    begin = end;
  }
  return found;
}

} // namespace

std::shared_ptr<StoreState> store_state(const std::string& endpoint) {
  std::lock_guard<std::mutex> lock(states_mutex);
  auto& state = states[endpoint];
  if (!state) {
    state = std::make_shared<StoreState>();
    state->peers = book;
  }
  return state;
}

void add_store_payload(const std::string& key, const std::string& value) {
  std::lock_guard<std::mutex> lock(states_mutex);
  book[key] = to_bytes(value);
  for (auto& entry : states) {
    std::lock_guard<std::mutex> state_lock(entry.second->mutex);
    entry.second->peers[key] = to_bytes(value);
  }
}

void reset_stores() {
  std::lock_guard<std::mutex> lock(states_mutex);
  states.clear();
  book.clear();
}

VirtualStore::VirtualStore(
    const std::string& endpoint, std::chrono::milliseconds timeout, int size)
    : c10d::Store(timeout),
      endpoint_(endpoint),
      size_(size),
      state_(store_state(endpoint)),
      world_(the_world()) {
  TORCH_CHECK(
      world_ != nullptr, "A virtual store was created before the logical world. Endpoint ",
      endpoint, ". Start the program with python -m crystalllm run.");
}

c10::intrusive_ptr<c10d::Store> VirtualStore::clone() {
  return c10::make_intrusive<VirtualStore>(endpoint_, timeout_, size_);
}

const Bytes* VirtualStore::find(const std::string& key) {
  const auto own = state_->values.find(key);
  if (own != state_->values.end()) {
    return &own->second;
  }
  const auto peer = state_->peers.find(key);
  if (peer != state_->peers.end()) {
    return &peer->second;
  }
  for (const auto& mirrored : with_numbers_replaced(key, world_->rank())) {
    const auto found = state_->values.find(mirrored);
    if (found != state_->values.end()) {
      return &found->second;
    }
  }
  return nullptr;
}

void VirtualStore::refuse(const std::string& key) const {
  TORCH_CHECK_WITH(
      DistStoreError, false, "No virtual peer sets this store key. Rank ", world_->rank(),
      ", store ", endpoint_, ", key '", key,
      "': this rank did not set it, nor the same key with its own rank in it, and no payload book "
      "has it. Capture the job, or have every rank set the key.");
}

void VirtualStore::set(const std::string& key, const Bytes& value) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->values[key] = value;
}

Bytes VirtualStore::compareSet(
    const std::string& key, const Bytes& expected, const Bytes& desired) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const Bytes* held = find(key);
  if ((held == nullptr && expected.empty()) || (held != nullptr && *held == expected)) {
    state_->values[key] = desired;
    return desired;
  }
  return held != nullptr ? *held : expected;
}

Bytes VirtualStore::get(const std::string& key) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const Bytes* held = find(key);
  if (held == nullptr) {
    refuse(key);
  }
  return *held;
}

int64_t VirtualStore::add(const std::string& key, int64_t value) {
  const int everybody =
      world_->size_of_group_named_in(key, size_ > 0 ? size_ : world_->size());
  std::lock_guard<std::mutex> lock(state_->mutex);
  const auto held = state_->values.find(key);
  int64_t total = 0;
  if (held != state_->values.end()) {
    total = std::stoll(std::string(held->second.begin(), held->second.end()));
  }
  total += value * everybody; // the others add as much
  state_->values[key] = to_bytes(std::to_string(total));
  return total;
}

bool VirtualStore::deleteKey(const std::string& key) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->values.erase(key) + state_->peers.erase(key) > 0;
}

bool VirtualStore::check(const std::vector<std::string>& keys) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  for (const auto& key : keys) {
    if (find(key) == nullptr) {
      return false;
    }
  }
  return true;
}

int64_t VirtualStore::getNumKeys() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return static_cast<int64_t>(state_->values.size());
}

void VirtualStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void VirtualStore::wait(
    const std::vector<std::string>& keys, const std::chrono::milliseconds& /*timeout*/) {
  // Peers are always there already, so that waiting longer would not help.
  std::lock_guard<std::mutex> lock(state_->mutex);
  for (const auto& key : keys) {
    if (find(key) == nullptr) {
      refuse(key);
    }
  }
}

void VirtualStore::append(const std::string& key, const Bytes& value) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  auto& held = state_->values[key];
  held.insert(held.end(), value.begin(), value.end());
}

std::vector<Bytes> VirtualStore::multiGet(const std::vector<std::string>& keys) {
  std::vector<Bytes> values;
  for (const auto& key : keys) {
    values.push_back(get(key));
  }
  return values;
}

void VirtualStore::multiSet(
    const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
  TORCH_CHECK_VALUE(
      keys.size() == values.size(), "multiSet with ", keys.size(), " keys and ", values.size(),
      " values");
  for (size_t i = 0; i < keys.size(); ++i) {
    set(keys[i], values[i]);
  }
}

void VirtualStore::queuePush(const std::string& key, const Bytes& value) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->queues[key].push_back(value);
}

Bytes VirtualStore::queuePop(const std::string& key, bool /*block*/) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  auto& queue = state_->queues[key];
  if (queue.empty()) {
    refuse(key);
  }
  Bytes value = queue.front();
  queue.pop_front();
  return value;
}

int64_t VirtualStore::queueLen(const std::string& key) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return static_cast<int64_t>(state_->queues[key].size());
}

} // namespace crystal
