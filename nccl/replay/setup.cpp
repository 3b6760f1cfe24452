// What is replayed: programs, ranks, communicators, what-ifs; checked as it comes.
#include <string>

#include "replay/engine.h"

namespace crystal::replay {

int Engine::add_program(Program program) {
  const auto invalid = [](const std::string& what) {
    throw Failure(CRYSTAL_REPLAY_INVALID, what + ". A program that is added. Mend the program.");
  };
  for (const auto& lane : program.lanes) {
    if (lane.begin < 0 || lane.prologue < 0 || lane.body < 0 || lane.epilogue < 0 ||
        lane.begin + lane.prologue + lane.body + lane.epilogue >
            static_cast<int64_t>(program.instructions.size())) {
      invalid("A lane reaches beyond the instructions");
    }
  }
  for (const auto& i : program.instructions) {
    const bool is_call = i.op == CRYSTAL_OP_POST || i.op == CRYSTAL_OP_COMM;
    const bool has_handle = i.op == CRYSTAL_OP_POST || i.op == CRYSTAL_OP_WAIT;
    const bool has_channel = i.op == CRYSTAL_OP_SIGNAL || i.op == CRYSTAL_OP_AWAIT;
    if (i.op > CRYSTAL_OP_MARK || i.ends > CRYSTAL_ENDS_AFTER_DATA || (is_call && i.slot < 0) ||
        (has_handle && (i.handle < 0 || i.handle >= program.num_handles)) ||
        (has_channel && (i.slot < 0 || i.slot >= program.num_channels)) || i.cls < 0) {
      invalid("An instruction names a handle, channel or class that is not there");
    }
  }
  programs_.push_back(std::move(program));
  return static_cast<int>(programs_.size()) - 1;
}

void Engine::set_communicators(const int32_t* sizes, int32_t n) {
  comms_.assign(n, {});
  for (int32_t i = 0; i < n; ++i) {
    if (sizes[i] < 1) {
      throw Failure(CRYSTAL_REPLAY_INVALID, "A communicator has no participants. Number " +
                                                std::to_string(i) + ". Give at least one.");
    }
    comms_[i].size = sizes[i];
  }
}

void Engine::add_ranks(int32_t n, const int32_t* programs, const int64_t* begin,
                       const int32_t* connections) {
  int64_t num_lanes = 0, num_handles = 0, num_channels = 0;
  for (int32_t r = 0; r < n; ++r) {
    if (programs[r] < 0 || programs[r] >= static_cast<int32_t>(programs_.size())) {
      throw Failure(CRYSTAL_REPLAY_INVALID, "A rank follows no program. Rank " +
                                                std::to_string(r) + ". Add its program first.");
    }
    const Program& program = programs_[programs[r]];
    const auto num_connections = static_cast<int32_t>(begin[r + 1] - begin[r]);
    for (const auto& i : program.instructions) {
      if ((i.op == CRYSTAL_OP_POST || i.op == CRYSTAL_OP_COMM) && i.slot >= num_connections) {
        throw Failure(CRYSTAL_REPLAY_INVALID,
                      "A rank has fewer connections than its program uses. Rank " +
                          std::to_string(r) + ", call " + std::to_string(i.call) +
                          ". Give a communicator for every slot.");
      }
    }
    ranks_.push_back(Rank{programs[r], num_lanes, static_cast<int64_t>(connections_.size()),
                          num_connections, num_handles, num_channels, false});
    num_lanes += static_cast<int64_t>(program.lanes.size());
    num_handles += program.num_handles;
    num_channels += program.num_channels;
    for (int64_t c = begin[r]; c < begin[r + 1]; ++c) {
      if (connections[c] < 0 || connections[c] >= static_cast<int32_t>(comms_.size())) {
        throw Failure(CRYSTAL_REPLAY_INVALID, "A connection names no communicator. Rank " +
                                                  std::to_string(r) +
                                                  ". Set the communicators first.");
      }
      connections_.push_back(Connection{connections[c], 0});
    }
  }
  lanes_.resize(num_lanes);
  handles_.resize(num_handles);
  channels_.resize(num_channels);
}

void Engine::set_rank_factors(const double* factors) {
  rank_factors_.clear();
  if (factors) {
    rank_factors_.assign(factors, factors + ranks_.size());
  }
}

void Engine::set_link_factors(const double* factors) {
  link_factors_.clear();
  if (factors) {
    link_factors_.assign(factors, factors + comms_.size());
  }
}

void Engine::watch(int32_t rank) {
  if (rank < 0 || rank >= static_cast<int32_t>(ranks_.size())) {
    throw Failure(CRYSTAL_REPLAY_INVALID, "There is no such rank to watch. Rank " +
                                              std::to_string(rank) + ". Add the ranks first.");
  }
  ranks_[rank].is_watched = true;
}

void Engine::set_perturbations(const crystal_perturbation* list, int32_t n) {
  for (auto& rank : ranks_) {
    rank.is_perturbed = false;
  }
  for (int32_t i = 0; i < n; ++i) {
    const auto& p = list[i];
    if (p.rank < 0 || p.rank >= static_cast<int32_t>(ranks_.size()) || p.kind < CRYSTAL_SLOW ||
        p.kind > CRYSTAL_PAUSE_AT || p.every < 0 || p.pause_ns < 0 || !(p.factor >= 0)) {
      throw Failure(CRYSTAL_REPLAY_INVALID,
                    "A perturbation names no rank, or makes time negative. Perturbation " +
                        std::to_string(i) + ", rank " + std::to_string(p.rank) +
                        ". Give a rank of the world, and factors and pauses of 0 or more.");
    }
    ranks_[p.rank].is_perturbed = true;
  }
  perturbations_.assign(list, list + n);
}

void Engine::set_link_classes(const int32_t* classes) {
  link_classes_.clear();
  num_link_classes_ = 0;
  if (classes) {
    link_classes_.assign(classes, classes + comms_.size());
    for (const int32_t c : link_classes_) {
      num_link_classes_ = std::max(num_link_classes_, c + 1);
    }
  }
}

} // namespace crystal::replay
