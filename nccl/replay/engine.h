// The engine behind replay.h. One thread, max-plus arithmetic on integers: a
// lane runs until it waits for something that is not determined yet, and whoever
// determines it puts the lane back into the queue.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "replay/durations.h"
#include "replay/failure.h"
#include "replay/replay.h"

namespace crystal::replay {

struct Program {
  std::vector<crystal_lane> lanes;
  std::vector<crystal_instruction> instructions;
  int32_t num_handles = 0;
  int32_t num_channels = 0;
};

class Engine {
 public:
  int add_program(Program program);
  void set_communicators(const int32_t* sizes, int32_t n);
  void add_ranks(int32_t n, const int32_t* programs, const int64_t* begin,
                 const int32_t* connections);
  Durations& durations() { return durations_; }
  void set_rank_factors(const double* factors);
  void set_link_factors(const double* factors);
  void set_link_classes(const int32_t* classes);
  void watch(int32_t rank);
  void set_perturbations(const crystal_perturbation* list, int32_t n);
  void trace(int32_t iteration) { traced_ = iteration; }

  void run(int32_t num_iterations);

  // Instead of run(): some ranks are outside (external.cpp). None of their lanes
  // runs; their calls come by arrive(), and what does not wait for one of these
  // is computed by work(). Results depend on the arrivals alone, not on when they come.
  struct Listener {
    virtual ~Listener() = default;
    // A call of an external rank has its end. Comes out of arrive() and work().
    virtual void known(int32_t rank, int64_t ticket, int64_t start_ns, int64_t end_ns) = 0;
  };
  // The others are at most `ahead` iterations ahead of the slowest external rank.
  void begin(int32_t num_iterations, const std::vector<int32_t>& external, int32_t ahead,
             Listener* listener);
  void arrive(int32_t rank, const crystal_instruction& call, int64_t at_ns, int64_t ticket);
  // An iteration of an external rank ends.
  void mark(int32_t rank, int64_t at_ns);
  // An external rank computes so many times as long as its durations say. Ranks that are not
  // external do from here on, too; by the mean of those that tell.
  void set_slowness(int32_t rank, double factor);
  // An external rank makes no more calls.
  void finish(int32_t rank);
  // Up to so many lanes go on; false if none could.
  bool work(int num_lanes);
  bool is_ready() const { return !woken_.empty() || queue_size_ > 0 || !soonest_.is_empty(); }
  // The next beginning or end of a transfer that shares links, if it is due by then and
  // nothing can arrive before. False if there is none.
  bool happen_until(int64_t at_ns);
  // When the next one is due; -1 if there is none.
  int64_t next_happening() const { return agenda_.empty() ? -1 : agenda_.top().at; }
  // Lets the others one iteration further ahead; false if none is held back.
  bool lift_horizon();
  // What a call of an external rank waits for.
  std::string explain(int32_t rank, int64_t ticket) const;

  int64_t num_participations() const { return num_participations_; }
  const std::vector<int64_t>& marks(int32_t rank) const { return marks_.at(rank); }
  const std::vector<crystal_breakdown>& breakdown(int32_t rank) const { return parts_.at(rank); }
  std::vector<int64_t> lane_ends(int32_t rank) const;
  const std::vector<crystal_event>& events() const { return events_; }
  std::vector<crystal_step> critical_path() const;

 private:
  static constexpr int32_t kNone = -1;

