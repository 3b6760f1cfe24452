#include "core/group.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace crystal {

std::string digest(const std::vector<int>& numbers) {
  uint64_t hash = 14695981039346656037ull;
  for (int number : numbers) {
    for (int shift = 0; shift < 32; shift += 8) {
      hash ^= static_cast<uint8_t>(static_cast<uint32_t>(number) >> shift);
      hash *= 1099511628211ull;
    }
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

std::string axis_signature(const std::vector<int>& members) {
  if (members.size() <= 1) {
    return "1";
  }
  std::vector<int> offsets(members.size());
  std::transform(members.begin(), members.end(), offsets.begin(), [&](int member) {
    return member - members.front();
  });
  const std::vector<int> original = offsets;

  // Peel the innermost axis: the longest run of equal steps from the start
  // that tiles the whole list. What is left are the starts of the tiles.
  std::string text;
  while (offsets.size() > 1) {
    const int stride = offsets[1];
    size_t length = 1;
    while (length < offsets.size() && offsets[length] == static_cast<int>(length) * stride) {
      ++length;
    }
    if (offsets.size() % length != 0) {
      return "irregular:" + digest(original);
    }
    std::vector<int> starts;
    for (size_t tile = 0; tile < offsets.size(); tile += length) {
      for (size_t i = 0; i < length; ++i) {
        if (offsets[tile + i] - offsets[tile] != static_cast<int>(i) * stride) {
          return "irregular:" + digest(original);
        }
      }
      starts.push_back(offsets[tile]);
    }
    text += (text.empty() ? "" : ",") + std::to_string(length) + ":" + std::to_string(stride);
    offsets = std::move(starts);
  }
  return text;
}

Group::Group(int id, std::vector<int> members, int my_rank, int creation)
    : id_(id),
      members_(std::move(members)),
      creation_(creation),
      signature_(axis_signature(members_)),
      identity_(digest(members_) + "#" + std::to_string(creation)) {
  const auto me = std::find(members_.begin(), members_.end(), my_rank);
  if (me == members_.end()) {
    throw std::invalid_argument(
        "This rank is not a member of the group that it creates. Rank " +
        std::to_string(my_rank) + ", group of " + std::to_string(members_.size()) +
        " members starting with rank " + std::to_string(members_.front()) +
        ". Create the group only on its members.");
  }
  rank_ = static_cast<int>(me - members_.begin());
}

bool Group::is_mate(int group_rank) const {
  return std::binary_search(mates_.begin(), mates_.end(), group_rank);
}

Position Group::advance(Counter& counter, int64_t mark) {
  if (counter.mark != mark) {
    counter.mark = mark;
    counter.in_mark = 0;
  }
  return Position{counter.total++, mark, counter.in_mark++};
}

int Group::next_source() {
  const int source = (rank_ + 1 + sources_taken_ % (size() - 1)) % size();
  ++sources_taken_;
  return source;
}

} // namespace crystal
