// CPU time that somebody else would take from this rank's core.
#pragma once

#include <cstdint>

namespace crystal {

// Takes `cpu_ns` of CPU time, now, on a thread of its own that starts at first use. What
// is asked for meanwhile is taken afterwards. The thread moves memory all the time, as a
// communication library's does.
void keep_core_busy(int64_t cpu_ns);

// The program waits: what is left would take nothing from it, and is dropped. A thread
// that is still busy when the wait ends could keep the core for a whole time slice.
void leave_core();

} // namespace crystal
