// External ranks in processes of this host: one memory segment without a name,
// which the kernel takes back with the last process that maps it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "replay/port.h"

namespace crystal::replay {

// Wakes the engine's thread when it sleeps.
struct Bell {
  std::atomic<uint32_t> count{0};
  std::atomic<uint32_t> is_asleep{0};

  void ring();
  void ring_if_asleep();
  // Until it rings after `count` was `seen`, or the limit is over.
  void sleep(uint32_t seen, int64_t limit_ns);
};

// Calls of a rank that may be open at once; the last so many can be waited for.
inline constexpr int64_t kMostOpen = 1024;

struct alignas(64) Slot {
  std::atomic<uint32_t> word{0}; // low bits of the ticket, and its state: a futex
  std::atomic<int32_t> waiters{0};
  std::atomic<int32_t> watchers{0}; // who wait, but whose rank does not count as waiting
  std::atomic<int32_t> call{0};
  std::atomic<int64_t> start_ns{0};
  std::atomic<int64_t> end_ns{0};
};

// One external rank. Requests go in at the tail (client) and out at the head (engine).
struct Side {
  int32_t rank = 0;
  std::atomic<int32_t> pid{0}; // of its process, once there is one
  std::atomic<int32_t> num_threads{1};
  std::atomic<int32_t> waiting{0}; // threads that sleep in a wait
  std::atomic<int32_t> has_finished{0};
  std::atomic<int64_t> explained{0}; // 1 + ticket that `text` is about
  char text[2048] = {};
  alignas(64) std::atomic<uint64_t> tail{0};
  alignas(64) std::atomic<uint64_t> head{0};
  struct alignas(64) Entry {
    Request request;
  } ring[kMostOpen];
  Slot slots[kMostOpen];
};

struct Header {
  uint64_t magic = 0;
  uint64_t nonce = 0;
  int64_t epoch_ns = 0;
  int64_t spin_ns = 0; // of waiting clients
  int32_t num_sides = 0;
  int32_t pid = 0; // of the engine's process
  int32_t has_thread = 0;
  std::atomic<int32_t> state{0}; // 0, or the crystal_replay_error that ended it
  char text[2048] = {};
  alignas(64) Bell bell;
};

class Segment {
 public:
  // A new one.
  Segment(const std::vector<int32_t>& ranks, int64_t epoch_ns, int64_t spin_ns, bool has_thread);
  // Another process's.
  explicit Segment(const std::string& address);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Header& header() const { return *static_cast<Header*>(base_); }
  Side& side(int32_t number) const;
  Side* side_of(int32_t rank) const;
  std::string address() const;

 private:
  void map(size_t size);

  int fd_ = -1;
  void* base_ = nullptr;
  size_t size_ = 0;
};

// The engine's end.
class SharedPort final : public Port {
 public:
  explicit SharedPort(std::shared_ptr<Segment> segment);
  ~SharedPort() override;

  bool poll(Request* request) override;
  bool is_quiet() const override;
  void deliver(int32_t rank, int64_t ticket, int64_t start_ns, int64_t end_ns) override;
  void answer(int32_t rank, int64_t ticket, const std::string& text) override;
  void close(int code, const std::string& text) override;
  std::string find_dead() override;
  int64_t blocked_ticket(int32_t rank) const override;

 private:
  Side& of(int32_t rank) const { return *by_rank_[rank]; }

  std::shared_ptr<Segment> segment_;
  std::vector<Side*> sides_;
  std::vector<Side*> by_rank_;
  std::vector<int> pidfds_; // by side
  size_t next_ = 0;         // side that is polled first
};

// Whoever waits in the engine's own process can compute in the meantime.
struct Helper {
  virtual ~Helper() = default;
  // Takes requests and computes a little; false if there was nothing to do.
  virtual bool help() = 0;
  // What the engine's thread does besides: finds the dead and circles of waiting.
  // False if it found nothing to do.
  virtual bool look() = 0;
  virtual bool has_thread() const = 0;
};

// The rank's end. Its threads may share it.
class Client {
 public:
  Client(std::shared_ptr<Segment> segment, int32_t rank, int32_t num_threads,
         std::shared_ptr<Helper> helper);
  ~Client(); // the rank makes no more calls
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Its ticket. A time of -1 is now.
  int64_t arrive(const crystal_instruction& call, int64_t at_ns);
  void mark(int64_t at_ns);
  void tell_slowness(double factor);
  // False at the limit, where `reason` (if any) says what the call waits for.
  // With `counts` the rank makes no call of this thread in the meantime.
  bool wait(int64_t ticket, int64_t limit_ns, bool counts, crystal_release* release,
            std::string* reason);
  // Until this time; computes in the meantime if it can.
  void wait_until(int64_t at_ns);
  int64_t now_ns() const { return monotonic_ns() - segment_->header().epoch_ns; }
  int32_t pid() const { return pid_; } // of the process that it belongs to

 private:
  void push(const Request& request); // with push_lock_
  void nudge();
  void check_open() const;
  void check_engine() const;
  // Waits a while, visibly to the engine.
  void rest(Slot& slot, uint32_t pending, int64_t limit_ns, bool counts, bool spins);
  std::string explain(int64_t ticket, int32_t call);

  std::shared_ptr<Segment> segment_;
  Side* side_ = nullptr;
  int32_t rank_ = 0;
  const int32_t pid_;
  int engine_pidfd_ = -1; // none in the engine's own process
  std::shared_ptr<Helper> helper_;
  std::mutex push_lock_;
  std::mutex explain_lock_;
  int64_t next_ticket_ = 0;
};

} // namespace crystal::replay
