// What the C interface turns into a code and a message.
#pragma once

#include <stdexcept>
#include <string>

#include "replay/replay.h"

namespace crystal::replay {

struct Failure : std::runtime_error {
  Failure(int code, const std::string& what) : std::runtime_error(what), code(code) {}
  int code;
};

} // namespace crystal::replay
