#include "core/trace.h"

namespace crystal {

Trace::Trace(int rank, const std::vector<ExpectedCall>& prologue,
             const std::vector<ExpectedCall>& body, const std::vector<ExpectedCall>& epilogue,
             int64_t num_bodies)
    : rank_(rank), num_bodies_(num_bodies) {
  const std::vector<ExpectedCall>* all[kSections] = {&prologue, &body, &epilogue};
  for (int i = 0; i < kSections; ++i) {
    for (const auto& call : *all[i]) {
      lanes_[call.lane].sections[i].push_back(call);
    }
  }
}

const ExpectedCall* Trace::next(Lane& lane) const {
  Cursor& c = lane.cursor;
  while (c.section < kSections) {
    const int64_t repeats = c.section == 1 ? num_bodies_ : 1;
    if (c.repeat < repeats && c.at < lane.sections[c.section].size()) {
      return &lane.sections[c.section][c.at];
    }
    c.at = 0;
    if (++c.repeat >= repeats) {
      c.repeat = 0;
      ++c.section;
    }
  }
  return nullptr;
}

int64_t Trace::iteration(const Cursor& cursor) const {
  return cursor.section == 0 ? 0 : cursor.section == 1 ? cursor.repeat + 1 : num_bodies_ + 1;
}

int64_t Trace::follow(const CallRecord& record, const Group& group) {
  if (deviation_) {
    throw DeviationError(deviation_->text);
  }
  Lane& lane = lanes_[record.stream];
  const ExpectedCall* expected = next(lane);
  const std::string came = key(record, group);
  if (expected == nullptr || expected->key != came) {
    deviate(&lane, expected, record.call, came);
    throw DeviationError(deviation_->text);
  }
  ++lane.cursor.at;
  return expected->call;
}

void Trace::end(int64_t num_calls) {
  for (auto& [number, lane] : lanes_) {
    if (const ExpectedCall* expected = next(lane); expected != nullptr && !deviation_) {
      deviate(&lane, expected, num_calls, "");
    }
  }
}

void Trace::deviate(Lane* lane, const ExpectedCall* expected, int64_t call,
                    const std::string& came) {
  Deviation d;
  d.rank = rank_;
  d.call = call;
  d.came = came;
  if (expected != nullptr) {
    d.captured = expected->key;
    d.captured_call = expected->call;
  }
  d.iteration = iteration(lane->cursor);
  d.text = "The program does not make the calls that were captured. Rank " +
           std::to_string(rank_) + ", iteration " + std::to_string(d.iteration) + ", call " +
           std::to_string(call) + ": captured " +
           (expected != nullptr ? d.captured : "no further call") + ", came " +
           (came.empty() ? "the program's end" : came) +
           ". Capture the job again, and plan again, with the program and the arguments that are "
           "meant.";
  deviation_ = std::move(d);
}

} // namespace crystal
