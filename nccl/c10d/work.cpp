#include "c10d/work.h"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <thread>

#include "c10d/memory.h"
#include "core/busy.h"
#include "core/clock.h"
#include "core/follow.h"

namespace crystal {
namespace {

constexpr int64_t kLetGoLimitNs = 100'000'000;

} // namespace

void WaitRecorder::waited(int64_t begin_ns, int64_t end_ns) {
  if (!done_.exchange(true)) {
    world_->waited(call_, begin_ns, end_ns);
  }
}

void WaitRecorder::future_taken(std::function<int64_t()> end_ns) {
  if (torch::autograd::get_current_graph_task_id() < 0 || done_.exchange(true)) {
    return;
  }
  // Callbacks run in their order, at the pass's end: this one before the program's that
  // waits, the one that it adds after it.
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([&engine, world = world_, call = call_, end_ns = std::move(end_ns)] {
    const int64_t begin = now_ns();
    engine.queue_callback([world, call, end_ns, begin] {
      // Those of one pass are waited for one after the other.
      thread_local int64_t waited_until = 0;
      const int64_t now = now_ns();
      const int64_t end = end_ns();
      const int64_t from = std::clamp(waited_until, begin, now);
      waited_until = std::clamp(end < 0 ? now : end, from, now);
      world->waited(call, from, waited_until);
    });
  });
}

VirtualWork::VirtualWork(
    int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
    std::vector<at::Tensor> held, const CallRecord& record, End end,
    std::shared_ptr<const Group> group, std::shared_ptr<World> world,
    std::chrono::milliseconds timeout, std::shared_ptr<RealPart> real)
    : c10d::Work(rank, type, title, held),
      record_(record),
      end_(std::move(end)),
      group_(std::move(group)),
      waits_(std::move(world), record.call),
      timeout_(timeout),
      outputs_(std::move(outputs)),
      held_(std::move(held)),
      real_(std::move(real)) {}

VirtualWork::~VirtualWork() {
  if (recordFunctionEndCallback_) { // nobody waited, so the range ends with the handle
    recordFunctionEndCallback_();
  }
}

void VirtualWork::complete() {
  std::vector<at::Tensor> freed; // destroyed after the lock
  std::shared_ptr<void> transferred;
  std::lock_guard<std::mutex> lock(mutex_);
  completed_ = true;
  freed.swap(held_);
  if (footprint_) {
    transferred = footprint_->transferred();
  }
  if (recordFunctionEndCallback_) {
    recordFunctionEndCallback_();
    recordFunctionEndCallback_ = nullptr;
  }
}

bool VirtualWork::isCompleted() {
  const int64_t end_ns = end_.poll();
  const int64_t now = now_ns();
  if ((real_ && !real_->is_done()) || end_ns < 0 || now < end_ns) {
    return false;
  }
  if (real_) {
    real_->finish(); // throws where it failed, so that nobody takes the outputs for filled
  }
  waits_.waited(now, now);
  complete();
  return true;
}

bool VirtualWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout > kNoTimeout ? timeout : timeout_;
  const int64_t begin = now_ns();
  const int64_t limit_ns = limit > kNoTimeout ? limit.count() * 1'000'000 : INT64_MAX / 2;
  leave_core();
  if (real_) {
    real_->finish();
  }
  std::string reason;
  // Callbacks of other calls may make calls while this thread waits.
  const int64_t end_ns = end_.wait(limit_ns, !actions_are_due(), &reason);
  if (end_ns < 0 || end_ns - begin > limit_ns) {
    wait_until_ns(begin + limit_ns);
    if (reason.empty()) {
      reason = "which is due " + std::to_string((end_ns - begin) / 1'000'000) +
               "ms after the wait began";
    }
    TORCH_CHECK_WITH(
        DistBackendError, false, "Timed out waiting ", limit.count(),
        "ms for a communication call to complete. Call ", record_.call, " (",
        key(record_, *group_), "), ", reason,
        ". Raise the group's timeout, or look at those that it waits for.");
  }
  wait_until_ns(end_ns);
  waits_.waited(begin, now_ns());
  complete();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> VirtualWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) {
      return future_;
    }
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    future = future_;
  }
  waits_.future_taken([end = end_] { return end.poll(); });
  if (real_) {
    real_->is_done(); // sets it going, so that the outputs are filled when the end comes
  }
  if (const int64_t end_ns = end_.poll(); !real_ && end_ns >= 0 && now_ns() >= end_ns) {
    complete();
    future->markCompleted(c10::IValue(outputs_));
  } else {
    auto self = c10::intrusive_ptr<VirtualWork>::unsafe_reclaim_from_nonowning(this);
    run_at_end(end_, [self, future](std::exception_ptr error) {
      const World::Lane lane(self->record_.stream);
      const ByLibrary by_library; // a worker of gloo's would call back
      try {
        if (error) {
          std::rethrow_exception(error);
        }
        if (self->real_) {
          self->real_->finish();
        }
      } catch (...) {
        self->complete();
        future->setError(std::current_exception());
        return;
      }
      self->complete();
      future->markCompleted(c10::IValue(self->outputs_));
    });
  }
  return future;
}

CarriedWork::CarriedWork(
    int rank, c10d::OpType type, c10::intrusive_ptr<c10d::Work> real, const CallRecord& record,
    std::shared_ptr<const Group> group, std::shared_ptr<World> world)
    : c10d::Work(rank, type),
      real_(std::move(real)),
      record_(record),
      group_(std::move(group)),
      world_(std::move(world)),
      waits_(world_, record.call) {}

bool CarriedWork::isCompleted() {
  if (!real_->isCompleted()) {
    return false;
  }
  const int64_t now = now_ns();
  waits_.waited(now, now);
  return true;
}

// A worker of gloo's wakes the waiting thread, and some time later drops the call with
// its tensors: when the machine is busy, after the program has gone on.
void CarriedWork::let_worker_let_go() const {
  const int64_t limit_ns = now_ns() + kLetGoLimitNs;
  while (real_.use_count() > 1 && now_ns() < limit_ns) {
    std::this_thread::yield();
  }
}

bool CarriedWork::wait(std::chrono::milliseconds timeout) {
  const int64_t begin = now_ns();
  bool done = false;
  naming_mates(*world_, *group_, record_, [&] { done = real_->wait(timeout); });
  waits_.waited(begin, now_ns());
  if (memory_is_watched()) {
    let_worker_let_go();
  }
  return done;
}

c10::intrusive_ptr<c10::ivalue::Future> CarriedWork::getFuture() {
  auto future = real_->getFuture();
  const auto end_ns = std::make_shared<std::atomic<int64_t>>(-1);
  future->addCallback([end_ns](c10::ivalue::Future&) { *end_ns = now_ns(); });
  waits_.future_taken([end_ns] { return end_ns->load(); });
  if (group_->mates().empty()) {
    return future;
  }
  return future->then(
      [world = world_, group = group_, record = record_](c10::ivalue::Future& done) {
        if (done.hasError()) {
          naming_mates(
              *world, *group, record, [&] { std::rethrow_exception(done.exception_ptr()); });
        }
        return done.value();
      },
      future->elementType());
}

} // namespace crystal
