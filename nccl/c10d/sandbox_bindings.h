// What a sandbox rank needs from Python: the trace that it follows, and the replay.
#pragma once

#include <pybind11/pybind11.h>

namespace crystal {

void bind_sandbox(pybind11::module_& m);

} // namespace crystal
