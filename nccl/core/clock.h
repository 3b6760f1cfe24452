// The clock of replay on the CPU and waiting for a moment of it.
#pragma once

#include <cstdint>
#include <functional>

namespace crystal {

// CLOCK_MONOTONIC in nanoseconds, comparable between processes of a host.
int64_t now_ns();

// Returns at `deadline_ns` or as soon after it as the machine allows: sleeps
// until shortly before it, then spins.
void wait_until_ns(int64_t deadline_ns);

// Runs `action` at `deadline_ns` on a thread of its own, which starts at first
// use (so that a process may fork before). Actions of one deadline run in the
// order in which they were added.
void run_at_ns(int64_t deadline_ns, std::function<void()> action);

// Runs what is still pending, at once, and ends the thread.
void stop_timer();

} // namespace crystal
