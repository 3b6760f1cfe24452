#include "c10d/memory.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/thread_name.h>
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <utility>

#include "core/clock.h"

namespace crystal {
namespace {

// Above the allocator that torch starts with.
constexpr uint8_t kPriority = 100;
// ProcessGroupGloo's workers, which carry out what the program's threads enqueue.
constexpr const char* kGlooThread = "pt_gloo_runloop";

struct Thread {
  int unwatched = 0;
  int calls = 0;
  int library = 0;
  // Gradients were on since the last backward or step: what is then computed with them
  // off (inside a custom autograd function, a checkpoint) is forward, too.
  bool in_forward = false;
  bool in_optimizer = false;
  int64_t step_begin = 0;  // the ledger's next change when the step began
  int64_t graph_task = -1; // the last one that takes a look at its end
  int64_t as_of_ns = -1;   // when what is freed now became free
  int is_gloo = -1;        // not known yet
};
Thread& this_thread() {
  static thread_local Thread thread;
  return thread;
}

bool is_library(Thread& thread) {
  if (thread.is_gloo < 0) {
    thread.is_gloo = c10::getThreadName() == kGlooThread;
  }
  return thread.library > 0 || thread.is_gloo;
}

std::atomic<bool> forward_begun{false};

Phase phase_of(Thread& thread, int64_t graph_task) {
  if (thread.calls > 0 || is_library(thread)) {
    return Phase::communication;
  }
  if (graph_task >= 0) {
    return Phase::backward;
  }
  if (at::GradMode::is_enabled()) {
    thread.in_forward = forward_begun;
  } else if (thread.in_optimizer) {
    return Phase::optimizer;
  }
  return thread.in_forward ? Phase::forward : Phase::other;
}

// --- what is to be let go of

struct Held {
  End end;
  std::shared_ptr<void> what;
};
struct Due {
  std::mutex mutex;
  std::vector<Held> held; // of the calls under way: a few
  std::atomic<size_t> size{0};
};
Due& the_due() {
  static auto* due = new Due;
  return *due;
}

// Never, where it cannot be known any more: the call fails when somebody waits for it.
int64_t end_of(const Held& held) {
  try {
    const int64_t end_ns = held.end.poll();
    return end_ns < 0 ? INT64_MAX : end_ns;
  } catch (const std::exception&) {
    return INT64_MAX;
  }
}

void release_due(int64_t now_ns) {
  Due& due = the_due();
  if (due.size == 0) {
    return;
  }
  std::vector<std::pair<int64_t, std::shared_ptr<void>>> over; // freed without the lock
  {
    std::lock_guard<std::mutex> lock(due.mutex);
    const auto is_over = [&](Held& held) {
      const int64_t end_ns = end_of(held);
      if (end_ns > now_ns) {
        return false;
      }
      over.emplace_back(end_ns, std::move(held.what));
      return true;
    };
    due.held.erase(std::remove_if(due.held.begin(), due.held.end(), is_over), due.held.end());
    due.size = due.held.size();
  }
  Thread& thread = this_thread();
  const int64_t before = thread.as_of_ns;
  for (auto& [end_ns, held] : over) {
    thread.as_of_ns = end_ns;
    held.reset();
  }
  thread.as_of_ns = before;
}

std::function<void()>& the_look() {
  static auto* look = new std::function<void()>;
  return *look;
}

void look_after_backward(Thread& thread, int64_t graph_task) {
  if (graph_task < 0 || graph_task == thread.graph_task || !the_look()) {
    return;
  }
  thread.graph_task = graph_task;
  torch::autograd::Engine::get_default_engine().queue_callback([] {
    this_thread().in_forward = false;
    the_look()();
  });
}

std::string in_units(int64_t bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) {
    value /= 1024;
  }
  std::ostringstream text;
  text.precision(unit == 0 ? 0 : 2);
  text << std::fixed << value << ' ' << kUnits[unit];
  return text.str();
}

// Passes everything on to the allocator that was there. A profiler's state could
// report allocations as well, but then the program could not start its own.
class Watcher : public c10::Allocator {
 public:
  Watcher(std::shared_ptr<World> world, c10::Allocator* inner, int64_t limit_bytes)
      : world_(std::move(world)), inner_(inner), ledger_(limit_bytes) {}

