// What is to be done at ends that are not known yet.
#pragma once

#include <exception>
#include <functional>

#include "core/release.h"

namespace crystal {

// Runs `action` at the end, as run_at_ns() does once that is known; with the exception
// if it cannot be known any more.
void run_at_end(End end, std::function<void(std::exception_ptr)> action);

// Whether such actions are to come. They may make calls.
bool actions_are_due();

// For the end of the process: what is still to come runs at once.
void stop_following();

} // namespace crystal
