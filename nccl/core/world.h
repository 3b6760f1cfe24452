// One logical rank's world: who it is, the groups it made, the calls it made,
// and what its virtual peers would have sent where that is known.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/call_record.h"
#include "core/group.h"
#include "core/release.h"
#include "core/trace.h"

namespace crystal {

// What one rank contributed to one call: the bytes of its tensor, and for
// all_to_all with explicit splits how many elements go to each peer.
struct Payload {
  std::string dtype;
  std::string bytes;
  std::vector<int64_t> splits;
};

// What this rank itself contributed to a call whose values steer programs.
struct Contribution {
  std::string group; // identity
  int64_t seq = 0;
  int rank = -1; // global
  int peer = -1; // global receiver of a send, else -1
  Payload payload;
};

// A control value for which there was no payload, so that it was invented.
struct Invented {
  int64_t call = 0;
  std::string key;
  std::string how; // "mirrored", "zeros", "kept"
};

class World {
 public:
  World(int rank, int size, uint64_t seed);

  int rank() const { return rank_; }
  int size() const { return size_; }
  uint64_t seed() const { return seed_; }

  // --- mates: the ranks that run for real side by side in processes of this host,
  // this one among them. To be set before the first group is created. What is
  // exchanged with one may take `limit_ms`; 0 leaves it to the group's timeout.
  void set_mates(std::vector<int> ranks, int64_t limit_ms);
  int64_t mates_limit_ms() const { return mates_limit_ms_; }

  // --- groups. Members must be given in group order; empty means everybody.
  std::shared_ptr<Group> create_group(std::vector<int> members);
  std::vector<std::shared_ptr<Group>> groups() const;
  // How many take part in a store-based barrier below a group's name: the size of
  // the group that the key names, or `otherwise`.
  void name_group(const std::string& name, int size);
  int size_of_group_named_in(const std::string& store_key, int otherwise) const;

  // --- calls
  // Makes the record of a call that has just arrived, and asks when it ends.
  CallRecord arrive(const Call& call, Group& group, int64_t arrival_ns,
                    Transport transport = Transport::timed);
  // Records a call that was made elsewhere and ended then.
  CallRecord record(const Call& call, Group& group, int64_t arrival_ns, int64_t release_ns);
  // The caller of `call` goes on; how long the call itself took is no computation.
  void returned(int64_t call, int64_t at_ns);
  void waited(int64_t call, int64_t begin_ns, int64_t end_ns);
  int64_t new_batch();
  // Small number of the calling host thread, in the order of their first calls.
  int64_t this_thread();
  // While it lives, calls of this thread count as that lane's: a callback belongs
  // to the thread that registered it, whenever and wherever it runs.
  struct Lane {
    explicit Lane(int64_t lane);
    ~Lane();
    int64_t before;
  };
  void keep_records(bool keep);
  std::vector<CallRecord> take_records();
  // What happened on the host threads, while records are kept.
  struct Events {
    std::vector<CallRecord> calls;
    std::vector<Wait> waits;
    std::vector<Mark> marks;
    std::vector<Allocation> allocations;
    int64_t begin_ns = 0;
    int64_t num_marks = 0;
  };
  Events events() const;
  int64_t num_calls() const;
  void set_release_rule(std::shared_ptr<ReleaseRule> rule) { rule_ = std::move(rule); }
  const std::shared_ptr<ReleaseRule>& release_rule() const { return rule_; }
  // From here on calls have to be those of a trace.
  void follow(std::shared_ptr<Trace> trace) { trace_ = std::move(trace); }
  const std::shared_ptr<Trace>& trace() const { return trace_; }
  // Begins an iteration: payload positions count from here. Once a program sets
  // its marks by hand, others are ignored.
  void mark(bool by_hand);
  int64_t marks() const { return mark_; }

  // --- payloads. Ranks are global; `peer` is the receiver of a send, else -1.
  void add_payload(const std::string& group, int64_t seq, int rank, int peer, Payload payload);
  // The position's payloads by (rank, peer); null where nothing is known of the call.
  using CallPayloads = std::map<std::pair<int, int>, Payload>;
  std::shared_ptr<const CallPayloads> payloads(const Group& group, int64_t seq) const;
  void drop_payload(const std::string& group, int64_t seq, int rank, int peer);

