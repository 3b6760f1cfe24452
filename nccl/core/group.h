// A communicator as the logical world knows it: its members in group order,
// and which of the groups with just these members it is.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace crystal {

// Where a call stands in its group. `seq` counts from the group's creation,
// `seq_in_mark` from the last iteration mark. Collectives count per group,
// point-to-point calls per ordered pair of members, because only those two
// orders are the same on every rank that takes part.
struct Position {
  int64_t seq = 0;
  int64_t mark = 0;
  int64_t seq_in_mark = 0;
};

class Group {
 public:
  // `members` are global ranks in group order; `creation` says how many groups
  // with the same members this rank created before.
  Group(int id, std::vector<int> members, int my_rank, int creation);

  int id() const { return id_; }
  int size() const { return static_cast<int>(members_.size()); }
  // This rank's index in the group.
  int rank() const { return rank_; }
  int global(int group_rank) const { return members_[group_rank]; }
  const std::vector<int>& members() const { return members_; }
  int creation() const { return creation_; }
  // Shape of the member list without its origin: see axis_signature().
  const std::string& signature() const { return signature_; }
  // Same text on every member: digest of the members, '#', creation index.
  const std::string& identity() const { return identity_; }

  // Members that run for real in processes of this host, this rank among them, as
  // ascending group ranks; none where nobody but this rank does.
  const std::vector<int>& mates() const { return mates_; }
  void set_mates(std::vector<int> group_ranks) { mates_ = std::move(group_ranks); }
  bool is_mate(int group_rank) const;
  bool all_mates() const { return mates_.size() > 1 && mates_.size() == members_.size(); }

  // What the program calls it, as last heard.
  const std::string& description() const { return description_; }
  void describe(const std::string& text) { description_ = text; }
  // Whose API the program called: "gloo" or "nccl"; "" where it is not known.
  const std::string& backend() const { return backend_; }
  void set_backend(const std::string& name) { backend_ = name; }

  Position next_collective(int64_t mark) { return advance(collective_, mark); }
  Position next_sent(int to, int64_t mark) { return advance(pairs_[{rank_, to}], mark); }
  Position next_received(int from, int64_t mark) {
    return advance(pairs_[received(from)], mark);
  }
  int64_t num_collectives() const { return collective_.total; }
  int64_t num_received(int from) const {
    const auto pair = pairs_.find(received(from));
    return pair == pairs_.end() ? 0 : pair->second.total;
  }
  // The member whose message a receive from any source takes: every other
  // member in turn, as when each of them sends once.
  int next_source();

 private:
  struct Counter {
    int64_t total = 0;
    int64_t in_mark = 0;
    int64_t mark = 0;
  };
  static Position advance(Counter& counter, int64_t mark);
  // Both ends of a message to oneself are here, so each needs a counter.
  std::pair<int, int> received(int from) const { return {from == rank_ ? -1 : from, rank_}; }

  int id_;
  std::vector<int> members_;
  int rank_;
  std::vector<int> mates_;
  int creation_;
  std::string signature_;
  std::string identity_;
  std::string description_;
  std::string backend_;
  Counter collective_;
  std::map<std::pair<int, int>, Counter> pairs_;
  int sources_taken_ = 0;
};

// The member list relative to its first member, as sizes and strides from the
// innermost axis out: "8:1" (eight neighbours), "4:1,2:32" (two blocks of four,
// 32 apart), "1" (alone). Lists without such a form give "irregular:" and a
// digest of the offsets. Ranks that play the same part in a symmetric layout
// see the same text.
std::string axis_signature(const std::vector<int>& members);

// 64-bit FNV-1a, in hex; for names, not for security.
std::string digest(const std::vector<int>& numbers);

} // namespace crystal
