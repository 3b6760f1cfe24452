// A reduction over few tensors, each of which stands for several members.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <vector>

namespace crystal {

// What some members hold.
struct Share {
  at::Tensor data; // contiguous
  int64_t copies = 1; // how many members hold it, at least one
};

// into <- reduction over all members. `into` is contiguous, of the shares' dtype
// and number of elements, and may be one of them.
//
// Costs as many passes as there are shares, however many members these stand
// for. Every element is folded by itself, in the order of the shares, so that the
// result depends on nothing else (no number of threads). Floating point of 16 and 8
// bits is folded in float. Finite elements give a finite result: it ends at the
// largest number that the dtype holds. Integers wrap. An AVG of integers is cut
// towards zero.
//
// A PRODUCT has each share as a factor once: that of equal numbers leaves the range
// of any dtype within a few dozen members. Shares of a PREMUL_SUM have been
// multiplied by their holders.
void reduce_shares(
    at::Tensor& into, const std::vector<Share>& shares, const c10d::ReduceOp& op);

} // namespace crystal
