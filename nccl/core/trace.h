// The captured calls of a rank, which a run of it has to repeat.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/call_record.h"

namespace crystal {

struct ExpectedCall {
  int64_t call = 0; // its ordinal in the capture
  int64_t lane = 0; // host thread by the order of first calls
  std::string key;
};

// Where a run left its trace.
struct Deviation {
  int rank = -1;
  int64_t iteration = 0; // 0 is the prologue, then bodies from 1, then the epilogue
  int64_t call = 0;      // ordinal among the rank's calls
  int64_t captured_call = -1;
  std::string captured; // keys; empty if there is no such call
  std::string came;
  std::string text; // for people
};

class DeviationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Prologue, `num_bodies` times the body, epilogue. Lanes are followed each by itself,
// since how threads interleave is nobody's promise.
class Trace {
 public:
  Trace(int rank, const std::vector<ExpectedCall>& prologue,
        const std::vector<ExpectedCall>& body, const std::vector<ExpectedCall>& epilogue,
        int64_t num_bodies);

  // The captured call that `record` repeats. Throws DeviationError if it is another
  // one; then every further call does.
  int64_t follow(const CallRecord& record, const Group& group);
  // The program has ended: what it still should have called is a deviation, too.
  void end(int64_t num_calls);
  const std::optional<Deviation>& deviation() const { return deviation_; }

 private:
  static constexpr int kSections = 3;
  using Section = std::vector<ExpectedCall>;
  struct Cursor {
    int section = 0;
    int64_t repeat = 0;
    size_t at = 0;
  };
  struct Lane {
    std::array<Section, kSections> sections;
    Cursor cursor;
  };

  // The next call of the lane, null at its end; the cursor stands on it.
  const ExpectedCall* next(Lane& lane) const;
  int64_t iteration(const Cursor& cursor) const;
  void deviate(Lane* lane, const ExpectedCall* expected, int64_t call, const std::string& came);

  const int rank_;
  const int64_t num_bodies_;
  std::map<int64_t, Lane> lanes_;
  std::optional<Deviation> deviation_;
};

} // namespace crystal
