// Work on the bytes of user tensors: what invented data look like.
//
// None of it shows up in a profiler or in autograd while an Unseen lives, since in
// a real run the bytes come from the network.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>

namespace crystal {

struct Unseen {
  at::AutoDispatchBelowADInplaceOrView below;
  at::DisableRecordFunctionGuard unrecorded;
};

// A contiguous flat tensor with the same elements: a view where possible.
inline at::Tensor flat(const at::Tensor& tensor) { return tensor.reshape({-1}); }

// Runs `fill` on a flat view of `tensor`, or on a flat copy that is written back.
template <class Fill>
void fill_flat(at::Tensor& tensor, Fill fill) {
  if (tensor.is_contiguous()) {
    at::Tensor view = tensor.view({-1});
    fill(view);
  } else {
    at::Tensor copy = tensor.contiguous().view({-1});
    fill(copy);
    tensor.copy_(copy.view(tensor.sizes()));
  }
}

// tensor *= factor, where no finite element becomes infinite.
void scale(at::Tensor& tensor, double factor);
// tensor <- reduction over n members that all hold it.
void reduce_equal(at::Tensor& tensor, int64_t n, const c10d::ReduceOp& op);
// into <- reduction of both.
void combine(at::Tensor& into, const at::Tensor& other, const c10d::ReduceOp& op);
// dst <- src cut, or repeated from its start, to dst's size.
void copy_cyclic(at::Tensor& dst, const at::Tensor& src);
// Floating point: seeded, finite, small normals. Integers: zeros.
void fill_with_template(at::Tensor& tensor, uint64_t seed);
// Rows of zeros in a sum of partial activations become rows of the template.
void fill_holes(at::Tensor& tensor, uint64_t seed);

} // namespace crystal
