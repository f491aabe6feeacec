// SPDX-License-Identifier: Apache-2.0
// Where the scales of quantized tensors lie: as their elements do, a granule at a time. Pure.
//
//   elements   | granule | granule | granule | padding |      a sub-bucket: tensors of one granule, each from a granule
//   on scales     | scales  | scales  | scales  |         |      so many for each granule: a rank has those of what it
//   has
#pragma once

#include "layout/bucket_packer.h"
#include "layout/flat_layout.h"

namespace fsdp::layout {

// One sub-bucket for each kind of granule (its elements, its scales), in order of first appearance.
Packing pack_granules(std::span<const Placement> tensors, std::span<const TensorSpec> specs, uint32_t ranks);

// The layout of their scales. Its granules are the scales of a granule, and its ranks' boundaries fall where those of
// the elements do.
FlatLayout build_scale_layout(const FlatLayout &elements, std::span<const TensorSpec> specs);

// One scale for each tensor, in their order, wherever its elements are: what all ranks know, each writes its share of.
FlatLayout build_tensor_scale_layout(const FlatLayout &elements);

}  // namespace fsdp::layout
