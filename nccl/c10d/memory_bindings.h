// The Python face of memory's account.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace crystal {

// Adds a submodule `memory`.
void bind_memory(pybind11::module_& m);

} // namespace crystal
