// SPDX-License-Identifier: Apache-2.0
// Tests that the owners that the contract names get whole matrices, in waves within the limit. The matrices' rows are
// sent there and back correctly.
#include "memory/matrix_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "memory/model_plan.h"

namespace fsdp::memory {
namespace {

ParamSpec matrix_param(const std::string &name, std::vector<uint64_t> shape, std::vector<uint64_t> splits = {}) {
  ParamSpec param;
  param.name = name;
  param.shape = std::move(shape);
  for (const uint64_t size : param.shape) param.element_count *= size;
  param.matrix_splits = splits.empty() ? std::vector<uint64_t>{param.shape[param.shape.size() - 2]} : splits;
  return param;
}

ModelSpec model_of(const layout::Mesh &mesh, std::vector<ParamSpec> params) {
  ModelSpec spec;
  spec.mesh() = mesh;
  GroupSpec group;
  group.name = "layer";
  group.params = std::move(params);
  spec.groups.push_back(std::move(group));
  return spec;
}

// Makes `outer` hosts or replicas with `inner` ranks each.
layout::Mesh two_axes(uint32_t inner, uint32_t outer, layout::OuterAxis axis) {
  layout::Mesh mesh = layout::one_axis(inner);
  mesh.outer_size = outer;
  mesh.outer = axis;
  mesh.ranks.resize(size_t{inner} * outer);
  std::iota(mesh.ranks.begin(), mesh.ranks.end(), 0);
  return mesh;
}

// Returns the names of each owner's matrices, in the order of declaration.
std::map<uint32_t, std::vector<std::string>> owners_of(const ModelSpec &spec, const ModelPlan &plan) {
  std::map<uint32_t, std::vector<std::string>> owners;
  for (const Matrix &matrix : plan.matrices.matrices)
    owners[matrix.owner].push_back(spec.groups[matrix.group].params[matrix.param].name);
  return owners;
}

uint64_t wire_bytes(const ModelPlan &plan) {
  uint64_t elements = 0;
  for (const Matrix &matrix : plan.matrices.matrices)
    elements += matrix.count() - rows_of(matrix, plan, matrix.owner).count;
  return elements * sizeof(float);
}

double max_over_mean(const std::vector<uint64_t> &loads) {
  const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
  return static_cast<double>(*std::ranges::max_element(loads)) / (sum / static_cast<double>(loads.size()));
}

std::vector<ParamSpec> llama_layer() {
  return {matrix_param("q", {4096, 4096}),    matrix_param("k", {1024, 4096}),   matrix_param("v", {1024, 4096}),
          matrix_param("o", {4096, 4096}),    matrix_param("up", {14336, 4096}), matrix_param("gate", {14336, 4096}),
          matrix_param("down", {4096, 14336})};
}

struct Dealt {
  uint32_t ranks;
  std::map<uint32_t, std::vector<std::string>> owners;
  double load;
  uint64_t wire;
};

// The specification has these numbers, which another program computed. It divides rows evenly, so each parameter has a
// group of its own here.
TEST(MatrixPlan, DealsTheCostliestFirstToTheLeastLoaded) {
  const Dealt all[] = {{2, {{0, {"up", "down"}}, {1, {"q", "k", "v", "o", "gate"}}}, 1.109, 436'207'616},
                       {4, {{0, {"up"}}, {1, {"gate"}}, {2, {"down"}}, {3, {"q", "k", "v", "o"}}}, 1.109, 654'311'424},
                       {8,
                        {{0, {"up"}}, {1, {"gate"}}, {2, {"down"}}, {3, {"q"}}, {4, {"o"}}, {5, {"k"}}, {6, {"v"}}},
                        2.218,
                        763'363'328}};
  for (const Dealt &expected : all) {
    ModelSpec spec = model_of(layout::one_axis(expected.ranks), {});
    spec.groups.clear();
    for (ParamSpec &param : llama_layer()) {
      GroupSpec group;
      group.name = param.name;
      group.params = {std::move(param)};
      spec.groups.push_back(std::move(group));
    }
    const ModelPlan plan = plan_model(spec);
    auto owners = owners_of(spec, plan);
    for (auto &[owner, names] : owners) std::ranges::reverse(names);  // from the last group to the first
    EXPECT_EQ(owners, expected.owners) << expected.ranks << " ranks";
    EXPECT_NEAR(max_over_mean(plan.matrices.loads), expected.load, 5e-4) << expected.ranks << " ranks";
    EXPECT_EQ(wire_bytes(plan), expected.wire) << expected.ranks << " ranks";
  }
}

TEST(MatrixPlan, RanksWithEqualLoadsGiveWayToTheOneWithMostRows) {
  const ModelSpec spec = model_of(layout::one_axis(3), {matrix_param("w", {10, 4})});
  const ModelPlan plan = plan_model(spec);
  const Matrix &matrix = plan.matrices.matrices.at(0);
  std::vector<uint64_t> rows;
  for (uint32_t slot = 0; slot < 3; ++slot) rows.push_back(rows_of(matrix, plan, slot).count / 4);
  EXPECT_EQ(rows, (std::vector<uint64_t>{4, 4, 2}));
  EXPECT_EQ(matrix.owner, 0u);
  EXPECT_EQ(wire_bytes(plan), 96u);
}

TEST(MatrixPlan, EqualMatricesOfAStackGoToNeighboursWhereTheirRowsAre) {
  const ModelSpec spec = model_of(layout::one_axis(2), {matrix_param("experts", {8, 16, 8})});
  const ModelPlan plan = plan_model(spec);
  std::vector<uint32_t> owners;
  for (const Matrix &matrix : plan.matrices.matrices) owners.push_back(matrix.owner);
  EXPECT_EQ(owners, (std::vector<uint32_t>{0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(wire_bytes(plan), 0u);
}

TEST(MatrixPlan, SplitsAreMatricesOfTheirOwn) {
  const ModelSpec spec = model_of(layout::one_axis(1), {matrix_param("qkv", {2, 24, 8}, {16, 4, 4})});
  const ModelPlan plan = plan_model(spec);
  std::vector<std::array<uint64_t, 5>> found;
  for (const Matrix &matrix : plan.matrices.matrices)
    found.push_back({matrix.split, matrix.batch, matrix.row_offset, matrix.rows, matrix.first});
  EXPECT_EQ(found, (std::vector<std::array<uint64_t, 5>>{{0, 0, 0, 16, 0},
                                                         {0, 1, 0, 16, 192},
                                                         {1, 0, 16, 4, 128},
                                                         {1, 1, 16, 4, 320},
                                                         {2, 0, 20, 4, 160},
                                                         {2, 1, 20, 4, 352}}));
}

TEST(MatrixPlan, WavesHoldNoMoreThanTheLimitForEachOwner) {
  std::vector<ParamSpec> params;
  for (int i = 0; i < 12; ++i) params.push_back(matrix_param("w" + std::to_string(i), {64, 64}));  // 16 KiB each
  ModelSpec spec = model_of(layout::one_axis(2), params);
  const ModelPlan one = plan_model(spec);
  EXPECT_EQ(one.matrices.waves.size(), 1u) << "64 MiB by default";
  EXPECT_EQ(one.matrices.limit_bytes, 64u << 20);
  spec.matrix_bytes = 40'000;  // two matrices
  const ModelPlan plan = plan_model(spec);
  ASSERT_EQ(plan.matrices.waves.size(), 3u);
  for (const MatrixWave &wave : plan.matrices.waves) {
    std::map<uint32_t, int> of_owner;
    for (const Matrix &matrix : plan.matrices.of(wave)) ++of_owner[matrix.owner];
    EXPECT_EQ(of_owner, (std::map<uint32_t, int>{{0, 2}, {1, 2}}));
  }
  EXPECT_EQ(plan.matrices.waves[0].turn, 0u);
  EXPECT_EQ(plan.matrices.waves[1].turn, 1u);
  EXPECT_EQ(plan.matrices.waves[2].turn, 0u);
  uint64_t whole = 0;
  for (const MatrixTurn &turn : plan.matrices.of_mesh[0]) whole += turn.whole * sizeof(float);
  EXPECT_EQ(whole, 4u * 64 * 64 * sizeof(float)) << "two turns of two matrices";
  EXPECT_LT(plan.region(RegionId::matrices).bytes, one.region(RegionId::matrices).bytes);
  EXPECT_EQ(validate(plan, spec), "");
}

TEST(MatrixPlan, AMatrixAboveTheLimitIsRefusedByName) {
  ModelSpec spec =
      model_of(layout::one_axis(2), {matrix_param("small", {8, 8}), matrix_param("qkv", {96, 64}, {32, 64})});
  spec.matrix_bytes = 64 * 64 * 4 - 1;
  const std::vector<std::string> violations = find_violations(spec);
  ASSERT_EQ(violations.size(), 1u);
  for (const char *part : {"'qkv'", "'layer'", "split 1", "64 x 64", "16384", "16383"})
    EXPECT_NE(violations[0].find(part), std::string::npos) << violations[0];
  spec.matrix_bytes += 1;
  EXPECT_TRUE(find_violations(spec).empty());
}

TEST(MatrixPlan, ABoxThatCutsAMatrixIsRefused) {
  ModelSpec spec = model_of(layout::one_axis(2), {matrix_param("w", {4, 8, 8})});
  ParamSpec &param = spec.groups[0].params[0];
  param.global_shape = {8, 8, 8};
  param.global_offset = {4, 0, 0};
  EXPECT_TRUE(find_violations(spec).empty()) << "some matrices of a stack";
  param.global_shape = {4, 16, 8};
  param.global_offset = {0, 8, 0};
  ASSERT_EQ(find_violations(spec).size(), 1u);
  EXPECT_NE(find_violations(spec)[0].find("cuts the matrices"), std::string::npos);
}

TEST(MatrixPlan, MoreMatricesThanCanBeCountedAreRefused) {
  ModelSpec spec = model_of(layout::one_axis(2), {matrix_param("w", {max_matrices + 1, 1, 1})});
  ASSERT_EQ(find_violations(spec).size(), 1u);
  EXPECT_NE(find_violations(spec)[0].find("1048577 matrices"), std::string::npos) << find_violations(spec)[0];
  spec = model_of(layout::one_axis(2), {matrix_param("w", {1, 1})});
  spec.groups[0].params[0].shape = {uint64_t{1} << 33, uint64_t{1} << 33};
  spec.groups[0].params[0].matrix_splits = {uint64_t{1} << 33};
  spec.matrix_bytes = 1;
  EXPECT_NE(find_violations(spec).at(0).find("matrix_bytes is 1"), std::string::npos) << "no size overflows";
}

TEST(MatrixPlan, AModelWithoutMatricesHasNoMemoryForThem) {
  ModelSpec spec = model_of(layout::one_axis(2), {matrix_param("w", {8, 8})});
  spec.groups[0].params[0].matrix_splits.clear();
  EXPECT_EQ(plan_model(spec).region(RegionId::matrices).bytes, 0u);
}

// -- rows find their way: the memory of all ranks of one mesh, as numbers --

class Travel {
 public:
  Travel(const ModelSpec &spec, const ModelPlan &plan) : spec_(spec), plan_(plan), mesh_(spec.mesh()) {
    const uint64_t size = plan.matrices.of_mesh[0][1].end();
    regions_.assign(mesh_.size(), std::vector<float>(size, -1));
    routes_.resize(mesh_.size());
    left_out_.resize(plan.matrices.matrices.size());
  }

  void leave_out(size_t matrix) { left_out_[matrix] = 1; }

  // Returns a description of the error, or an empty text.
  std::string there_and_back() {
    for (const MatrixWave &wave : plan_.matrices.waves) {
      for (uint32_t rank = 0; rank < mesh_.size(); ++rank)
        find_route(spec_, plan_, wave, rank, left_out_, scratch_, routes_[rank]);
      for (uint32_t rank = 0; rank < mesh_.size(); ++rank)
        own_rows(wave, rank, [](float &at, float value) { at = value; });
      travel(false);
      if (const std::string wrong = check_whole(wave); !wrong.empty()) return wrong;
      negate(wave);
      travel(true);
      std::string wrong;
      std::vector<std::vector<uint64_t>> counts(mesh_.size());
      for (uint32_t rank = 0; rank < mesh_.size(); ++rank)
        own_rows(wave, rank, [&](float at, float value) {
          if (at != -value) wrong = "a row did not come back";
          counts[rank].push_back(1);
        });
      if (!wrong.empty()) return wrong;
      if (const std::string lost = check_counts(wave); !lost.empty()) return lost;
    }
    return {};
  }

 private:
  static float value(const Matrix &matrix, uint64_t element) {
    return static_cast<float>(1 + matrix.param * 4096 + element);
  }
  template <class Visit>
  void own_rows(const MatrixWave &wave, uint32_t rank, Visit &&visit) {
    for (const auto *list : {&routes_[rank].whole, &routes_[rank].rows, &routes_[rank].outer_rows})
      for (const OwnRows &rows : *list)
        for (uint64_t i = 0; i < rows.count; ++i)
          visit(regions_[rank].at(rows.place + i), value(plan_.matrices.of(wave)[rows.matrix], rows.first + i));
  }
  uint32_t rank_of(uint32_t inner, uint32_t outer) const { return outer * mesh_.inner_size + inner; }
  void move(uint32_t holder, uint32_t owner, const MatrixMove &move, bool back) {
    for (uint64_t i = 0; i < move.count; ++i) {
      float &at_holder = regions_[holder].at(move.at_holder + i), &at_owner = regions_[owner].at(move.at_owner + i);
      (back ? at_holder : at_owner) = back ? at_owner : at_holder;
    }
  }
  // All ranks of an axis must have the same moves. The test carries out the first rank's moves.
  void travel(bool back) {
    const auto inner = [&] {
      for (uint32_t o = 0; o < mesh_.outer_size; ++o)
        for (const MatrixMove &one : routes_[rank_of(0, o)].inner)
          move(rank_of(one.holder, o), rank_of(one.owner, o), one, back);
    };
    const auto outer = [&] {
      for (uint32_t i = 0; i < mesh_.inner_size; ++i)
        for (const MatrixMove &one : routes_[rank_of(i, 0)].outer)
          move(rank_of(i, one.holder), rank_of(i, one.owner), one, back);
    };
    back ? inner() : outer();
    back ? outer() : inner();
  }
  template <class Visit>
  void owned(const MatrixWave &wave, Visit &&visit) {
    for (uint32_t rank = 0; rank < mesh_.size(); ++rank)
      for (uint32_t i = 0; i < wave.count; ++i) {
        const Matrix &matrix = plan_.matrices.of(wave)[i];
        if (left_out_[wave.first + i]) continue;
        if (matrix.owner != Matrix::every_rank && matrix.owner != mesh_.slot(rank)) continue;
        for (uint64_t e = 0; e < matrix.count(); ++e)
          visit(regions_[rank].at(matrix.place + e), value(matrix, matrix.first + e));
      }
  }
  std::string check_whole(const MatrixWave &wave) {
    std::string wrong;
    owned(wave, [&](float at, float expected) {
      if (at != expected) wrong = "a matrix is not whole";
    });
    return wrong;
  }
  void negate(const MatrixWave &wave) {
    owned(wave, [](float &at, float) { at = -at; });
  }
  // Every element of a matrix is in one slot, so the ranks of a replica together have it once.
  std::string check_counts(const MatrixWave &wave) {
    uint64_t expected = 0, found = 0;
    for (uint32_t i = 0; i < wave.count; ++i)
      if (!left_out_[wave.first + i]) expected += plan_.matrices.of(wave)[i].count();
    const uint32_t replicas = mesh_.size() / mesh_.slots();
    for (const MatrixRoute &route : routes_)
      for (const auto *list : {&route.whole, &route.rows, &route.outer_rows})
        for (const OwnRows &rows : *list) found += rows.count;
    if (spec_.groups[0].strategy == FSDP_STRATEGY_NO_SHARD) return found == expected * mesh_.size() ? "" : "a copy";
    return found == expected * replicas ? "" : "rows are missing, or held twice";
  }

  const ModelSpec &spec_;
  const ModelPlan &plan_;
  const layout::Mesh &mesh_;
  std::vector<std::vector<float>> regions_;
  std::vector<MatrixRoute> routes_;
  std::vector<uint8_t> left_out_;
  RouteScratch scratch_;
};

TEST(MatrixPlan, RowsTravelToTheirOwnersAndBack) {
  std::mt19937 random(7);
  const auto below = [&](uint32_t limit) { return static_cast<uint32_t>(random() % limit); };
  const layout::OuterAxis axes[] = {layout::OuterAxis::none, layout::OuterAxis::replicate, layout::OuterAxis::optim,
                                    layout::OuterAxis::shard};
  for (int i = 0; i < 400; ++i) {
    const layout::OuterAxis axis = axes[below(4)];
    const layout::Mesh mesh =
        axis == layout::OuterAxis::none ? layout::one_axis(1 + below(6)) : two_axes(1 + below(4), 2 + below(3), axis);
    std::vector<ParamSpec> params;
    for (uint32_t p = 0; p < 1 + below(5); ++p) {
      const uint64_t rows = 1 + below(20);
      std::vector<uint64_t> splits{rows};
      if (rows > 2 && below(2)) splits = {1, rows - 1};
      params.push_back(matrix_param("w" + std::to_string(p), {1 + below(4), rows, 1 + below(9)}, splits));
      if (below(2)) params.back().row_dimensions = 2;
    }
    ModelSpec spec = model_of(mesh, params);
    if (below(4) == 0) spec.groups[0].strategy = FSDP_STRATEGY_NO_SHARD;
    if (below(2)) spec.matrix_bytes = 2048;
    const ModelPlan plan = plan_model(spec);
    Travel travel(spec, plan);
    if (below(2)) travel.leave_out(below(static_cast<uint32_t>(plan.matrices.matrices.size())));
    ASSERT_EQ(travel.there_and_back(), "") << "case " << i;
    ASSERT_EQ(plan.region(RegionId::matrices).bytes % page_bytes, 0u);
  }
}

}  // namespace
}  // namespace fsdp::memory
