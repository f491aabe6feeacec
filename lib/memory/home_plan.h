// SPDX-License-Identifier: Apache-2.0
// Planes that are at home in a file (fsdp_home). The update brings them to memory in segments: a segment is a run of
// elements of one bucket, with all of its planes that an operation needs. A few buffers (turns) hold segments: while
// one segment is updated, the next is read and the last is written. All functions are pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/direct_io.h"
#include "memory/model_plan.h"

namespace fsdp::memory {

inline constexpr uint64_t default_turn_bytes = uint64_t{64} << 20;
inline constexpr uint64_t least_turn_bytes = uint64_t{64} << 10;
inline constexpr uint32_t default_turns = 3, least_turns = 2, most_turns = 16;

// The number of elements of a segment whose planes have elements of these sizes: as many as fit into a turn, and a
// multiple that fills whole pages of every plane. A plane begins on a page of the file.
uint64_t segment_elements(std::span<const uint64_t> element_bytes, uint64_t turn_bytes);
// The bytes of `count` elements of these planes in the file, each plane in whole pages.
uint64_t home_bytes(std::span<const uint64_t> element_bytes, uint64_t count);

// The sizes of an element in each of the bucket's planes that are at home in the file.
std::vector<uint64_t> home_planes(const BucketPlan &bucket);
bool has_home(const BucketPlan &bucket);
// The bytes of a turn: enough for every segment of every bucket.
uint64_t turn_bytes_of(const ModelSpec &spec, const ModelPlan &plan);

// Lists why planes cannot be at home as the model asks; empty if they can.
std::vector<std::string> find_home_violations(const ModelSpec &spec);

}  // namespace fsdp::memory
