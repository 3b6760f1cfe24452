// What blocks of memory are for, as far as tensors tell it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "core/ledger.h"

namespace crystal {

// The storages of these tensors are that; of tensors that wrap others (DTensor), the
// storages of those. Nothing happens where no ledger is kept.
void recognise(const std::vector<at::Tensor>& tensors, Recognised as, int32_t owner = -1);

// `parameter` is `owner`'s from here on (unless it is known already), as long as somebody
// else holds it: its storage and that of its gradient are recognised now and at every
// look.
void know_parameter(const at::Tensor& parameter, int32_t owner);

// The owner of a known parameter, or of one whose storage the tensor shares; -1 of
// others.
int32_t owner_of(const at::Tensor& tensor);

// Looks at all known parameters. Takes the GIL if wrapping tensors are among them.
void look_at_parameters();

} // namespace crystal
