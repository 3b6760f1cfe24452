#include "c10d/work.h"

#include <torch/csrc/autograd/engine.h>

#include "core/clock.h"

namespace crystal {

void WaitRecorder::waited(int64_t begin_ns, int64_t end_ns) {
  if (!done_.exchange(true)) {
    world_->waited(call_, begin_ns, end_ns);
  }
}

void WaitRecorder::future_taken() {
  if (torch::autograd::get_current_graph_task_id() < 0 || done_.exchange(true)) {
    return;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([world = world_, call = call_] {
    const int64_t now = now_ns();
    world->waited(call, now, now);
  });
}

VirtualWork::VirtualWork(
    int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
    std::vector<at::Tensor> held, const CallRecord& record, std::shared_ptr<const Group> group,
    std::shared_ptr<World> world, std::chrono::milliseconds timeout)
    : c10d::Work(rank, type, title, held),
      record_(record),
      group_(std::move(group)),
      waits_(std::move(world), record.call),
      timeout_(timeout),
      outputs_(std::move(outputs)),
      held_(std::move(held)) {}

VirtualWork::~VirtualWork() {
  if (recordFunctionEndCallback_) { // nobody waited, so the range ends with the handle
    recordFunctionEndCallback_();
  }
}

void VirtualWork::complete() {
  std::vector<at::Tensor> freed; // destroyed after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  completed_ = true;
  freed.swap(held_);
  if (recordFunctionEndCallback_) {
    recordFunctionEndCallback_();
    recordFunctionEndCallback_ = nullptr;
  }
}

bool VirtualWork::isCompleted() {
  const int64_t now = now_ns();
  if (now < record_.release_ns) {
    return false;
  }
  waits_.waited(now, now);
  complete();
  return true;
}

bool VirtualWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout > kNoTimeout ? timeout : timeout_;
  const int64_t now = now_ns();
  const int64_t limit_ns = limit.count() * 1'000'000;
  if (limit > kNoTimeout && record_.release_ns - now > limit_ns) {
    wait_until_ns(now + limit_ns);
    TORCH_CHECK_WITH(
        DistBackendError, false, "Timed out waiting ", limit.count(),
        "ms for a communication call to complete. Call ", record_.call, " (",
        key(record_, *group_),
        "), which is due ", (record_.release_ns - now) / 1'000'000,
        "ms after the wait began. Raise the group's timeout or shorten the transfer.");
  }
  wait_until_ns(record_.release_ns);
  waits_.waited(now, now_ns());
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
  waits_.future_taken();
  if (now_ns() >= record_.release_ns) {
    complete();
    future->markCompleted(c10::IValue(outputs_));
  } else {
    auto self = c10::intrusive_ptr<VirtualWork>::unsafe_reclaim_from_nonowning(this);
    run_at_ns(record_.release_ns, [self, future] {
      const World::Lane lane(self->record_.stream);
      self->complete();
      future->markCompleted(c10::IValue(self->outputs_));
    });
  }
  return future;
}

CarriedWork::CarriedWork(
    int rank, c10d::OpType type, c10::intrusive_ptr<c10d::Work> real, const CallRecord& record,
    std::shared_ptr<World> world)
    : c10d::Work(rank, type), real_(std::move(real)), waits_(std::move(world), record.call) {}

bool CarriedWork::isCompleted() {
  if (!real_->isCompleted()) {
    return false;
  }
  const int64_t now = now_ns();
  waits_.waited(now, now);
  return true;
}

bool CarriedWork::wait(std::chrono::milliseconds timeout) {
  const int64_t begin = now_ns();
  const bool done = real_->wait(timeout);
  waits_.waited(begin, now_ns());
  return done;
}

c10::intrusive_ptr<c10::ivalue::Future> CarriedWork::getFuture() {
  waits_.future_taken();
  return real_->getFuture();
}

} // namespace crystal
