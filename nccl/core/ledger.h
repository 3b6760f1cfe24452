// The account of a process's memory: every block from when it was taken to when
// it was given back, and what it turned out to be for.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace crystal {

// What the thread that took a block was doing.
enum class Phase : uint8_t { other, forward, backward, optimizer, communication };
const char* to_string(Phase phase);

// What a block was recognised as. One that is recognised as several things is the
// last of them in this order.
enum class Recognised : uint8_t { nothing, communication, optimizer, gradient, parameter };
const char* to_string(Recognised as);

struct Block {
  int64_t bytes = 0;
  int64_t taken = 0;  // ordinal among all changes, from 0
  int64_t given = -1; // the same; -1 while it is held
  int64_t taken_ns = 0;
  int64_t given_ns = -1;
  int64_t taken_mark = 0;
  int64_t given_mark = -1;
  int32_t owner = -1; // of what it was recognised as: the caller's number
  bool is_shared = false; // recognised as the same of several owners
  Recognised as = Recognised::nothing;
  Phase phase = Phase::other;
  bool by_library = false; // taken by the communication library, not by the program
};

// A request that was above the limit.
struct Refusal {
  int64_t bytes = 0;
  int64_t held_bytes = 0;  // at that moment
  int64_t change = 0;      // ordinal that the change would have had
  int64_t at_ns = 0;
  int64_t mark = 0;
  Phase phase = Phase::other;
  bool by_library = false;
};

// Safe to use from any thread.
class Ledger {
 public:
  // No limit if it is negative.
  explicit Ledger(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  int64_t limit_bytes() const { return limit_bytes_; }
  int64_t held_bytes() const { return held_bytes_; }

  // Sets bytes aside for a block to come; false, and nothing is set aside, if the
  // limit would be passed.
  bool reserve(int64_t bytes);
  void unreserve(int64_t bytes) { held_bytes_ -= bytes; }
  // `block` lies at `address`; its bytes are reserved. Sets its ordinal.
  void took(const void* address, Block block);
  struct Given {
    int64_t bytes = 0; // 0: there is no such block
    bool by_library = false;
  };
  Given gave(const void* address, int64_t at_ns, int64_t mark);
  void refused(Refusal refusal);

  // The block at `address`, if there is one, is (also) that.
  void recognise(const void* address, Recognised as, int32_t owner);
  // The owner of the parameter at `address`; -1 if there is none.
  int32_t owner_of_parameter(const void* address) const;
  // The ordinal that the next change will have.
  int64_t next_change() const;
  // Whether a block that was taken in an optimizer's step since `change` is held
  // still and not recognised.
  bool keeps_from_optimizer(int64_t change) const;

  std::vector<Block> blocks() const; // in the order in which they were taken
  std::vector<Refusal> refusals() const;

  // Around a fork: nobody is in the middle of a change.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  const int64_t limit_bytes_;
  std::atomic<int64_t> held_bytes_{0};
  mutable std::mutex mutex_;
  std::vector<Block> blocks_;
  std::unordered_map<const void*, size_t> held_; // block at an address
  std::vector<Refusal> refusals_;
  int64_t num_changes_ = 0;
  int64_t last_ns_ = 0;
};

} // namespace crystal
