#include "c10d/memory.h"

#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <unordered_map>

namespace crystal {
namespace {

// Above the allocator that torch starts with.
constexpr uint8_t kPriority = 100;

// Passes everything on to the allocator that was there. A profiler's state could
// report allocations as well, but then the program could not start its own.
class Watcher : public c10::Allocator {
 public:
  Watcher(std::shared_ptr<World> world, c10::Allocator* inner)
      : world_(std::move(world)), inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr made = inner_->allocate(bytes);
    void* data = made.get();
    // raw_allocate() wants context and data to be the same.
    if (data == nullptr || made.get_context() != data) {
      return made;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      sizes_[data] = static_cast<int64_t>(bytes);
    }
    world_->allocated(static_cast<int64_t>(bytes));
    made.release_context();
    return {data, data, &Watcher::give_back, made.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Watcher::give_back; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    inner_->copy_data(to, from, count);
  }

  static Watcher*& the_watcher() {
    static Watcher* watcher = nullptr;
    return watcher;
  }

 private:
  static void give_back(void* data) {
    Watcher& self = *the_watcher();
    int64_t bytes = 0;
    {
      std::lock_guard<std::mutex> lock(self.mutex_);
      const auto found = self.sizes_.find(data);
      if (found != self.sizes_.end()) {
        bytes = found->second;
        self.sizes_.erase(found);
      }
    }
    self.world_->allocated(-bytes);
    self.inner_->raw_deleter()(data);
  }

  const std::shared_ptr<World> world_;
  c10::Allocator* const inner_;
  std::mutex mutex_;
  std::unordered_map<void*, int64_t> sizes_;
};

} // namespace

void watch_memory(std::shared_ptr<World> world) {
  TORCH_CHECK(
      Watcher::the_watcher() == nullptr, "Memory is watched already. Rank ", world->rank(),
      ". Call keep_memory() once in a process.");
  c10::Allocator* inner = c10::GetCPUAllocator();
  world->keep_memory(true);
  // Lives as long as tensors do, that is to the end of the process.
  Watcher::the_watcher() = new Watcher(std::move(world), inner);
  c10::SetCPUAllocator(Watcher::the_watcher(), kPriority);
}

} // namespace crystal
