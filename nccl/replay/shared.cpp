#include "replay/shared.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstring>
#include <fcntl.h>
#include <linux/futex.h>
#include <new>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "replay/engine.h"

namespace crystal::replay {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

constexpr uint64_t kMagic = 0x31306576696c7963; // changes with the layout
constexpr int64_t kSliceNs = 20'000'000;        // a sleeper looks for the dead so often
constexpr int64_t kHelpNs = 20'000;             // longer than one step of help takes
constexpr int64_t kAnswerNs = 1'000'000'000;

enum State : uint32_t { kFree = 0, kPending = 1, kKnown = 2, kFailed = 3 };

uint32_t word_of(int64_t ticket, State state) {
  return (static_cast<uint32_t>(ticket) << 2) | state;
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t value, int64_t limit_ns) {
  const timespec limit{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word, int num) {
  syscall(SYS_futex, word, FUTEX_WAKE, num, nullptr, nullptr, 0);
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int pidfd_open(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

bool has_exited(int pidfd) {
  pollfd p{pidfd, POLLIN, 0};
  return ::poll(&p, 1, 0) > 0;
}

template <size_t n>
void put_text(char (&to)[n], const std::string& text) {
  const size_t length = std::min(text.size(), n - 1);
  std::memcpy(to, text.data(), length);
  to[length] = 0;
}

size_t sides_offset() { return (sizeof(Header) + 63) / 64 * 64; }

[[noreturn]] void refuse(const std::string& what, const std::string& where,
                         const std::string& action) {
  throw Failure(CRYSTAL_REPLAY_INVALID, what + ". " + where + ". " + action + ".");
}

} // namespace

// --- the bell ---------------------------------------------------------------------

void Bell::ring() {
  count.fetch_add(1);
  futex_wake(&count, 1);
}

void Bell::ring_if_asleep() {
  if (is_asleep.load()) {
    ring();
  }
}

void Bell::sleep(uint32_t seen, int64_t limit_ns) { futex_wait(&count, seen, limit_ns); }

// --- the segment --------------------------------------------------------------------

Segment::Segment(const std::vector<int32_t>& ranks, int64_t epoch_ns, int64_t spin_ns,
                 bool has_thread) {
  const size_t size = sides_offset() + ranks.size() * sizeof(Side);
  fd_ = memfd_create("crystal_replay", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(size)) != 0 ||
      fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    const std::string why = std::strerror(errno);
    if (fd_ >= 0) {
      ::close(fd_);
    }
    refuse("Shared memory for the external ranks cannot be had",
           std::to_string(size) + " bytes, " + why,
           "Raise the limits of memory and open files, or take fewer external ranks");
  }
  map(size);
  auto* header = new (base_) Header;
  header->epoch_ns = epoch_ns;
  header->spin_ns = spin_ns;
  header->num_sides = static_cast<int32_t>(ranks.size());
  header->pid = getpid();
  header->has_thread = has_thread;
  header->nonce = static_cast<uint64_t>(monotonic_ns());
  if (getrandom(&header->nonce, sizeof header->nonce, GRND_NONBLOCK) < 0) {
    header->nonce ^= static_cast<uint64_t>(getpid()) << 40;
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    // The kernel's zeros are what the rest of a Side begins with.
    auto* side = reinterpret_cast<Side*>(static_cast<char*>(base_) + sides_offset() +
                                         i * sizeof(Side));
    side->rank = ranks[i];
    side->num_threads.store(1);
  }
  header->magic = kMagic;
}

Segment::Segment(const std::string& address) {
  int32_t pid = 0, fd = 0;
  uint64_t nonce = 0;
  const char* end = address.data() + address.size();
  auto read = std::from_chars(address.data(), end, pid);
  bool is_good = read.ec == std::errc() && read.ptr != end && *read.ptr == ':';
  if (is_good) {
    read = std::from_chars(read.ptr + 1, end, fd);
    is_good = read.ec == std::errc() && read.ptr != end && *read.ptr == ':';
  }
  if (is_good) {
    read = std::from_chars(read.ptr + 1, end, nonce, 16);
    is_good = read.ec == std::errc() && read.ptr == end;
  }
  struct stat status{};
  if (is_good) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
    is_good = fd_ >= 0 && fstat(fd_, &status) == 0 &&
        status.st_size >= static_cast<off_t>(sides_offset());
  }
  if (is_good) {
    map(status.st_size);
    is_good = header().magic == kMagic && header().nonce == nonce && header().pid == pid &&
        size_ == sides_offset() + header().num_sides * sizeof(Side);
  }
  if (!is_good) {
    if (base_ != nullptr) {
      munmap(base_, size_);
    }
    if (fd_ >= 0) {
      ::close(fd_);
    }
    refuse("No replay engine is at this address", "Address " + address,
           "Give the address of a live run of this host that has not ended, from a process of "
           "the same user and version");
  }
}

void Segment::map(size_t size) {
  // All pages now: a fault later costs some ten microseconds of somebody's answer.
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
  if (at == MAP_FAILED) {
    const std::string why = std::strerror(errno);
    ::close(fd_);
    refuse("Shared memory cannot be mapped", std::to_string(size) + " bytes, " + why,
           "Raise the limit of memory, or take fewer external ranks");
  }
  base_ = at;
  size_ = size;
}

Segment::~Segment() {
  munmap(base_, size_);
  ::close(fd_);
}

Side& Segment::side(int32_t number) const {
  return *reinterpret_cast<Side*>(static_cast<char*>(base_) + sides_offset() +
                                  number * sizeof(Side));
}

Side* Segment::side_of(int32_t rank) const {
  for (int32_t i = 0; i < header().num_sides; ++i) {
    if (side(i).rank == rank) {
      return &side(i);
    }
  }
  return nullptr;
}

std::string Segment::address() const {
  char nonce[20] = {};
  std::to_chars(nonce, nonce + sizeof nonce, header().nonce, 16);
  return std::to_string(header().pid) + ":" + std::to_string(fd_) + ":" + nonce;
}

// --- the engine's end ---------------------------------------------------------------

SharedPort::SharedPort(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {
  for (int32_t i = 0; i < segment_->header().num_sides; ++i) {
    Side& side = segment_->side(i);
    sides_.push_back(&side);
    by_rank_.resize(std::max(by_rank_.size(), static_cast<size_t>(side.rank) + 1));
    by_rank_[side.rank] = &side;
  }
  pidfds_.assign(sides_.size(), -1);
}

SharedPort::~SharedPort() {
  for (const int fd : pidfds_) {
    if (fd >= 0) {
      ::close(fd);
    }
  }
}

bool SharedPort::poll(Request* request) {
  for (size_t n = 0; n < sides_.size(); ++n) {
    Side& side = *sides_[next_];
    if (++next_ == sides_.size()) {
      next_ = 0;
    }
    const uint64_t head = side.head.load(std::memory_order_relaxed);
    if (head != side.tail.load()) {
      *request = side.ring[head % kMostOpen].request;
      request->rank = side.rank;
      side.head.store(head + 1, std::memory_order_release);
      return true;
    }
  }
  return false;
}

bool SharedPort::is_quiet() const {
  return std::all_of(sides_.begin(), sides_.end(), [](const Side* side) {
    return side->head.load(std::memory_order_relaxed) ==
        side->tail.load(std::memory_order_acquire);
  });
}

void SharedPort::deliver(int32_t rank, int64_t ticket, int64_t start_ns, int64_t end_ns) {
  Slot& slot = of(rank).slots[ticket % kMostOpen];
  slot.start_ns.store(start_ns, std::memory_order_release);
  slot.end_ns.store(end_ns, std::memory_order_release);
  slot.word.store(word_of(ticket, kKnown));
  if (slot.waiters.load() > 0 || slot.watchers.load() > 0) {
    futex_wake(&slot.word, INT_MAX);
  }
}

void SharedPort::answer(int32_t rank, int64_t ticket, const std::string& text) {
  Side& side = of(rank);
  put_text(side.text, text);
  side.explained.store(ticket + 1);
}

void SharedPort::close(int code, const std::string& text) {
  Header& header = segment_->header();
  put_text(header.text, text);
  header.state.store(code);
  for (Side* side : sides_) {
    for (auto& slot : side->slots) {
      uint32_t word = slot.word.load();
      if ((word & 3) == kPending && slot.word.compare_exchange_strong(word, word | kFailed)) {
        futex_wake(&slot.word, INT_MAX);
      }
    }
  }
}

std::string SharedPort::find_dead() {
  for (size_t i = 0; i < sides_.size(); ++i) {
    Side& side = *sides_[i];
    const int32_t pid = side.pid.load();
    if (pid == 0 || pid == segment_->header().pid) {
      continue;
    }
    bool is_gone = false;
    if (pidfds_[i] < 0) {
      pidfds_[i] = pidfd_open(pid);
      is_gone = pidfds_[i] < 0 && errno == ESRCH;
    }
    is_gone = is_gone || (pidfds_[i] >= 0 && has_exited(pidfds_[i]));
    if (is_gone && !side.has_finished.load()) { // exited: what it had to say is said
      return "Rank " + std::to_string(side.rank) + ", process " + std::to_string(pid);
    }
  }
  return {};
}

int64_t SharedPort::blocked_ticket(int32_t rank) const {
  const Side& side = of(rank);
  const int32_t num_threads = side.num_threads.load();
  if (num_threads < 1 || side.waiting.load() < num_threads) {
    return -1;
  }
  int32_t waiting = 0;
  uint32_t open = 0;
  for (const auto& slot : side.slots) {
    const uint32_t word = slot.word.load();
    if ((word & 3) == kPending && slot.waiters.load() > 0) {
      waiting += slot.waiters.load();
      open = word >> 2;
    }
  }
  return waiting < num_threads ? -1 : static_cast<int64_t>(open);
}

// --- the rank's end -----------------------------------------------------------------

Client::Client(std::shared_ptr<Segment> segment, int32_t rank, int32_t num_threads,
               std::shared_ptr<Helper> helper)
    : segment_(std::move(segment)), side_(segment_->side_of(rank)), rank_(rank),
      pid_(getpid()), helper_(std::move(helper)) {
  const std::string where = "Rank " + std::to_string(rank);
  if (side_ == nullptr) {
    refuse("The rank is not external in this run", where, "Name it when the run starts");
  }
  const Header& header = segment_->header();
  if (!helper_ && !header.has_thread) {
    refuse("The engine has no thread that would serve another process", where,
           "Start the run with a thread");
  }
  check_open();
  if (!helper_ && header.pid != pid_) {
    engine_pidfd_ = pidfd_open(header.pid);
    if (engine_pidfd_ < 0) {
      refuse("The engine's process cannot be watched", where + ", " + std::strerror(errno),
             "Attach from the same host and process namespace, on Linux 5.3 or newer");
    }
  }
  side_->num_threads.store(num_threads);
  int32_t none = 0;
  if (!side_->pid.compare_exchange_strong(none, pid_)) {
    if (engine_pidfd_ >= 0) {
      ::close(engine_pidfd_);
    }
    refuse("The rank has been attached before", where + ", process " + std::to_string(none),
           "Let each external rank attach once");
  }
}

Client::~Client() {
  try {
    const std::lock_guard guard(push_lock_);
    if (segment_->header().state.load() == 0) {
      Request request;
      request.ask = Ask::kFinish;
      push(request);
    }
  } catch (const Failure&) {
    // The run has ended meanwhile.
  }
  side_->has_finished.store(1);
  nudge();
  if (engine_pidfd_ >= 0) {
    ::close(engine_pidfd_);
  }
}

void Client::check_open() const {
  const Header& header = segment_->header();
  if (const int32_t code = header.state.load(); code != 0) {
    throw Failure(code, header.text);
  }
}

void Client::check_engine() const {
  if (engine_pidfd_ >= 0 && has_exited(engine_pidfd_)) {
    check_open(); // it may have closed properly just before
    throw Failure(CRYSTAL_REPLAY_DIED,
                  "The process of the replay engine has died. Rank " + std::to_string(rank_) +
                      ", engine's process " + std::to_string(segment_->header().pid) +
                      ". Look at its log, and start the run again.");
  }
}

int64_t Client::arrive(const crystal_instruction& call, int64_t at_ns) {
  int64_t ticket = 0;
  {
    const std::lock_guard guard(push_lock_);
    check_open();
    ticket = next_ticket_;
    Slot& slot = side_->slots[ticket % kMostOpen];
    if ((slot.word.load(std::memory_order_acquire) & 3) == kPending) {
      throw Failure(CRYSTAL_REPLAY_BUSY,
                    "Too many calls of a rank are open. Rank " + std::to_string(rank_) +
                        ", call " + std::to_string(call.call) + ", " + std::to_string(kMostOpen) +
                        " calls before it. Wait for some of them.");
    }
    ++next_ticket_;
    slot.call.store(call.call, std::memory_order_relaxed);
    slot.word.store(word_of(ticket, kPending));
    Request request;
    request.call = call;
    request.ticket = ticket;
    request.asked_ns = now_ns();
    request.at_ns = at_ns == -1 ? request.asked_ns : at_ns;
    push(request);
  }
  nudge();
  return ticket;
}

void Client::mark(int64_t at_ns) {
  {
    const std::lock_guard guard(push_lock_);
    check_open();
    Request request;
    request.ask = Ask::kMark;
    request.asked_ns = now_ns();
    request.at_ns = at_ns == -1 ? request.asked_ns : at_ns;
    push(request);
  }
  nudge();
}

void Client::tell_slowness(double factor) {
  if (!(factor > 0) || !std::isfinite(factor)) {
    throw Failure(CRYSTAL_REPLAY_INVALID,
                  "A slowness cannot be. Rank " + std::to_string(rank_) + ", factor " +
                      std::to_string(factor) + ". Give a positive number.");
  }
  const std::lock_guard guard(push_lock_);
  check_open();
  Request request;
  request.ask = Ask::kSlowness;
  request.asked_ns = now_ns();
  request.slowness = factor;
  push(request); // nobody waits for it
}

void Client::push(const Request& request) {
  const uint64_t tail = side_->tail.load(std::memory_order_relaxed);
  int64_t limit = 0;
  while (tail - side_->head.load(std::memory_order_acquire) >= static_cast<uint64_t>(kMostOpen)) {
    check_open();
    check_engine();
    const int64_t now = monotonic_ns();
    limit = limit == 0 ? now + kAnswerNs : limit;
    if (now > limit) {
      throw Failure(CRYSTAL_REPLAY_BUSY,
                    "The replay engine does not take requests. Rank " + std::to_string(rank_) +
                        ", " + std::to_string(kMostOpen) +
                        " requests before. See what keeps the engine's process from running.");
    }
    nudge();
    sched_yield();
  }
  side_->ring[tail % kMostOpen].request = request;
  // Either the engine's thread sees this before it sleeps, or this thread sees that it
  // sleeps: both are sequentially consistent.
  side_->tail.store(tail + 1);
}

// Serves the request here, if this is the engine's process, or sees that it is served.
void Client::nudge() {
  if (helper_) {
    helper_->help();
  }
  if (side_->head.load(std::memory_order_acquire) != side_->tail.load(std::memory_order_relaxed)) {
    segment_->header().bell.ring_if_asleep();
  }
}

bool Client::wait(int64_t ticket, int64_t limit_ns, bool counts, crystal_release* release,
                  std::string* reason) {
  Slot& slot = side_->slots[ticket % kMostOpen];
  const uint32_t pending = word_of(ticket, kPending), known = word_of(ticket, kKnown);
  int64_t begun = -1;
  for (;;) {
    const uint32_t word = slot.word.load(std::memory_order_acquire);
    if (word == known) {
      release->start_ns = slot.start_ns.load(std::memory_order_acquire);
      release->end_ns = slot.end_ns.load(std::memory_order_acquire);
      if (slot.word.load(std::memory_order_relaxed) == known) {
        return true;
      }
      continue; // another thread's call has taken the slot
    }
    if (word == word_of(ticket, kFailed)) {
      check_open();
    }
    if (word != pending || ticket < 0) {
      refuse("A ticket is not one of the last that this rank has had",
             "Rank " + std::to_string(rank_) + ", ticket " + std::to_string(ticket),
             "Wait for a call before " + std::to_string(kMostOpen) + " others are made");
    }
    check_open();
    if (limit_ns == 0) {
      return false;
    }
    const bool did = helper_ && helper_->help();
    const int64_t now = monotonic_ns();
    begun = begun < 0 ? now : begun;
    if (now - begun >= limit_ns) {
      if (reason != nullptr) {
        *reason = explain(ticket, slot.call.load(std::memory_order_relaxed));
      }
      return false;
    }
    if (did) {
      continue;
    }
    // Who spins for long is known to wait, all the same, and looks for the dead.
    const bool spins = now - begun < segment_->header().spin_ns;
    if (spins && now - begun < kSliceNs) {
      pause_cpu();
      continue;
    }
    check_engine();
    rest(slot, pending, std::min(limit_ns - (now - begun), kSliceNs), counts, spins);
  }
}

void Client::wait_until(int64_t at_ns) {
  const int64_t spin_ns = segment_->header().spin_ns;
  for (;;) {
    const int64_t left = at_ns - now_ns();
    if (left <= 0) {
      return;
    }
    if (helper_ && left > kHelpNs && helper_->help()) {
      continue;
    }
    if (left > spin_ns) {
      const int64_t ns = std::min(left - spin_ns, kSliceNs);
      const timespec pause{0, ns};
      nanosleep(&pause, nullptr);
      check_open();
      check_engine();
    } else {
      pause_cpu();
    }
  }
}

void Client::rest(Slot& slot, uint32_t pending, int64_t limit_ns, bool counts,
                  bool spins) {
  auto& here = counts ? slot.waiters : slot.watchers;
  here.fetch_add(1);
  side_->waiting.fetch_add(counts);
  if (helper_ && !helper_->has_thread() && helper_->look()) {
    // There was something to do, which may have been what is waited for.
  } else if (spins && (!helper_ || helper_->has_thread())) {
    const int64_t until = monotonic_ns() + limit_ns;
    while (slot.word.load(std::memory_order_acquire) == pending && monotonic_ns() < until) {
      pause_cpu();
    }
  } else {
    futex_wait(&slot.word, pending, limit_ns);
  }
  side_->waiting.fetch_sub(counts);
  here.fetch_sub(1);
}

std::string Client::explain(int64_t ticket, int32_t call) {
  const std::lock_guard one(explain_lock_);
  const std::string where = "Rank " + std::to_string(rank_) + " in call " + std::to_string(call);
  side_->explained.store(0);
  {
    const std::lock_guard guard(push_lock_);
    Request request;
    request.ask = Ask::kExplain;
    request.ticket = ticket;
    push(request);
  }
  nudge();
  for (const int64_t until = monotonic_ns() + kAnswerNs; monotonic_ns() < until;) {
    if (side_->explained.load() == ticket + 1) {
      return side_->text;
    }
    check_open();
    check_engine();
    if (helper_) {
      helper_->help();
    }
    sched_yield();
  }
  return where + ", and the engine does not say what it waits for";
}

} // namespace crystal::replay
