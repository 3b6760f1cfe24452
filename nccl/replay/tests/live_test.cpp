// Live runs from C: many threads, any state at the end. Run by pytest, plain and
// under the sanitizers.
#include <cstdio>
#include <cstdlib>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "replay/replay.h"

#define CHECK(condition)                                                                     \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition,               \
                   crystal_live_message());                                                  \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int kRanks = 6;
constexpr int kIterations = 200;

crystal_instruction instruction(crystal_op op, int cls) {
  crystal_instruction i{};
  i.op = static_cast<uint8_t>(op);
  i.cls = cls;
  i.call = 1;
  return i;
}

const crystal_instruction kMeet = instruction(CRYSTAL_OP_COMM, 1);

// Ranks that compute 1 us and meet, over and over.
crystal_replay* world() {
  crystal_replay* made = crystal_replay_new();
  const crystal_instruction body[] = {instruction(CRYSTAL_OP_RUN, 0), kMeet,
                                      instruction(CRYSTAL_OP_MARK, 0)};
  const crystal_lane lane{0, 0, 3, 0};
  CHECK(crystal_replay_add_program(made, &lane, 1, body, 3, 0, 0) == 0);
  const int32_t sizes[] = {kRanks};
  CHECK(crystal_replay_set_communicators(made, sizes, 1) == 0);
  const int32_t programs[kRanks] = {};
  const int64_t begin[kRanks + 1] = {0, 1, 2, 3, 4, 5, 6};
  const int32_t connections[kRanks] = {};
  CHECK(crystal_replay_add_ranks(made, kRanks, programs, begin, connections) == 0);
  const int64_t ns[] = {1000, 100};
  CHECK(crystal_replay_set_durations(made, ns, nullptr, nullptr, 2, 0) == 0);
  return made;
}

crystal_live_options options(bool has_thread, bool helps) {
  return {kIterations, 2, 20'000, 20'000, has_thread, helps};
}

// Four external ranks in as many threads, two of them through the address.
void many_threads(bool has_thread, bool helps) {
  crystal_replay* w = world();
  const int32_t external[] = {1, 2, 4, 5};
  const auto how = options(has_thread, helps);
  crystal_live* live = crystal_live_start(w, external, 4, &how);
  CHECK(live != nullptr);
  std::vector<std::thread> threads;
  for (const int32_t rank : external) {
    threads.emplace_back([=] {
      crystal_client* client = has_thread && rank > 2
          ? crystal_client_attach(crystal_live_address(live), rank, 1)
          : crystal_live_client(live, rank, 1);
      CHECK(client != nullptr);
      int64_t end = 0;
      for (int k = 0; k < kIterations; ++k) {
        const int64_t ticket = crystal_client_arrive(client, &kMeet, end + 10 * rank);
        CHECK(ticket == k);
        crystal_release release{};
        CHECK(crystal_client_wait(client, ticket, 60 * kSecond, &release) == 0);
        CHECK(release.end_ns == end + 1100); // the others compute longer
        end = release.end_ns;
        CHECK(crystal_client_mark(client, end) == 0);
      }
      crystal_client_detach(client);
    });
  }
  for (auto& t : threads) {
    t.join();
  }
  CHECK(crystal_live_settle(live, 60 * kSecond) == 0);
  crystal_live_stats stats{};
  crystal_live_get_stats(live, &stats);
  CHECK(stats.num_arrivals == 4 * kIterations && stats.num_releases == 4 * kIterations);
  crystal_live_stop(live);
  CHECK(crystal_replay_marks(w, 0, nullptr, 0) == kIterations);
  crystal_replay_free(w);
}

