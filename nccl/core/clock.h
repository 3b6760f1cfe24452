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
// use (so that a process may fork before). Actions run one after the other in the order of
// their deadlines; one that waits for another holds it up for 5 ms at most.
void run_at_ns(int64_t deadline_ns, std::function<void()> action);

// Runs `action` at once on such a thread, beside those actions.
void run_aside(std::function<void()> action);

// Runs what is pending, at once, and ends the threads; actions that are added
// later run in the adding thread. For the end of the process.
void stop_timer();

} // namespace crystal
