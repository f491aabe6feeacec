// SPDX-License-Identifier: Apache-2.0
// Plans the matrices of a model, which come whole to one rank inside the update window: the owner of each, the wave in
// which it travels, and its place in memory. A pure function of the declaration and of the meshes of all ranks; the
// ranks of one mesh have the same matrices, owners and waves.
//
//   matrix   rows of the last two dimensions of a parameter: all of them, or a split
//   owner    the slot of the group's mesh whose rank gets the matrix whole. With FSDP_STRATEGY_NO_SHARD every rank has
//            the whole parameter, so each is the owner of its own copy
//   wave     the matrices of one mesh that travel together: as many for each owner as matrix_bytes allow. Two waves are
//            under way at once, in the two turns of the region
//
// A turn has three areas. `whole` has the matrices of this rank. `rows` has this rank's rows of matrices whose owner is
// another inner rank with the same outer index. `outer` has this rank's rows of matrices whose owner has another outer
// index. Rows in `outer` travel over the outer axis first, into `rows` or `whole` of the intermediate rank, and then
// over the inner axis. The intermediate rank has this rank's inner index and the owner's outer index.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/model_spec.h"

namespace fsdp::memory {

struct ModelPlan;

struct Matrix {
  static constexpr uint32_t every_rank = UINT32_MAX;

  uint32_t group = 0, param = 0;    // index in the model, and in the group
  uint32_t bucket = 0, tensor = 0;  // place of the parameter: bucket in the model, tensor in the bucket
  uint64_t batch = 0, split = 0;
  uint64_t row_offset = 0, rows = 0, columns = 0;
  uint64_t first = 0;           // the parameter's element at which the matrix begins
  uint32_t owner = every_rank;  // slot of the group's mesh
  uint64_t place = 0;           // place in the region of the owner, in elements

  uint64_t count() const { return rows * columns; }
  uint64_t end() const { return first + count(); }
};

struct MatrixWave {
  uint32_t mesh = 0, turn = 0;
  uint32_t first = 0, count = 0;  // the matrices of the wave
};

// The number of elements of a turn on the rank that needs the most.
struct MatrixTurn {
  uint64_t begin = 0;                       // first element of the region
  uint64_t whole = 0, rows = 0, outer = 0;  // sizes of the areas, in their order in memory

  uint64_t rows_begin() const { return begin + whole; }
  uint64_t outer_begin() const { return begin + whole + rows; }
  uint64_t end() const { return begin + whole + rows + outer; }
};

struct MatrixPlan {
  static constexpr uint32_t turns = 2;
  std::vector<Matrix> matrices;  // ordered by wave; within a wave in the order in which owners get them
  std::vector<MatrixWave> waves;
  std::vector<std::array<MatrixTurn, turns>> of_mesh;
  uint64_t limit_bytes = 0;     // limit for the matrices of one owner in one wave, in fp32
  std::vector<uint64_t> loads;  // cost of the matrices of each rank of the model's mesh

  std::span<const Matrix> of(const MatrixWave &wave) const {
    return std::span(matrices).subspan(wave.first, wave.count);
  }
};

// The work on a matrix: min(rows, columns)^2 * max(rows, columns), as for a Newton-Schulz iteration.
uint64_t cost_of(const Matrix &matrix) noexcept;
// The elements [first, first + count) of the matrix's parameter, which belong to the slot.
struct MatrixRows {
  uint64_t first = 0, count = 0;
};
MatrixRows rows_of(const Matrix &matrix, const ModelPlan &plan, uint32_t slot);

// ---- how the rows of a wave travel, as one rank of the mesh sees it ----

// This rank's rows of a matrix in its planes, and their place in the region.
struct OwnRows {
  uint32_t matrix;  // index in the wave
  uint64_t first, count, place;
};
// Elements that travel over one axis: from `holder` to `owner` when matrices are collected, and back when they are
// returned. On the outer axis `owner` may be an intermediate rank.
struct MatrixMove {
  uint32_t holder, owner;  // ranks of the axis
  uint64_t count, at_holder, at_owner;
};
struct MatrixRoute {
  std::vector<OwnRows> whole, rows, outer_rows;  // by area of the region
  std::vector<MatrixMove> inner, outer;          // the same on all ranks of the axis

  void clear() noexcept;
};
// Working memory of find_route(): the elements that ranks use in the areas.
struct RouteScratch {
  std::vector<uint64_t> rows, own_rows, outer;
};
// Fills the route of a wave, without allocating if the route's lists have enough room. Matrices with left_out[i] do not
// travel; i is the matrix's number in the plan.
void find_route(const ModelSpec &spec, const ModelPlan &plan, const MatrixWave &wave, uint32_t rank,
                std::span<const uint8_t> left_out, RouteScratch &scratch, MatrixRoute &route);

// Lists the matrices, deals them to owners, and sizes the region of each mesh. The buckets must have their layouts.
void plan_matrices(const ModelSpec &spec, ModelPlan &plan);
inline constexpr uint64_t max_matrices = uint64_t{1} << 20;
uint64_t count_matrices(const ModelSpec &spec);
// Says why the matrices of a parameter cannot be collected; returns nothing if they can.
std::optional<std::string> find_matrix_misfit(const ParamSpec &param, const GroupSpec &group, uint64_t matrix_bytes);
// Describes the owners, loads, waves and bytes in this rank's meshes, as JSON.
std::string describe_matrices(const ModelSpec &spec, const ModelPlan &plan);

}  // namespace fsdp::memory
