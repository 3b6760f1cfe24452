// When calls end: at once known, or only once the others have arrived.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace crystal {

struct CallRecord;
class Group;

// The end of one call. From any thread. Times are those of now_ns().
class Release {
 public:
  virtual ~Release() = default;
  // False while it is not known. Throws once it cannot be known any more.
  virtual bool poll() = 0;
  // Until it is known. False at the limit, where `reason` says what it waits for. A
  // caller that `makes_calls` makes none in the meantime.
  virtual bool wait(int64_t limit_ns, bool makes_calls, std::string* reason) = 0;
  // Once it is known.
  virtual int64_t start_ns() const = 0; // of the transfer
  virtual int64_t end_ns() const = 0;
};

// Gives calls their ends.
class ReleaseRule {
 public:
  virtual ~ReleaseRule() = default;
  // A call has arrived. Null if peers that are real set its end.
  virtual std::shared_ptr<Release> arrive(const CallRecord& record, const Group& group) = 0;
  // The program has set its `marks`-th iteration mark.
  // The thread that marks has waited for nothing so long since the mark before; -1 if that is
  // not known.
  virtual void marked(int64_t marks, int64_t at_ns, int64_t computed_ns) {}
  // CPU time that the communication library would take from this rank's core.
  virtual int64_t cpu_ns(const CallRecord& record) const { return 0; }
  // Time that the call itself would take, until the program goes on.
  virtual int64_t call_ns(const CallRecord& record) const { return 0; }
};

// Every call ends `transfer_ns` after it arrived.
std::shared_ptr<ReleaseRule> fixed_release(int64_t transfer_ns);

// An end that is known.
std::shared_ptr<Release> known_release(int64_t start_ns, int64_t end_ns);

// The end of calls that end together.
class End {
 public:
  void add(std::shared_ptr<Release> release) { releases_.push_back(std::move(release)); }
  bool empty() const { return releases_.empty(); }
  void clear() { releases_.clear(); }
  // -1 while it is not known.
  int64_t poll() const;
  // -1 at the limit.
  int64_t wait(int64_t limit_ns, bool makes_calls, std::string* reason) const;

 private:
  std::vector<std::shared_ptr<Release>> releases_;
};

} // namespace crystal