  c10::DataPtr allocate(size_t size) override {
    Thread& thread = this_thread();
    if (thread.unwatched > 0 || !on_) {
      return inner_->allocate(size);
    }
    const int64_t at_ns = now_ns();
    release_due(at_ns);
    const int64_t graph_task = torch::autograd::get_current_graph_task_id();
    look_after_backward(thread, graph_task);
    Block block;
    block.bytes = static_cast<int64_t>(size);
    block.taken_ns = at_ns;
    block.taken_mark = world_->marks();
    block.phase = phase_of(thread, graph_task);
    block.by_library = is_library(thread);
    if (!ledger_.reserve(block.bytes)) {
      refuse(block);
    }
    c10::DataPtr made;
    try {
      made = inner_->allocate(size);
    } catch (...) {
      ledger_.unreserve(block.bytes);
      throw;
    }
    void* data = made.get();
    // raw_allocate() wants context and data to be the same.
    if (data == nullptr || made.get_context() != data) {
      ledger_.unreserve(block.bytes);
      return made;
    }
    const bool by_library = block.by_library;
    ledger_.took(data, block);
    if (!by_library) {
      world_->allocated(static_cast<int64_t>(size));
    }
    made.release_context();
    return {data, data, &Watcher::give_back, made.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Watcher::give_back; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    inner_->copy_data(to, from, count);
  }

  World& world() { return *world_; }
  Ledger& ledger() { return ledger_; }
  // In a fork of the process: it is another process's memory.
  void stop() { on_ = false; }
  bool is_on() const { return on_; }

  static Watcher*& the_watcher() {
    static Watcher* watcher = nullptr;
    return watcher;
  }

 private:
  [[noreturn]] void refuse(const Block& block) {
    if (the_look()) {
      the_look()();
    }
    const int64_t held = ledger_.held_bytes();
    ledger_.refused(Refusal{
        block.bytes, held, 0, block.taken_ns, block.taken_mark, block.phase, block.by_library});
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CPU out of memory. Tried to allocate ", in_units(block.bytes),
        ". Rank ", world_->rank(), " after ", block.taken_mark, " iteration marks (phase ",
        to_string(block.phase), ") holds ", in_units(held), " of its limit of ",
        in_units(ledger_.limit_bytes()),
        ". Raise the limit, or let the rank hold less: shard further, recompute activations, "
        "take smaller micro batches.");
  }

  static void give_back(void* data) {
    Watcher& self = *the_watcher();
    if (self.on_) {
      const int64_t as_of_ns = this_thread().as_of_ns;
      const Ledger::Given given = self.ledger_.gave(
          data, as_of_ns >= 0 ? as_of_ns : now_ns(), self.world_->marks());
      if (!given.by_library) {
        self.world_->allocated(-given.bytes);
      }
    }
    self.inner_->raw_deleter()(data);
  }

  const std::shared_ptr<World> world_;
  c10::Allocator* const inner_;
  Ledger ledger_;
  std::atomic<bool> on_{true};
};

Watcher& install(std::shared_ptr<World> world, int64_t limit_bytes) {
  // Lives as long as tensors do, that is to the end of the process.
  auto* watcher = new Watcher(std::move(world), c10::GetCPUAllocator(), limit_bytes);
  Watcher::the_watcher() = watcher;
  pthread_atfork(
      [] { Watcher::the_watcher()->ledger().lock(); },
      [] { Watcher::the_watcher()->ledger().unlock(); },
      [] {
        Watcher::the_watcher()->ledger().unlock();
        Watcher::the_watcher()->stop();
      });
  c10::SetCPUAllocator(watcher, kPriority);
  return *watcher;
}

bool keeps_ledger = false;

} // namespace

void watch_memory(std::shared_ptr<World> world) {
  TORCH_CHECK(
      !world->keeps_memory(), "Memory is watched already. Rank ", world->rank(),
      ". Call keep_memory() once in a process.");
  world->keep_memory(true);
  if (Watcher::the_watcher() == nullptr) {
    install(std::move(world), -1);
  }
}

void keep_ledger(std::shared_ptr<World> world, int64_t limit_bytes) {
  TORCH_CHECK(
      Watcher::the_watcher() == nullptr, "Memory is watched already. Rank ", world->rank(),
      ". Start the account once in a process, and before keep_memory().");
  install(std::move(world), limit_bytes);
  keeps_ledger = true;
}

Ledger* the_ledger() {
  return keeps_ledger && Watcher::the_watcher()->is_on() ? &Watcher::the_watcher()->ledger()
                                                         : nullptr;
}

bool memory_is_watched() { return Watcher::the_watcher() != nullptr; }

Unwatched::Unwatched() : ThreadScope(this_thread().unwatched) {}
Watched::Watched() : before_(std::exchange(this_thread().unwatched, 0)) {}
Watched::~Watched() { this_thread().unwatched = before_; }
InCall::InCall() : ThreadScope(this_thread().calls) {}
ByLibrary::ByLibrary() : ThreadScope(this_thread().library) {}
void unwatch(bool begin) { this_thread().unwatched += begin ? 1 : -1; }

void in_optimizer(bool begin) {
  Thread& thread = this_thread();
  thread.in_forward = false;
  thread.in_optimizer = begin;
  if (begin && the_ledger() != nullptr) {
    thread.step_begin = the_ledger()->next_change();
  }
}

bool step_kept_memory() {
  return the_ledger() != nullptr && the_ledger()->keeps_from_optimizer(this_thread().step_begin);
}

void forward_begins() {
  forward_begun = true;
  this_thread().in_forward = true;
}

void release_at_end(End end, std::shared_ptr<void> held) {
  Due& due = the_due();
  std::lock_guard<std::mutex> lock(due.mutex);
  due.held.push_back(Held{std::move(end), std::move(held)});
  due.size = due.held.size();
}

void set_look(std::function<void()> look) { the_look() = std::move(look); }

} // namespace crystal
