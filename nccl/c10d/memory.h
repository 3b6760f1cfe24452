// What torch's CPU allocator gives out and gets back.
#pragma once

#include <memory>

#include "core/world.h"

namespace crystal {

// From here on `world` hears of every allocation and deallocation of CPU tensors,
// on every thread.
void watch_memory(std::shared_ptr<World> world);

} // namespace crystal
