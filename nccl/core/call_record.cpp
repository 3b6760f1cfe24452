#include "core/call_record.h"

#include <charconv>
#include <stdexcept>
#include <string_view>

namespace crystal {

const char* to_string(Kind kind) {
  switch (kind) {
    case Kind::all_reduce: return "all_reduce";
    case Kind::reduce: return "reduce";
    case Kind::broadcast: return "broadcast";
    case Kind::all_gather: return "all_gather";
    case Kind::reduce_scatter: return "reduce_scatter";
    case Kind::all_to_all: return "all_to_all";
    case Kind::gather: return "gather";
    case Kind::scatter: return "scatter";
    case Kind::send: return "send";
    case Kind::recv: return "recv";
    case Kind::barrier: return "barrier";
  }
  return "?";
}

Kind kind_of(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(Kind::barrier); ++i) {
    if (name == to_string(static_cast<Kind>(i))) {
      return static_cast<Kind>(i);
    }
  }
  throw std::invalid_argument(
      "There is no kind of call named " + name +
      ". A call that is to be recorded. Use one of call_record.h's kinds.");
}

const char* to_string(Transport transport) {
  switch (transport) {
    case Transport::timed: return "timed";
    case Transport::mixed: return "mixed";
    case Transport::real: return "real";
  }
  return "?";
}

const char* to_string(Root root) {
  switch (root) {
    case Root::none: return "none";
    case Root::me: return "me";
    case Root::other: return "other";
  }
  return "?";
}

CallRecord make_call_record(const Call& call, Group& group, int64_t number, int64_t mark) {
  CallRecord record;
  record.call = number;
  record.kind = call.kind;
  record.reduce_op = call.reduce_op;
  record.dtype = call.dtype;
  record.count = call.in_splits.empty() && call.out_splits.empty() ? call.count : -1;
  record.group = group.id();
  if (call.root >= 0) {
    record.root = call.root == group.rank() ? Root::me : Root::other;
  }
  if (call.peer >= 0) {
    record.peer_offset = (call.peer - group.rank() + group.size()) % group.size();
    record.peer_wraps = call.peer < group.rank();
  }
  record.batch = call.batch;
  record.stream = call.stream;
  if (call.kind == Kind::send) {
    record.position = group.next_sent(call.peer, mark);
  } else if (call.kind == Kind::recv) {
    record.position = group.next_received(call.peer, mark);
  } else {
    record.position = group.next_collective(mark);
  }
  record.root_rank = call.root;
  record.peer_rank = call.peer;
  record.any_source = call.any_source;
  record.tag = call.tag;
  record.in_elements = call.in_elements;
  record.out_elements = call.out_elements;
  record.in_splits = call.in_splits;
  record.out_splits = call.out_splits;
  record.is_async = call.is_async;
  return record;
}

// In every call of an emulated rank: one text, nothing on the way to it.
std::string key(const CallRecord& record, const Group& group) {
  std::string text;
  text.reserve(160);
  char digits[20];
  const auto number = [&](int64_t value) -> std::string_view {
    const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
    return {digits, static_cast<size_t>(end - digits)};
  };
  const auto add = [&](std::string_view name, std::string_view value) {
    ((text += ' ') += name) += '=';
    text += value;
  };
  text += to_string(record.kind);
  if (*record.reduce_op) add("op", record.reduce_op);
  if (*record.dtype) add("dtype", record.dtype);
  add("count", record.count < 0 ? "split" : number(record.count));
  add("group", group.signature());
  (text += '/') += number(group.size());
  (text += '#') += number(group.creation());
  if (record.root != Root::none) add("root", to_string(record.root));
  if (record.peer_offset >= 0) {
    add("peer", number(record.peer_offset));
    if (record.peer_wraps) text += 'w';
  }
  if (record.batch_in_mark >= 0) add("batch", number(record.batch_in_mark));
  add("stream", number(record.stream));
  return text;
}

} // namespace crystal
