// What the C face's opaque world is, and how exceptions become its codes.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "replay/engine.h"

struct crystal_replay {
  crystal::replay::Engine engine;
  std::string message;
  int32_t num_ranks = 0;
  bool is_live = false; // the engine belongs to a live run
};

namespace crystal::replay {

// The code of the exception at hand; call it in a handler.
inline int code_of_exception(std::string* message) {
  try {
    throw;
  } catch (const Failure& failure) {
    *message = failure.what();
    return failure.code;
  } catch (const std::bad_alloc&) {
    *message = "Out of memory. The replayed world. Replay fewer ranks, or watch fewer.";
    return CRYSTAL_REPLAY_MEMORY;
  } catch (const std::exception& error) {
    *message = std::string("The replay engine failed. ") + error.what() + ". Report this.";
    return CRYSTAL_REPLAY_INVALID;
  }
}

} // namespace crystal::replay