  // A call of a rank that has not been waited for yet.
  struct Handle {
    int64_t arrival = 0;
    int32_t instance = kNone;
    int32_t cls = 0;
    uint8_t ends = 0;
    bool is_message = false;
  };
  struct Lane {
    int64_t t = 0;
    const crystal_instruction* at = nullptr;
    const crystal_instruction* section_end = nullptr;
    int32_t rank = 0;
    int32_t iteration = 0;
    int32_t next = kNone; // in a list of waiters
    bool is_done = false;
    bool waits_in_channel = false;
    Handle waits_for; // while it waits for a call
    crystal_breakdown parts{};
  };
  // One communication that some participants have reached.
  struct Instance {
    int64_t last_arrival = 0;
    int64_t root_arrival = -1;
    int64_t second_arrival = -1; // the one before the last
    int64_t transfer = 0; // of participants that end with all
    int32_t last_lane = kNone;
    int32_t last_at = kNone; // what it did before, by its place in the lane's body
    int32_t root_lane = kNone;
    int32_t root_at = kNone;
    int32_t comm = kNone;
    int32_t seq = 0;
    int32_t arrived = 0;
    int32_t refs = 0;
    int32_t form = 0;
    int32_t first_lane = kNone;
    int32_t first_call = 0;
    int32_t wait_for_all = kNone;  // lanes
    int32_t wait_for_root = kNone; // lanes
    int32_t tickets = kNone;       // external ranks' calls whose end is not known
    int32_t next = kNone;          // open ones of the communicator, or free ones
    bool is_complete = false;
    bool is_shared = false; // its end depends on other transfers until it is settled
    int64_t settled_end = -1;
    int64_t planned_end = 0; // while it is under way
    int32_t divisor = 1;     // of its speed
    std::vector<int32_t> ranks; // of its participants, if it is shared
  };
  // Something that happens to a shared transfer. Ends come before starts.
  struct Happening {
    int64_t at;
    bool is_start;
    int32_t comm;
    int32_t seq;
    int32_t instance;
    bool operator>(const Happening& other) const {
      return std::tie(at, is_start, comm, seq) >
          std::tie(other.at, other.is_start, other.comm, other.seq);
    }
  };
  struct Communicator {
    int32_t size = 0;
    int32_t first = kNone; // open instances, by sequence number
    int32_t last = kNone;
  };
  struct Connection {
    int32_t comm = kNone;
    int32_t seq = 0;
  };
  // Lanes that can go on, by their time in steps of half a millisecond, some seconds
  // round: what lies further ahead comes too early, which costs time but changes nothing.
  class Soonest {
   public:
    void clear() {
      first_.assign(kNum, kNone);
      size_ = 0;
    }
    bool is_empty() const { return size_ == 0; }
    void push(std::vector<Lane>& lanes, int32_t lane) {
      const int64_t step = lanes[lane].t >> kShift;
      now_ = size_++ == 0 ? step : std::min(now_, step);
      lanes[lane].next = first_[step % kNum];
      first_[step % kNum] = lane;
    }
    int32_t pop(std::vector<Lane>& lanes) {
      while (first_[now_ % kNum] == kNone) {
        ++now_;
      }
      const int32_t lane = first_[now_ % kNum];
      first_[now_ % kNum] = lanes[lane].next;
      lanes[lane].next = kNone;
      --size_;
      return lane;
    }

   private:
    static constexpr int kShift = 19;
    static constexpr int64_t kNum = 8192;
    std::vector<int32_t> first_;
    int64_t now_ = 0;
    int64_t size_ = 0;
  };
  // A call of an external rank.
  struct Ticket {
    int64_t number = 0;
    int32_t rank = 0;
    int32_t call = 0;
    Handle handle;
    int32_t next = kNone; // of the instance, or free ones
  };
  struct Channel {
    struct Signal {
      int64_t t;
      int32_t lane;
      int32_t at;
    };
    // First in, first out; small while it is empty, as there are many.
    std::vector<Signal> signals;
    uint32_t taken = 0;
    int32_t waiter = kNone;

    bool is_empty() const { return taken == signals.size(); }
    Signal take() {
      const Signal signal = signals[taken++];
      if (taken == signals.size()) {
        signals.clear();
        taken = 0;
      } else if (taken >= 64 && 2 * taken > signals.size()) {
        signals.erase(signals.begin(), signals.begin() + taken);
        taken = 0;
      }
      return signal;
    }
  };
  struct Rank {
    int32_t program = 0;
    int64_t first_lane = 0;
    int64_t first_connection = 0;
    int32_t num_connections = 0;
    int64_t first_handle = 0;
    int64_t first_channel = 0;
    bool is_watched = false;
    bool is_external = false;
    bool has_finished = false; // an external one
    bool is_perturbed = false;
  };
  // When an instruction of the traced iteration was done, and what bound it.
  struct Moment {
    int64_t end = 0;
    int64_t start = 0; // when it, or what bound it, began
    int64_t slack = -1;
    int32_t by_lane = kNone; // its own lane's last instruction otherwise
    int32_t by_at = kNone;
  };

