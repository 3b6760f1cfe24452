// The C interface offline, without a framework: also meant to be run under the
// sanitizers.
#include "replay/replay.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

#define EXPECT(condition)                                                       \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                             \
    }                                                                           \
  } while (false)

crystal_instruction op(crystal_op op, int slot, int handle, int cls, int ends = 0, int flags = 0) {
  crystal_instruction i{};
  i.op = static_cast<uint8_t>(op);
  i.ends = static_cast<uint8_t>(ends);
  i.flags = static_cast<uint16_t>(flags);
  i.slot = slot;
  i.handle = handle;
  i.cls = cls;
  return i;
}

// `n` ranks in a ring: each sends to the next, receives, waits; class 1 is the transfer.
crystal_replay* ring(int n, bool waits_first) {
  crystal_replay* world = crystal_replay_new();
  EXPECT(world != nullptr);
  std::vector<crystal_instruction> body;
  if (waits_first) {
    body = {op(CRYSTAL_OP_COMM, 0, 0, 1, 0, CRYSTAL_FLAG_MESSAGE),
            op(CRYSTAL_OP_COMM, 1, 0, 1, 0, CRYSTAL_FLAG_MESSAGE)};
  } else {
    body = {op(CRYSTAL_OP_RUN, 0, 0, 0), op(CRYSTAL_OP_POST, 0, 0, 1, 0, CRYSTAL_FLAG_MESSAGE),
            op(CRYSTAL_OP_COMM, 1, 0, 1, 0, CRYSTAL_FLAG_MESSAGE), op(CRYSTAL_OP_WAIT, 0, 0, 0)};
  }
  body.push_back(op(CRYSTAL_OP_SIGNAL, 0, 0, 0));
  body.push_back(op(CRYSTAL_OP_MARK, 0, 0, 0));
  const auto length = static_cast<int32_t>(body.size());
  body.push_back(op(CRYSTAL_OP_AWAIT, 0, 0, 0));
  body.push_back(op(CRYSTAL_OP_RUN, 0, 0, 0));
  const crystal_lane lanes[] = {{0, 0, length, 0}, {length, 0, 2, 0}};
  EXPECT(crystal_replay_add_program(world, lanes, 2, body.data(),
                                    static_cast<int64_t>(body.size()), 1, 1) == 0);
  const std::vector<int32_t> sizes(n, 2);
  EXPECT(crystal_replay_set_communicators(world, sizes.data(), n) == 0);
  std::vector<int32_t> programs(n, 0), connections;
  std::vector<int64_t> begin;
  for (int r = 0; r < n; ++r) {
    begin.push_back(2 * r);
    connections.push_back(r);               // to the next
    connections.push_back((r + n - 1) % n); // from the one before
  }
  begin.push_back(2 * n);
  EXPECT(crystal_replay_add_ranks(world, n, programs.data(), begin.data(), connections.data()) ==
         0);
  const int64_t ns[] = {100, 700};
  EXPECT(crystal_replay_set_durations(world, ns, nullptr, nullptr, 2, 1) == 0);
  return world;
}

void runs_and_reads() {
  crystal_replay* world = ring(5, false);
  EXPECT(crystal_replay_watch(world, 2) == 0);
  EXPECT(crystal_replay_trace(world, 3) == 0);
  for (int again = 0; again < 3; ++again) {
    EXPECT(crystal_replay_run(world, 200) == 0);
    EXPECT(crystal_replay_num_participations(world) == 5 * 2 * 200);
    std::vector<int64_t> marks(200);
    EXPECT(crystal_replay_marks(world, 4, marks.data(), 200) == 200);
    EXPECT(marks[0] == 800 && marks[199] == 200 * 800);
    std::vector<crystal_event> events(400);
    EXPECT(crystal_replay_events(world, events.data(), 400) == 400);
    for (const auto& event : events) {
      EXPECT(event.rank == 2 && event.end_ns == event.start_ns + 700);
    }
    std::vector<crystal_breakdown> parts(200);
    EXPECT(crystal_replay_breakdown(world, 0, parts.data(), 200) == 200);
    EXPECT(parts[7].compute_ns == 100 && parts[7].exposed_ns == 700);
    std::vector<crystal_step> steps(100);
    EXPECT(crystal_replay_critical_path(world, steps.data(), 100) > 0);
    EXPECT(steps[0].op == CRYSTAL_OP_MARK && steps[0].end_ns == 3 * 800);
  }
  EXPECT(crystal_replay_marks(world, 5, nullptr, 0) == CRYSTAL_REPLAY_INVALID);
  crystal_replay_free(world);
}