  // Asked for control values that are not known yet: (group, sequence number,
  // global ranks that contribute them, global receiver or -1, the call's key). It
  // adds what it finds by add_payload(). A live source makes what it does not
  // find yet and may take as long as it needs; a book has it or has it not.
  using PayloadSource = std::function<void(
      const Group&, int64_t, const std::vector<int>&, int, const std::string&)>;
  void set_payload_source(PayloadSource source, bool is_live) {
    source_ = std::move(source);
    source_is_live_ = is_live;
  }
  bool has_payload_source() const { return static_cast<bool>(source_); }
  bool has_live_source() const { return source_ && source_is_live_; }
  // Asks the source for those of `ranks` that are not known. True if it was asked.
  bool fetch(const Group& group, int64_t seq, const std::vector<int>& ranks, int peer,
             const std::string& key);

  // Messages to oneself, which no peer has to invent.
  void send_to_self(int group, std::string bytes);
  // Empty where none is on its way.
  std::string receive_from_self(int group);

  // --- this rank's own contributions, for the book that serves others
  void keep_contributions(bool keep) { keep_contributions_ = keep; }
  bool keeps_contributions() const { return keep_contributions_; }
  void contribute(Contribution contribution);
  std::vector<Contribution> take_contributions();

  // --- control values without payload
  void set_strict(bool strict) { strict_ = strict; }
  // Notes that one was invented; an error when strict.
  void invented(const CallRecord& record, const Group& group, const char* how);
  // The same for a value that is invented above the backend.
  void note_invented(const std::string& what, const std::string& how);
  std::vector<Invented> inventions() const;
  int64_t num_invented() const;

  // While above zero, a receive from a virtual root keeps what the buffer
  // holds: set around calls whose buffers are known to be initialised.
  void keep_buffers(bool keep) { keep_buffers_ += keep ? 1 : -1; }
  bool keeps_buffers() const { return keep_buffers_ > 0; }
  // While above zero, messages of bytes are pickled objects, whatever their size.
  void move_objects(bool begin) { move_objects_ += begin ? 1 : -1; }
  bool moves_objects() const { return move_objects_ > 0; }

  // --- memory, where the allocator reports it
  void keep_memory(bool keep) { keep_memory_ = keep; }
  bool keeps_memory() const { return keep_memory_; }
  void allocated(int64_t bytes);

 private:
  // Time that this thread has not spent in waits since its last mark; -1 if records are not
  // kept, or another thread set that.
  int64_t computed_since_mark(int64_t lane, int64_t at_ns);

  CallRecord make_record(const Call& call, Group& group, int64_t arrival_ns); // with the lock
  void keep(const CallRecord& record);
  // Group identity, sequence number.
  using PayloadKey = std::pair<std::string, int64_t>;

  const int rank_;
  const int size_;
  const uint64_t seed_;
  std::vector<int> mates_; // sorted
  int64_t mates_limit_ms_ = 0;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Group>> groups_;
  std::map<std::vector<int>, int> created_; // groups so far, by members
  std::unordered_map<std::string, int> group_sizes_;
  std::map<std::thread::id, int64_t> threads_;
  std::vector<CallRecord> records_;
  std::vector<Wait> waits_;
  std::vector<Mark> mark_times_;
  size_t counted_waits_ = 0; // at the last mark
  int64_t begin_ns_ = 0;
  int64_t num_events_ = 0;
  std::atomic<bool> keep_records_{false};
  int64_t num_calls_ = 0;
  int64_t num_batches_ = 0;
  int64_t batches_at_mark_ = 0;
  std::map<int, std::deque<std::string>> to_self_;
  std::shared_ptr<Trace> trace_;
  std::atomic<int64_t> mark_{0};
  bool marked_by_hand_ = false;
  std::shared_ptr<ReleaseRule> rule_;
  std::map<PayloadKey, std::shared_ptr<CallPayloads>> payloads_;
  PayloadSource source_;
  bool source_is_live_ = false;
  bool keep_contributions_ = false;
  std::vector<Contribution> contributions_;
  bool strict_ = false;
  int keep_buffers_ = 0;
  std::atomic<int> move_objects_{0};
  std::atomic<bool> keep_memory_{false};
  std::vector<Allocation> allocations_;
  std::vector<Invented> inventions_;
  int64_t num_invented_ = 0;
};

// The process's world; null before set_world().
std::shared_ptr<World> the_world();
void set_world(std::shared_ptr<World> world);

} // namespace crystal
