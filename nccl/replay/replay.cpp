// The C face of the engine: checks pointers, turns exceptions into codes.
#include "replay/replay.h"

#include <algorithm>
#include <new>

#include "replay/handle.h"

using namespace crystal::replay;

namespace {

template <class Function>
int guarded(crystal_replay* world, Function function) {
  try {
    if (world->is_live) {
      throw Failure(CRYSTAL_REPLAY_INVALID,
                    "The world is in a live run. A call that would change it. Stop the run first.");
    }
    return function(world->engine);
  } catch (...) {
    return code_of_exception(&world->message);
  }
}

// How many there are; as many as fit are copied.
template <class T>
int64_t copy_out(const std::vector<T>& from, T* to, int64_t capacity) {
  const auto n = static_cast<int64_t>(from.size());
  if (to != nullptr) {
    std::copy_n(from.begin(), std::min(n, capacity), to);
  }
  return n;
}

bool has_rank(const crystal_replay* world, int32_t rank) {
  return rank >= 0 && rank < world->num_ranks;
}

} // namespace

extern "C" {

crystal_replay* crystal_replay_new(void) { return new (std::nothrow) crystal_replay; }
void crystal_replay_free(crystal_replay* world) { delete world; }
const char* crystal_replay_message(const crystal_replay* world) { return world->message.c_str(); }

int crystal_replay_add_program(
    crystal_replay* world, const crystal_lane* lanes, int32_t num_lanes,
    const crystal_instruction* instructions, int64_t num_instructions, int32_t num_handles,
    int32_t num_channels) {
  return guarded(world, [&](Engine& engine) {
    Program program;
    program.lanes.assign(lanes, lanes + num_lanes);
    program.instructions.assign(instructions, instructions + num_instructions);
    program.num_handles = num_handles;
    program.num_channels = num_channels;
    return engine.add_program(std::move(program));
  });
}

int crystal_replay_set_communicators(
    crystal_replay* world, const int32_t* num_participants, int32_t num_communicators) {
  return guarded(world, [&](Engine& engine) {
    engine.set_communicators(num_participants, num_communicators);
    return 0;
  });
}

int crystal_replay_add_ranks(
    crystal_replay* world, int32_t num_ranks, const int32_t* programs,
    const int64_t* connection_begin, const int32_t* connections) {
  return guarded(world, [&](Engine& engine) {
    if (world->num_ranks > 0) {
      throw Failure(CRYSTAL_REPLAY_INVALID,
                    "Ranks are there already. Adding ranks. Add all of them in one call.");
    }
    engine.add_ranks(num_ranks, programs, connection_begin, connections);
    world->num_ranks = num_ranks;
    return 0;
  });
}

int crystal_replay_set_durations(
    crystal_replay* world, const int64_t* duration_ns, const double* spread,
    const int64_t* drain_ns, int32_t num_classes, uint64_t seed) {
  return guarded(world, [&](Engine& engine) {
    engine.durations().set(duration_ns, spread, drain_ns, num_classes, seed);
    return 0;
  });
}

int crystal_replay_set_choices(
    crystal_replay* world, int32_t cls, const int64_t* duration_ns, const int64_t* weights,
    int32_t num_choices) {
  return guarded(world, [&](Engine& engine) {
    engine.durations().set_choices(cls, duration_ns, weights, num_choices);
    return 0;
  });
}

int crystal_replay_set_rank_factors(crystal_replay* world, const double* factors) {
  return guarded(world, [&](Engine& engine) {
    engine.set_rank_factors(factors);
    return 0;
  });
}

int crystal_replay_set_link_factors(crystal_replay* world, const double* factors) {
  return guarded(world, [&](Engine& engine) {
    engine.set_link_factors(factors);
    return 0;
  });
}

int crystal_replay_set_link_classes(crystal_replay* world, const int32_t* classes) {
  return guarded(world, [&](Engine& engine) {
    engine.set_link_classes(classes);
    return 0;
  });
}

int crystal_replay_set_perturbations(
    crystal_replay* world, const crystal_perturbation* list, int32_t num_perturbations) {
  return guarded(world, [&](Engine& engine) {
    engine.set_perturbations(list, num_perturbations);
    return 0;
  });
}

int crystal_replay_trace(crystal_replay* world, int32_t iteration) {
  return guarded(world, [&](Engine& engine) {
    engine.trace(iteration);
    return 0;
  });
}

int crystal_replay_watch(crystal_replay* world, int32_t rank) {
  return guarded(world, [&](Engine& engine) {
    engine.watch(rank);
    return 0;
  });
}

int crystal_replay_run(crystal_replay* world, int32_t num_iterations) {
  return guarded(world, [&](Engine& engine) {
    engine.run(num_iterations);
    return 0;
  });
}

int64_t crystal_replay_num_participations(const crystal_replay* world) {
  return world->engine.num_participations();
}

int64_t crystal_replay_marks(
    const crystal_replay* world, int32_t rank, int64_t* at_ns, int64_t capacity) {
  return has_rank(world, rank) ? copy_out(world->engine.marks(rank), at_ns, capacity)
                               : int64_t{CRYSTAL_REPLAY_INVALID};
}

int64_t crystal_replay_lane_ends(
    const crystal_replay* world, int32_t rank, int64_t* at_ns, int64_t capacity) {
  return has_rank(world, rank) ? copy_out(world->engine.lane_ends(rank), at_ns, capacity)
                               : int64_t{CRYSTAL_REPLAY_INVALID};
}

int64_t crystal_replay_breakdown(
    const crystal_replay* world, int32_t rank, crystal_breakdown* parts, int64_t capacity) {
  return has_rank(world, rank) ? copy_out(world->engine.breakdown(rank), parts, capacity)
                               : int64_t{CRYSTAL_REPLAY_INVALID};
}

int64_t crystal_replay_events(
    const crystal_replay* world, crystal_event* events, int64_t capacity) {
  return copy_out(world->engine.events(), events, capacity);
}

int64_t crystal_replay_critical_path(
    const crystal_replay* world, crystal_step* steps, int64_t capacity) {
  return copy_out(world->engine.critical_path(), steps, capacity);
}

} // extern "C"