void shares_links() {
  crystal_replay* world = ring(3, false);
  const int32_t classes[] = {0, 0, 0};
  EXPECT(crystal_replay_set_link_classes(world, classes) == 0);
  EXPECT(crystal_replay_run(world, 4) == 0);
  int64_t marks[4];
  EXPECT(crystal_replay_marks(world, 0, marks, 4) == 4);
  EXPECT(marks[0] == 100 + 2 * 700); // each rank sends and receives at once
  EXPECT(marks[3] == 4 * 1500);
  crystal_replay_free(world);
}

void refuses() {
  crystal_replay* world = ring(4, true);
  EXPECT(crystal_replay_run(world, 1) == CRYSTAL_REPLAY_DEADLOCK);
  EXPECT(std::strstr(crystal_replay_message(world), "in a circle") != nullptr);
  // An error leaves a world that can be asked again.
  EXPECT(crystal_replay_run(world, 1) == CRYSTAL_REPLAY_DEADLOCK);
  EXPECT(crystal_replay_run(world, 0) == 0);
  EXPECT(crystal_replay_watch(world, 4) == CRYSTAL_REPLAY_INVALID);
  const int64_t negative[] = {-1, 0};
  EXPECT(crystal_replay_set_durations(world, negative, nullptr, nullptr, 2, 1) ==
         CRYSTAL_REPLAY_INVALID);
  const int64_t one[] = {5};
  EXPECT(crystal_replay_set_durations(world, one, nullptr, nullptr, 1, 1) == 0);
  EXPECT(crystal_replay_run(world, 1) == CRYSTAL_REPLAY_INVALID); // class 1 has none
  const crystal_lane beyond{0, 0, 5, 0};
  const crystal_instruction run = op(CRYSTAL_OP_RUN, 0, 0, 0);
  EXPECT(crystal_replay_add_program(world, &beyond, 1, &run, 1, 0, 0) == CRYSTAL_REPLAY_INVALID);
  crystal_replay_free(world);
  crystal_replay_free(nullptr);
}

void draws() {
  crystal_replay* world = ring(4, false);
  const int64_t ns[] = {100, 700};
  const double spread[] = {0.2, 0.5};
  EXPECT(crystal_replay_set_durations(world, ns, spread, nullptr, 2, 9) == 0);
  const int64_t choices[] = {1, 50};
  const int64_t weights[] = {3, 1};
  EXPECT(crystal_replay_set_choices(world, 1, choices, weights, 2) == 0);
  const crystal_perturbation late[] = {{CRYSTAL_SLOW, 1, 2, 3, 1.5, 0, 0},
                                       {CRYSTAL_PAUSE_IN, 0, 1, 0, 1.0, 10, 0},
                                       {CRYSTAL_PAUSE_AT, 3, 0, 0, 1.0, 999, 300}};
  EXPECT(crystal_replay_set_perturbations(world, late, 3) == 0);
  int64_t first[20], second[20];
  EXPECT(crystal_replay_run(world, 20) == 0);
  EXPECT(crystal_replay_marks(world, 1, first, 20) == 20);
  EXPECT(crystal_replay_run(world, 20) == 0);
  EXPECT(crystal_replay_marks(world, 1, second, 20) == 20);
  EXPECT(std::memcmp(first, second, sizeof first) == 0);
  crystal_replay_free(world);
}

} // namespace

int main() {
  runs_and_reads();
  shares_links();
  refuses();
  draws();
  std::puts("passed");
}