  void check_classes() const;
  void be_offline();
  void reset(int32_t num_iterations);
  // Until the lane waits, ends, or has had its turn.
  void advance(int32_t lane);
  bool next_section(Lane& lane) const;
  Handle post(int32_t lane, const crystal_instruction& i);
  int32_t open_instance(int32_t comm, int32_t seq, int32_t lane, const crystal_instruction& i);
  void complete(int32_t instance);
  void wake(int32_t* list, int32_t instance);
  // True if the end of the call is known; the lane has it then.
  bool take_end(Lane& lane, const Handle& handle);
  bool is_determined(const Handle& handle) const;
  int64_t end_of(const Handle& handle, int64_t* start) const;
  int64_t transfer_of(int32_t cls, int32_t comm, int32_t seq) const;
  void release(int32_t instance);
  void hold(const Handle& handle);
  void settle_tickets(int32_t instance);
  void set_horizon();
  void happen();
  // After transfers at these ranks have begun or ended.
  void share_again(const std::vector<int32_t>& ranks, int32_t link_class, int64_t at);
  std::vector<int32_t>& under_way(int32_t rank, int32_t link_class) {
    return under_way_[static_cast<size_t>(rank) * num_link_classes_ + link_class];
  }
  int64_t perturbed(const Lane& lane, int32_t index, int64_t ns);
  // Where in its lane's body; none outside the traced iteration.
  int32_t traced_at(const Lane& lane) const;
  int32_t before(const Lane& lane) const; // the instruction before, likewise
  void remember(const Lane& lane, int64_t start, int64_t slack, int32_t by_lane = kNone,
                int32_t by_at = kNone);
  void await(Lane& lane, const Channel::Signal& signal);
  void note(int32_t lane, const crystal_instruction& i, const Handle& handle);
  void settle_notes(int32_t instance);

  [[noreturn]] void report_mismatch(const Instance& instance, int32_t lane,
                                    const crystal_instruction& i) const;
  [[noreturn]] void report_deadlock() const;
  [[noreturn]] void report_left_over(const Instance& instance) const;
  std::string describe(int32_t lane) const;
  // Who takes part in a communication and has not come to it, by rank.
  std::vector<int32_t> missing_ranks(const Instance& instance) const;
  int32_t who_is_missing(int32_t lane) const;

  std::vector<Program> programs_;
  std::vector<Communicator> comms_;
  std::vector<Rank> ranks_;
  std::vector<Connection> connections_;
  std::vector<Handle> handles_;
  std::vector<Channel> channels_;
  std::vector<Lane> lanes_;
  std::vector<Instance> instances_;
  int32_t free_instance_ = kNone;
  Durations durations_;
  std::vector<double> rank_factors_;
  std::map<int32_t, double> slowness_of_; // by external rank
  double slowness_ = 1.0;
  std::vector<double> link_factors_;
  std::vector<int32_t> link_classes_;
  int32_t num_link_classes_ = 0;
  int64_t happened_ns_ = 0; // until when the agenda has been gone through
  std::vector<std::vector<int32_t>> under_way_; // shared transfers by rank and class
  std::priority_queue<Happening, std::vector<Happening>, std::greater<>> agenda_;
  std::vector<int32_t> queue_; // ring of lanes that can go on
  size_t queue_begin_ = 0;
  size_t queue_size_ = 0;
  std::vector<int32_t> woken_;
  Soonest soonest_; // instead of the queue, in a live run
  // A lane that never waits gives way after so many instructions, or it would run
  // through all iterations and leave as many communications open.
  static constexpr int kTurn = 1024;
  static constexpr int kLiveTurn = 64; // an arrival waits for a turn to end
  int turn_ = kTurn;
  static constexpr int32_t kNoHorizon = INT32_MAX;
  int32_t horizon_ = kNoHorizon; // no lane begins what comes after this iteration
  int32_t ahead_ = 0;
  std::vector<int32_t> parked_; // lanes at the horizon
  Listener* listener_ = nullptr;
  std::vector<int32_t> external_;
  std::vector<Ticket> tickets_;
  int32_t free_ticket_ = kNone;
  int32_t new_ticket_ = kNone; // of the arrival at hand
  int32_t num_iterations_ = 0;
  int64_t num_participations_ = 0;
  std::vector<std::vector<int64_t>> marks_;
  std::vector<std::vector<crystal_breakdown>> parts_;
  std::vector<crystal_event> events_;
  std::vector<crystal_perturbation> perturbations_;
  std::vector<uint8_t> is_used_; // PAUSE_AT, and PAUSE_IN within its iteration
  std::vector<int32_t> used_in_;
  int32_t traced_ = 0;
  std::vector<std::vector<Moment>> moments_; // by lane
  struct Note {
    size_t event;
    Handle handle;
  };
  std::unordered_map<int32_t, std::vector<Note>> notes_; // by instance

  bool is_live() const { return listener_ != nullptr; }
  void put_last(int32_t lane);
  void wake_lane(int32_t lane);
  int32_t take_next();
};

} // namespace crystal::replay
