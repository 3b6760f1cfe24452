// How long a running program waits for an answer: one external rank of a world of
// TP 8 x PP 8 x DP arrives in real time, everybody else is replayed.
//
//   live_bench WORLD ITERATIONS MODE SPIN_US COMPUTE_US
//
// MODE: thread (the engine's thread computes), help (the caller as well), caller (no
// thread), process (the rank is in another process). Prints one JSON object: times
// from arrive() to the known release, over calls that this arrival determined.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "replay/replay.h"

namespace {

constexpr int kTp = 8, kPp = 8, kMicrobatches = 8, kLayers = 14;

crystal_instruction instruction(int op, int flags, int slot, int handle, int cls) {
  crystal_instruction i{};
  i.op = static_cast<uint8_t>(op);
  i.flags = static_cast<uint16_t>(flags);
  i.slot = slot;
  i.handle = handle;
  i.cls = cls;
  return i;
}

// 1F1B. Slots: 0 TP, 1 DP, 2 activations in, 3 out, 4 gradients out, 5 in.
std::vector<crystal_instruction> stage(int s) {
  std::vector<crystal_instruction> v;
  const auto add = [&](auto... a) { v.push_back(instruction(a...)); };
  const auto layers = [&] {
    for (int k = 0; k < 4 * kLayers; ++k) {
      add(CRYSTAL_OP_RUN, 0, 0, 0, 0);
      add(CRYSTAL_OP_COMM, 0, 0, 0, 2);
    }
  };
  const auto send = [&](int slot, int handle, int cls) {
    add(CRYSTAL_OP_WAIT, 0, 0, handle, cls);
    add(CRYSTAL_OP_POST, CRYSTAL_FLAG_MESSAGE, slot, handle, cls);
  };
  const auto forward = [&] {
    if (s > 0) add(CRYSTAL_OP_COMM, CRYSTAL_FLAG_MESSAGE, 2, 0, 3);
    layers();
    if (s < kPp - 1) send(3, 2, 3);
  };
  const auto backward = [&] {
    if (s < kPp - 1) add(CRYSTAL_OP_COMM, CRYSTAL_FLAG_MESSAGE, 5, 0, 4);
    layers();
    if (s > 0) send(4, 3, 4);
  };
  const int warm = std::min(kPp - 1 - s, kMicrobatches);
  for (int i = 0; i < warm; ++i) forward();
  for (int i = warm; i < kMicrobatches; ++i) {
    forward();
    backward();
  }
  for (int i = 0; i < warm; ++i) backward();
  add(CRYSTAL_OP_POST, 0, 1, 1, 5);
  add(CRYSTAL_OP_RUN, 0, 0, 0, 1);
  add(CRYSTAL_OP_WAIT, 0, 0, 1, 0);
  add(CRYSTAL_OP_MARK, 0, 0, 0, 0);
  return v;
}

crystal_replay* build(int world, const std::vector<int64_t>& ns) {
  const int dp = world / kTp / kPp;
  crystal_replay* made = crystal_replay_new();
  for (int s = 0; s < kPp; ++s) {
    const auto v = stage(s);
    const crystal_lane lane{0, 0, static_cast<int32_t>(v.size()), 0};
    crystal_replay_add_program(made, &lane, 1, v.data(), static_cast<int64_t>(v.size()), 8, 0);
  }
  std::vector<int32_t> sizes(kPp * dp, kTp);
  const int first_dp = kPp * dp;
  sizes.insert(sizes.end(), kPp * kTp, dp);
  const int first_forward = static_cast<int>(sizes.size());
  sizes.insert(sizes.end(), 2 * world, 2);
  crystal_replay_set_communicators(made, sizes.data(), static_cast<int32_t>(sizes.size()));
  std::vector<int32_t> programs, connections;
  std::vector<int64_t> begin;
  const auto forward = [&](int s, int d, int t) { return first_forward + (s * dp + d) * kTp + t; };
  for (int s = 0; s < kPp; ++s) {
    for (int d = 0; d < dp; ++d) {
      for (int t = 0; t < kTp; ++t) {
        programs.push_back(s);
        begin.push_back(static_cast<int64_t>(connections.size()));
        const int none = s * dp + d;
        connections.insert(
            connections.end(),
            {none, first_dp + s * kTp + t, s > 0 ? forward(s - 1, d, t) : none,
             s < kPp - 1 ? forward(s, d, t) : none, s > 0 ? world + forward(s, d, t) : none,
             s < kPp - 1 ? world + forward(s + 1, d, t) : none});
      }
    }
  }
  begin.push_back(static_cast<int64_t>(connections.size()));
  crystal_replay_add_ranks(made, world, programs.data(), begin.data(), connections.data());
  crystal_replay_set_durations(
      made, ns.data(), nullptr, nullptr, static_cast<int32_t>(ns.size()), 1);
  return made;
}

void check(int64_t code) {
  if (code < 0) {
    std::fprintf(stderr, "%s\n", crystal_live_message());
    std::exit(1);
  }
}

struct Answers {
  std::vector<int64_t> ns;   // arrive() to known
  std::vector<int64_t> late; // known after due
};

// The program of a rank of stage 0, in real time.
Answers drive(crystal_client* client, int iterations, const std::vector<int64_t>& ns) {
  Answers found;
  const auto program = stage(0);
  int64_t handles[8];
  std::fill_n(handles, 8, -1);
  const auto until = [&](int64_t t) {
    while (crystal_client_now(client) < t) {
    }
  };
  const auto wait = [&](int64_t ticket) {
    crystal_release release{};
    check(crystal_client_wait(client, ticket, 20'000'000'000, &release));
    check(crystal_client_wait_until(client, release.end_ns));
  };
  for (int k = 0; k < iterations; ++k) {
    for (const auto& i : program) {
      if (i.op == CRYSTAL_OP_RUN) {
        until(crystal_client_now(client) + ns[i.cls]);
      } else if (i.op == CRYSTAL_OP_POST) {
        check(handles[i.handle] = crystal_client_arrive(client, &i, -1));
      } else if (i.op == CRYSTAL_OP_WAIT && handles[i.handle] >= 0) {
        wait(handles[i.handle]);
        handles[i.handle] = -1;
      } else if (i.op == CRYSTAL_OP_COMM) {
        const int64_t asked = crystal_client_now(client);
        const int64_t ticket = crystal_client_arrive(client, &i, asked);
        check(ticket);
        crystal_release release{};
        check(crystal_client_wait(client, ticket, 20'000'000'000, &release));
        const int64_t known = crystal_client_now(client);
        if (release.start_ns == asked) { // the last to arrive
          found.ns.push_back(known - asked);
          found.late.push_back(std::max<int64_t>(0, known - release.end_ns));
        }
        check(crystal_client_wait_until(client, release.end_ns));
      } else if (i.op == CRYSTAL_OP_MARK) {
        check(crystal_client_mark(client, -1));
      }
    }
  }
  return found;
}

void print(const char* name, std::vector<int64_t>& v) {
  std::sort(v.begin(), v.end());
  const auto at = [&](double q) {
    return v.empty() ? 0.0 : static_cast<double>(v[static_cast<size_t>(q * (v.size() - 1))]) / 1e3;
  };
  std::printf("\"%s\": {\"p50\": %.2f, \"p90\": %.2f, \"p99\": %.2f, \"max\": %.2f}, ", name,
              at(0.5), at(0.9), at(0.99), at(1));
}

void report(Answers found) {
  std::printf("\"num_answers\": %zu, ", found.ns.size());
  print("query_us", found.ns);
  print("late_us", found.late);
  std::fflush(stdout);
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "WORLD ITERATIONS thread|help|caller|process SPIN_US COMPUTE_US\n");
    return 2;
  }
  const int world = std::atoi(argv[1]), iterations = std::atoi(argv[2]);
  const std::string mode = argv[3];
  const int64_t spin = std::atoll(argv[4]) * 1000, compute = std::atoll(argv[5]) * 1000;
  const std::vector<int64_t> ns = {compute,     compute / 2, compute / 3,
                                   compute / 20, compute / 20, 2 * compute};
  int address[2];
  if (pipe(address) != 0) return 1;
  std::printf("{\"world\": %d, \"mode\": \"%s\", ", world, mode.c_str());
  std::fflush(stdout);
  pid_t child = 0;
  if (mode == "process" && (child = fork()) == 0) {
    char text[100] = {};
    if (read(address[0], text, sizeof text - 1) <= 0) _exit(1);
    crystal_client* client = crystal_client_attach(text, 0, 1);
    check(client == nullptr ? -1 : 0);
    report(drive(client, iterations, ns));
    crystal_client_detach(client);
    _exit(0);
  }
  crystal_replay* replayed = build(world, ns);
  const int32_t external[] = {0};
  const crystal_live_options options{iterations, 2, spin, spin, mode != "caller", mode == "help"};
  crystal_live* live = crystal_live_start(replayed, external, 1, &options);
  check(live == nullptr ? -1 : 0);
  // What can be computed before the first arrival.
  const auto begun = std::chrono::steady_clock::now();
  check(crystal_live_settle(live, 60'000'000'000));
  const std::chrono::duration<double> ahead = std::chrono::steady_clock::now() - begun;
  std::printf("\"settle_s\": %.3f, ", ahead.count());
  std::fflush(stdout);
  if (mode == "process") {
    const char* text = crystal_live_address(live);
    if (write(address[1], text, std::strlen(text)) < 0) return 1;
    int status = 0;
    waitpid(child, &status, 0);
  } else {
    crystal_client* client = crystal_live_client(live, 0, 1);
    check(client == nullptr ? -1 : 0);
    report(drive(client, iterations, ns));
    crystal_client_detach(client);
  }
  crystal_live_stats stats{};
  crystal_live_get_stats(live, &stats);
  std::printf("\"releases\": %lld, \"late\": %lld, \"answer_max_us\": %.2f}\n",
              static_cast<long long>(stats.num_releases), static_cast<long long>(stats.num_late),
              static_cast<double>(stats.answer_max_ns) / 1e3);
  crystal_live_stop(live);
  crystal_replay_free(replayed);
}
