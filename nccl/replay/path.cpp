// The critical path of the traced iteration.
#include "replay/engine.h"

namespace crystal::replay {

std::vector<crystal_step> Engine::critical_path() const {
  std::vector<crystal_step> steps;
  int32_t lane = kNone, at = kNone;
  int64_t last = -1;
  for (size_t l = 0; l < moments_.size(); ++l) { // the last mark
    const Rank& rank = ranks_[lanes_[l].rank];
    const Program& program = programs_[rank.program];
    const auto& shape = program.lanes[l - rank.first_lane];
    for (int32_t i = 0; i < shape.body; ++i) {
      if (program.instructions[shape.begin + shape.prologue + i].op == CRYSTAL_OP_MARK &&
          moments_[l][i].end > last) {
        lane = static_cast<int32_t>(l);
        at = i;
        last = moments_[l][i].end;
      }
    }
  }
  while (at >= 0) {
    const Rank& rank = ranks_[lanes_[lane].rank];
    const Program& program = programs_[rank.program];
    const int64_t number = lane - rank.first_lane;
    const auto& shape = program.lanes[number];
    const auto& i = program.instructions[shape.begin + shape.prologue + at];
    const Moment& moment = moments_[lane][at];
    const bool is_bound = moment.by_lane != kNone;
    steps.push_back(crystal_step{lanes_[lane].rank, static_cast<int32_t>(number), at, i.op, i.call,
                                 i.cls, moment.start, moment.end, moment.slack});
    if (is_bound) {
      lane = moment.by_lane;
      at = moment.by_at; // none: it lies before the iteration
    } else {
      --at;
    }
  }
  return steps;
}

} // namespace crystal::replay
