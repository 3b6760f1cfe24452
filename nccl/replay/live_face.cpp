// The C face of live runs.
#include <algorithm>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include "replay/handle.h"
#include "replay/live.h"
#include "replay/replay.h"

using namespace crystal::replay;

struct crystal_live {
  crystal_replay* world = nullptr;
  std::shared_ptr<Live> live;
  std::string address;
};

struct crystal_client {
  std::unique_ptr<Client> client;
};

namespace {

// Messages of live calls: their objects belong to many threads, a message to one.
thread_local std::string message;

template <class Function>
int64_t guarded(Function function) {
  try {
    return function();
  } catch (...) {
    return code_of_exception(&message);
  }
}

crystal_client* client_of(std::shared_ptr<Segment> segment, int32_t rank, int32_t num_threads,
                          std::shared_ptr<Helper> helper) {
  return new crystal_client{
      std::make_unique<Client>(std::move(segment), rank, num_threads, std::move(helper))};
}

int wait_of(crystal_client* client, int64_t ticket, int64_t limit_ns, bool counts,
            crystal_release* release) {
  return static_cast<int>(guarded([&] {
    std::string reason;
    if (client->client->wait(ticket, std::max<int64_t>(limit_ns, 0), counts, release, &reason)) {
      return 0;
    }
    if (limit_ns > 0) {
      message = "A call is not released within its limit. " + reason + ", limit " +
          std::to_string(limit_ns) +
          " ns. Look at the rank that is named last, or give a longer limit.";
    }
    return static_cast<int>(CRYSTAL_REPLAY_TIMEOUT);
  }));
}

} // namespace

extern "C" {

const char* crystal_live_message(void) { return message.c_str(); }

crystal_live* crystal_live_start(crystal_replay* world, const int32_t* external,
                                 int32_t num_external, const crystal_live_options* options) {
  crystal_live* started = nullptr;
  guarded([&] {
    if (world->is_live) {
      throw Failure(CRYSTAL_REPLAY_INVALID,
                    "The world is in a live run already. Starting another. Stop the first one.");
    }
    auto live = std::make_unique<crystal_live>();
    live->world = world;
    live->live = std::make_shared<Live>(
        world->engine, std::vector<int32_t>(external, external + std::max(num_external, 0)),
        *options);
    live->address = live->live->segment()->address();
    world->is_live = true;
    started = live.release();
    return 0;
  });
  return started;
}

void crystal_live_stop(crystal_live* live) {
  // A fork has no thread to join, and must not end what is its parent's.
  if (live != nullptr && live->live->segment()->header().pid == getpid()) {
    live->live->stop();
    live->world->is_live = false;
    delete live;
  }
}

const char* crystal_live_address(const crystal_live* live) { return live->address.c_str(); }

int crystal_live_settle(crystal_live* live, int64_t limit_ns) {
  return static_cast<int>(guarded([&] {
    if (!live->live->settle(limit_ns)) {
      throw Failure(CRYSTAL_REPLAY_TIMEOUT,
                    "Computing what has arrived takes longer than the limit. " +
                        std::to_string(limit_ns) + " ns. Give a longer limit.");
    }
    return 0;
  }));
}

void crystal_live_get_stats(crystal_live* live, crystal_live_stats* stats) {
  *stats = live->live->stats();
}

crystal_client* crystal_live_client(crystal_live* live, int32_t rank, int32_t num_threads) {
  crystal_client* made = nullptr;
  guarded([&] {
    made = client_of(live->live->segment(), rank, num_threads, live->live);
    return 0;
  });
  return made;
}

crystal_client* crystal_client_attach(const char* address, int32_t rank, int32_t num_threads) {
  crystal_client* made = nullptr;
  guarded([&] {
    made = client_of(std::make_shared<Segment>(address), rank, num_threads, nullptr);
    return 0;
  });
  return made;
}

void crystal_client_detach(crystal_client* client) {
  if (client != nullptr && client->client->pid() == getpid()) { // not a fork
    delete client;
  }
}

int64_t crystal_client_now(const crystal_client* client) { return client->client->now_ns(); }

int64_t crystal_client_arrive(
    crystal_client* client, const crystal_instruction* call, int64_t at_ns) {
  return guarded([&] { return client->client->arrive(*call, at_ns); });
}

int crystal_client_mark(crystal_client* client, int64_t at_ns) {
  return static_cast<int>(guarded([&] {
    client->client->mark(at_ns);
    return 0;
  }));
}

int crystal_client_slowness(crystal_client* client, double factor) {
  return static_cast<int>(guarded([&] {
    client->client->tell_slowness(factor);
    return 0;
  }));
}

int crystal_client_wait(
    crystal_client* client, int64_t ticket, int64_t limit_ns, crystal_release* release) {
  return wait_of(client, ticket, limit_ns, true, release);
}

int crystal_client_watch(
    crystal_client* client, int64_t ticket, int64_t limit_ns, crystal_release* release) {
  return wait_of(client, ticket, limit_ns, false, release);
}

int crystal_client_wait_until(crystal_client* client, int64_t at_ns) {
  return static_cast<int>(guarded([&] {
    client->client->wait_until(at_ns);
    return 0;
  }));
}

} // extern "C"
