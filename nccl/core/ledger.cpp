#include "core/ledger.h"

#include <algorithm>

namespace crystal {
namespace {

// A program that tries smaller and smaller sizes is refused often; the first ones
// tell what held the memory.
constexpr size_t kRefusalsKept = 100;

} // namespace

const char* to_string(Phase phase) {
  switch (phase) {
    case Phase::forward: return "forward";
    case Phase::backward: return "backward";
    case Phase::optimizer: return "optimizer";
    case Phase::communication: return "communication";
    default: return "other";
  }
}

const char* to_string(Recognised as) {
  switch (as) {
    case Recognised::parameter: return "parameter";
    case Recognised::gradient: return "gradient";
    case Recognised::optimizer: return "optimizer";
    case Recognised::communication: return "communication";
    default: return "";
  }
}

bool Ledger::reserve(int64_t bytes) {
  const int64_t held = held_bytes_ += bytes;
  if (limit_bytes_ >= 0 && held > limit_bytes_) {
    held_bytes_ -= bytes;
    return false;
  }
  return true;
}

void Ledger::took(const void* address, Block block) {
  std::lock_guard<std::mutex> lock(mutex_);
  block.taken = num_changes_++;
  block.taken_ns = last_ns_ = std::max(last_ns_, block.taken_ns);
  held_[address] = blocks_.size();
  blocks_.push_back(block);
}

Ledger::Given Ledger::gave(const void* address, int64_t at_ns, int64_t mark) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = held_.find(address);
  if (found == held_.end()) {
    return {};
  }
  Block& block = blocks_[found->second];
  held_.erase(found);
  block.given = num_changes_++;
  block.given_ns = last_ns_ = std::max(last_ns_, at_ns);
  block.given_mark = mark;
  held_bytes_ -= block.bytes;
  return {block.bytes, block.by_library};
}

void Ledger::refused(Refusal refusal) {
  std::lock_guard<std::mutex> lock(mutex_);
  refusal.change = num_changes_;
  if (refusals_.size() < kRefusalsKept) {
    refusals_.push_back(refusal);
  }
}

void Ledger::recognise(const void* address, Recognised as, int32_t owner) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = held_.find(address);
  if (found == held_.end()) {
    return;
  }
  Block& block = blocks_[found->second];
  if (as > block.as) {
    block.as = as;
    block.owner = owner;
    block.is_shared = false;
  } else if (as == block.as && owner != block.owner) {
    block.is_shared = true;
  }
}

int32_t Ledger::owner_of_parameter(const void* address) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = held_.find(address);
  if (found == held_.end()) {
    return -1;
  }
  const Block& block = blocks_[found->second];
  return block.as == Recognised::parameter ? block.owner : -1;
}

int64_t Ledger::next_change() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_changes_;
}

bool Ledger::keeps_from_optimizer(int64_t change) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto block = blocks_.rbegin(); block != blocks_.rend() && block->taken >= change; ++block) {
    if (block->phase == Phase::optimizer && block->given < 0 &&
        block->as == Recognised::nothing) {
      return true;
    }
  }
  return false;
}

std::vector<Block> Ledger::blocks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return blocks_;
}

std::vector<Refusal> Ledger::refusals() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return refusals_;
}

} // namespace crystal
