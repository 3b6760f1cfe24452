// The call record: the canonical form of one communication call. Roles,
// period, fingerprint, checks, payloads and durations are all keyed by it, so
// it is made in one place, make_call_record(), whatever holds the call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/group.h"
#include "core/release.h"

namespace crystal {

enum class Kind : uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  send,
  recv,
  barrier,
};
const char* to_string(Kind kind);
// The kind of this name; std::invalid_argument for any other text.
Kind kind_of(const std::string& name);

// Whose call the root's is, as far as a rank's role goes.
enum class Root : uint8_t { none, me, other };
const char* to_string(Root root);

// How a call comes to its data and its end.
enum class Transport : uint8_t {
  timed, // peers are virtual
  mixed, // some are, the others are real
  real,  // all are real
};
const char* to_string(Transport transport);

// A communication call as its backend sees it. Ranks are group ranks.
struct Call {
  Kind kind = Kind::barrier;
  const char* reduce_op = ""; // static text, "" where nothing is reduced
  const char* dtype = "";     // static text in torch's spelling, "" for a barrier
  // Elements by NCCL's convention: what one rank contributes, and for
  // reduce_scatter and scatter what one rank receives; all_to_all: what one
  // rank sends to one peer.
  int64_t count = 0;
  int64_t in_elements = 0;
  int64_t out_elements = 0;
  // Given only where the program gave them. Split sizes are data, not
  // structure: with them `count` is no part of the key.
  std::vector<int64_t> in_splits;
  std::vector<int64_t> out_splits;
  int root = -1;
  int peer = -1;
  bool any_source = false;
  int tag = 0;
  int64_t batch = -1;
  int64_t stream = 0;
  bool is_async = false;
};

struct CallRecord {
  int64_t call = 0; // ordinal among all calls of this rank
  Kind kind = Kind::barrier;
  const char* reduce_op = "";
  const char* dtype = "";
  int64_t count = 0; // -1 where the program gave split sizes
  int group = -1;    // id in the world's group table
  Root root = Root::none;
  int peer_offset = -1;   // (peer - me) mod group size
  bool peer_wraps = false; // the step to the peer passes the group's end
  int64_t batch_in_mark = -1; // ordinal of the batch from the last iteration mark
  int64_t stream = 0;

  // Beside the key.
  int64_t batch = -1; // ordinal of the batch among all of the rank
  Position position;
  int root_rank = -1; // group rank
  int peer_rank = -1; // group rank
  bool any_source = false;
  int tag = 0;
  int64_t in_elements = 0;
  int64_t out_elements = 0;
  std::vector<int64_t> in_splits;
  std::vector<int64_t> out_splits;
  bool is_async = false;
  int64_t arrival_ns = 0; // CLOCK_MONOTONIC
  std::shared_ptr<Release> release; // null if peers that are real set it
  Transport transport = Transport::timed;
  int64_t captured_call = -1; // its ordinal in the trace that is followed, if one is
  int64_t event = 0;          // ordinal among all events of this rank
  int64_t returned_ns = 0;    // when the caller went on
};

// The first time that somebody waited for a call, or found it completed.
struct Wait {
  int64_t event = 0; // ordinal among all events of this rank
  int64_t call = 0;
  int64_t lane = 0;
  int64_t mark = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// When an iteration began.
struct Mark {
  int64_t event = 0;
  int64_t lane = 0;
  int64_t at_ns = 0;
};

// Memory that was taken (bytes above zero) or given back.
struct Allocation {
  int64_t event = 0;
  int64_t lane = 0;
  int64_t mark = 0;
  int64_t at_ns = 0;
  int64_t bytes = 0;
};

// The only place where a call becomes a record. Advances the group's counters.
CallRecord make_call_record(const Call& call, Group& group, int64_t number, int64_t mark);

// The key as text: equal exactly for calls that are equal in structure.
std::string key(const CallRecord& record, const Group& group);

} // namespace crystal
