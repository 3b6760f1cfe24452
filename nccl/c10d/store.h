// A rendezvous store that answers for virtual peers. Nothing here takes time
// that grows with the world.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/world.h"

namespace crystal {

// Keys by exact name; shared by all stores of one endpoint in this process.
struct StoreState {
  std::mutex mutex;
  std::unordered_map<std::string, std::vector<uint8_t>> values;
  // Keys that the payload book says other ranks set.
  std::unordered_map<std::string, std::vector<uint8_t>> peers;
  std::unordered_map<std::string, std::deque<std::vector<uint8_t>>> queues;
};

// The state of an endpoint such as "tcp://host:port".
std::shared_ptr<StoreState> store_state(const std::string& endpoint);
// A value that a virtual peer will have set, in every endpoint.
void add_store_payload(const std::string& key, const std::string& value);
void reset_stores();

// What a rank would see at the moment when every peer did what it did:
// - add: the others add as much, so that a barrier's counter is full;
// - get, wait: a key that this rank set, or one from the payload book, or,
//   where the key names another rank ("x/5" while this rank, 3, set "x/3"),
//   what this rank holds under its own number. Anything else is an error that
//   names the key: no virtual peer will ever set it.
class VirtualStore : public c10d::Store {
 public:
  // `size` is how many processes use the store, 0: the world. A key that names a
  // group concerns that group.
  VirtualStore(const std::string& endpoint, std::chrono::milliseconds timeout, int size = 0);

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(
      const std::string& key, const std::vector<uint8_t>& expected,
      const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(
      const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(
      const std::vector<std::string>& keys,
      const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }
  void queuePush(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> queuePop(const std::string& key, bool block) override;
  int64_t queueLen(const std::string& key) override;

 private:
  // Null where nobody sets the key. The state's lock is held.
  const std::vector<uint8_t>* find(const std::string& key);
  [[noreturn]] void refuse(const std::string& key) const;

  std::string endpoint_;
  int size_;
  std::shared_ptr<StoreState> state_;
  std::shared_ptr<World> world_;
};

} // namespace crystal