// One rank whose calls are made and waited for by many threads.
void threads_of_one_rank() {
  crystal_replay* w = world();
  const int32_t external[] = {0, 1, 2, 3, 4, 5};
  const auto how = options(true, true);
  crystal_live* live = crystal_live_start(w, external, 6, &how);
  CHECK(live != nullptr);
  crystal_client* clients[6];
  for (int r = 0; r < 6; ++r) {
    clients[r] = crystal_live_client(live, r, 0);
    CHECK(clients[r] != nullptr);
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int k = 0; k < 100; ++k) {
        int64_t tickets[6];
        for (int r = 0; r < 6; ++r) {
          tickets[r] = crystal_client_arrive(clients[r], &kMeet, 5);
          CHECK(tickets[r] >= 0);
        }
        for (int r = 0; r < 6; ++r) {
          crystal_release release{};
          CHECK(crystal_client_wait(clients[r], tickets[r], 60 * kSecond, &release) == 0);
          CHECK(release.start_ns == 5 && release.end_ns == 105);
        }
      }
    });
  }
  for (auto& t : threads) {
    t.join();
  }
  for (auto* client : clients) {
    crystal_client_detach(client);
  }
  crystal_live_stop(live);
  crystal_replay_free(w);
}

// Stops while threads wait, arrive, ask for statistics.
void stop_in_any_state(int n) {
  crystal_replay* w = world();
  const int32_t external[] = {0, 1};
  const auto how = options(n % 3 != 0, n % 2 != 0);
  crystal_live* live = crystal_live_start(w, external, 2, &how);
  CHECK(live != nullptr);
  crystal_client* client = crystal_live_client(live, 0, 1);
  std::thread waiter([&] {
    for (;;) {
      const int64_t ticket = crystal_client_arrive(client, &kMeet, 0);
      if (ticket == CRYSTAL_REPLAY_BUSY) {
        continue;
      }
      if (ticket < 0) {
        CHECK(ticket == CRYSTAL_REPLAY_CLOSED);
        return;
      }
      crystal_release release{};
      const int code = crystal_client_wait(client, ticket, n % 5 * 100'000, &release);
      CHECK(code == CRYSTAL_REPLAY_TIMEOUT || code == CRYSTAL_REPLAY_CLOSED);
    }
  });
  if (n % 4 != 0) {
    usleep(n % 7 * 100);
  }
  crystal_live_stop(live);
  waiter.join();
  crystal_client_detach(client);
  crystal_replay_free(w);
}

void refusals() {
  crystal_replay* w = world();
  const auto how = options(true, true);
  const int32_t twice[] = {0, 0}, beyond[] = {kRanks};
  CHECK(crystal_live_start(w, twice, 2, &how) == nullptr);
  CHECK(crystal_live_start(w, beyond, 1, &how) == nullptr);
  CHECK(crystal_live_start(w, nullptr, 0, &how) == nullptr);
  const int32_t external[] = {3};
  crystal_live* live = crystal_live_start(w, external, 1, &how);
  CHECK(live != nullptr);
  CHECK(crystal_live_start(w, external, 1, &how) == nullptr);
  CHECK(crystal_replay_run(w, 1) == CRYSTAL_REPLAY_INVALID);
  CHECK(crystal_live_client(live, 0, 1) == nullptr);
  CHECK(crystal_client_attach("1:2:3", 3, 1) == nullptr);
  crystal_client* client = crystal_live_client(live, 3, 1);
  crystal_release release{};
  CHECK(crystal_client_wait(client, 0, 1, &release) == CRYSTAL_REPLAY_INVALID);
  crystal_live_stop(live);
  CHECK(crystal_client_arrive(client, &kMeet, 0) == CRYSTAL_REPLAY_CLOSED);
  crystal_client_detach(client);
  CHECK(crystal_replay_run(w, 3) == 0); // offline again
  CHECK(crystal_replay_marks(w, 3, nullptr, 0) == 3);
  crystal_replay_free(w);
  crystal_live_stop(nullptr);
}

} // namespace

int main() {
  refusals();
  many_threads(true, true);
  many_threads(true, false);
  many_threads(false, true);
  threads_of_one_rank();
  for (int n = 0; n < 200; ++n) {
    stop_in_any_state(n);
  }
  std::puts("ok");
}
