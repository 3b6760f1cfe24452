#include "c10d/work.h"

#include "core/clock.h"
#include "core/world.h"

namespace crystal {

VirtualWork::VirtualWork(
    int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
    std::vector<at::Tensor> held, const CallRecord& record, std::shared_ptr<const Group> group,
    std::chrono::milliseconds timeout)
    : c10d::Work(rank, type, title, held),
      record_(record),
      group_(std::move(group)),
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
  if (now_ns() < record_.release_ns) {
    return false;
  }
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
  if (isCompleted()) {
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

} // namespace crystal
