// SPDX-License-Identifier: Apache-2.0
#include "memory/matrix_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <fmt/ranges.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/text.h"
#include "memory/model_plan.h"

namespace fsdp::memory {

namespace {

constexpr auto what = "matrices";
constexpr uint64_t usual_limit = uint64_t{64} << 20;
// Matrices and rows begin at multiples of this many elements.
constexpr uint64_t place_alignment = 64;

uint64_t align_elements(uint64_t elements) { return round_up(elements, place_alignment, what); }

// ---- the matrices ----

// Lists the matrices of a parameter: split by split, and batch by batch.
void list_matrices(const ParamSpec &param, const Matrix &place, std::vector<Matrix> &matrices) {
  const uint64_t columns = param.shape.back(), all_rows = param.shape[param.shape.size() - 2];
  const uint64_t batches = param.element_count / (all_rows * columns);
  uint64_t row = 0;
  for (uint64_t split = 0; split < param.matrix_splits.size(); row += param.matrix_splits[split++])
    for (uint64_t batch = 0; batch < batches; ++batch) {
      Matrix &matrix = matrices.emplace_back(place);
      matrix.batch = batch, matrix.split = split;
      matrix.row_offset = row, matrix.rows = param.matrix_splits[split], matrix.columns = columns;
      matrix.first = (batch * all_rows + row) * columns;
    }
}

bool is_whole(const ModelSpec &spec, const Matrix &matrix) {
  return spec.groups[matrix.group].strategy == FSDP_STRATEGY_NO_SHARD;
}

// The matrices of the groups of one mesh, from the last group to the first. `whole`: only matrices of which each rank
// has its own copy; if false, only the others.
std::vector<Matrix> list_matrices(const ModelSpec &spec, const ModelPlan &plan, uint32_t mesh, bool whole) {
  std::vector<Matrix> matrices;
  for (auto g = static_cast<uint32_t>(spec.groups.size()); g-- > 0;) {
    const GroupSpec &group = spec.groups[g];
    if (group.mesh != mesh || (group.strategy == FSDP_STRATEGY_NO_SHARD) != whole) continue;
    std::vector<std::pair<uint32_t, uint32_t>> places(group.params.size());
    for (const uint32_t b : plan.groups[g].buckets)
      for (uint32_t t = 0; t < plan.buckets[b].params.size(); ++t) places[plan.buckets[b].params[t]] = {b, t};
    for (uint32_t p = 0; p < group.params.size(); ++p)
      if (!group.params[p].matrix_splits.empty())
        list_matrices(group.params[p], {.group = g, .param = p, .bucket = places[p].first, .tensor = places[p].second},
                      matrices);
  }
  return matrices;
}

// ---- owners ----

// Slot k has the elements [k * size, (k + 1) * size) of the sub-bucket, in which the parameter begins at `base`.
struct SlotCut {
  uint64_t base, size;
  SlotCut(const Matrix &matrix, const ModelPlan &plan) {
    const layout::FlatLayout &layout = plan.buckets[matrix.bucket].layout;
    const layout::Placement &tensor = layout.tensors[matrix.tensor];
    const layout::SubBucket &sub = layout.sub_buckets[tensor.sub_bucket];
    base = tensor.full_offset - sub.full_offset;
    size = sub.shard_count;
  }
  uint32_t slot_of(uint64_t element) const { return static_cast<uint32_t>((base + element) / size); }
  MatrixRows rows(const Matrix &matrix, uint64_t first_slot, uint64_t end_slot) const {
    const auto element = [&](uint64_t slot) {
      const uint64_t at = slot * size;
      return std::clamp(at > base ? at - base : 0, matrix.first, matrix.end());
    };
    return {element(first_slot), element(end_slot) - element(first_slot)};
  }
};

// For each rank of the job, the cost of all matrices that it owns.
using Loads = std::unordered_map<uint32_t, uint64_t>;

// Deals the matrices of one mesh to its slots: the costliest first, each to the slot with the least load. Among slots
// with equal loads, the slot with the most rows of the matrix gets it; if these are equal, too, the slot of the lowest
// rank.
class Deal {
 public:
  Deal(const layout::Mesh &mesh, std::span<const uint32_t> ranks, Loads &loads) : mesh_(mesh), ranks_(ranks) {
    of_slot_.resize(mesh.slots());
    for (uint32_t r = 0; r < ranks.size(); ++r)
      of_slot_[mesh.slot(r)] = std::max(of_slot_[mesh.slot(r)], loads[ranks[r]]);
    for (uint32_t slot = 0; slot < of_slot_.size(); ++slot) queue_.insert(key_of(slot));
    before_ = of_slot_;
  }

  void deal(std::vector<Matrix> &matrices, const ModelPlan &plan) {
    std::vector<uint32_t> order(matrices.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](uint32_t a, uint32_t b) {
      if (cost_of(matrices[a]) != cost_of(matrices[b])) return cost_of(matrices[a]) > cost_of(matrices[b]);
      return std::tuple(matrices[a].group, matrices[a].param) < std::tuple(matrices[b].group, matrices[b].param);
    });
    for (const uint32_t index : order) give(matrices[index], choose(matrices[index], plan));
    join_neighbours(matrices);
  }

  void add_to(Loads &loads) const {
    for (uint32_t r = 0; r < ranks_.size(); ++r)
      loads[ranks_[r]] = saturated(loads[ranks_[r]], of_slot_[mesh_.slot(r)] - before_[mesh_.slot(r)]);
  }

 private:
  using Key = std::tuple<uint64_t, uint32_t, uint32_t>;  // load, rank in the mesh, slot
  Key key_of(uint32_t slot) const { return {of_slot_[slot], mesh_.holder(slot), slot}; }
  static uint64_t saturated(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

  uint32_t choose(const Matrix &matrix, const ModelPlan &plan) const {
    const uint64_t least = std::get<uint64_t>(*queue_.begin());
    const SlotCut cut(matrix, plan);
    uint32_t chosen = std::get<2>(*queue_.begin());
    uint64_t most = 0;
    for (uint32_t slot = cut.slot_of(matrix.first); slot <= cut.slot_of(matrix.end() - 1); ++slot) {
      const uint64_t count = cut.rows(matrix, slot, slot + 1).count;
      if (of_slot_[slot] != least || count < most) continue;
      if (count == most && mesh_.holder(slot) > mesh_.holder(chosen)) continue;
      most = count, chosen = slot;
    }
    return chosen;
  }

  void give(Matrix &matrix, uint32_t slot) {
    queue_.erase(key_of(slot));
    of_slot_[slot] = saturated(of_slot_[slot], cost_of(matrix));
    queue_.insert(key_of(slot));
    matrix.owner = slot;
  }

  // Exchanges the owners of equal matrices of a parameter, so that each owner has consecutive ones. The owner then gets
  // several at once, and already has more of their rows. No load changes.
  static void join_neighbours(std::vector<Matrix> &matrices) {
    std::map<std::tuple<uint32_t, uint32_t, uint64_t>, std::vector<Matrix *>> alike;
    for (Matrix &matrix : matrices) alike[{matrix.group, matrix.param, matrix.rows}].push_back(&matrix);
    for (auto &[key, members] : alike) {
      std::vector<uint32_t> owners;
      for (const Matrix *matrix : members) owners.push_back(matrix->owner);
      std::ranges::sort(owners);
      std::ranges::sort(members, {}, &Matrix::first);
      for (size_t i = 0; i < members.size(); ++i) members[i]->owner = owners[i];
    }
  }

  const layout::Mesh &mesh_;
  std::span<const uint32_t> ranks_;
  std::vector<uint64_t> of_slot_, before_;
  std::set<Key> queue_;
};

// The meshes that other ranks have for the groups of mesh `mesh`. They are not known before the seal, and are then
// taken as shifts of this rank's mesh, which is true of regular meshes.
std::vector<std::vector<uint32_t>> list_instances(const ModelSpec &spec, uint32_t mesh) {
  std::vector<std::vector<uint32_t>> instances;
  const std::vector<uint32_t> &own = spec.meshes[mesh].ranks;
  if (mesh == 0) return {own};
  const auto group = std::ranges::find(spec.groups, mesh, &GroupSpec::mesh);
  for (const GroupInstance &instance : group->instances) instances.push_back(instance.ranks);
  if (!instances.empty()) return instances;
  const std::vector<uint32_t> &all = spec.mesh().ranks;
  std::set<uint32_t> rest(all.begin(), all.end());
  const auto lowest = *std::ranges::min_element(own);
  while (!rest.empty()) {
    std::vector<uint32_t> shifted;
    for (const uint32_t rank : own) shifted.push_back(rank - lowest + *rest.begin());
    for (const uint32_t rank : shifted)
      if (rest.erase(rank) == 0) return {own};
    instances.push_back(std::move(shifted));
  }
  return instances;
}

// Deals the matrices of a mesh in all instances of the mesh, so that all ranks know all loads. Returns the matrices of
// this rank's mesh.
std::vector<Matrix> deal_mesh(const ModelSpec &spec, const ModelPlan &plan, uint32_t mesh, Loads &loads) {
  const std::vector<Matrix> undealt = list_matrices(spec, plan, mesh, false);
  std::vector<Matrix> own = undealt;
  if (undealt.empty()) return own;
  for (const std::vector<uint32_t> &ranks : list_instances(spec, mesh)) {
    std::vector<Matrix> matrices = undealt;
    Deal deal(spec.meshes[mesh], ranks, loads);
    deal.deal(matrices, plan);
    deal.add_to(loads);
    if (ranks == spec.meshes[mesh].ranks) own = std::move(matrices);
  }
  return own;
}

// ---- waves ----

uint64_t bytes_of(const Matrix &matrix) {
  return checked_multiply(align_elements(matrix.count()), sizeof(float), what);
}

// The room that each slot has used in its current wave.
struct Filling {
  uint32_t wave = 0;
  uint64_t elements = 0;
};

// Assigns the matrices to waves and to places in the `whole` area of their wave. A matrix of which every rank has a
// copy has the same place on all ranks.
void add_waves(std::vector<Matrix> matrices, uint32_t mesh, MatrixPlan &planned) {
  std::map<uint32_t, Filling> by_owner;
  std::vector<uint32_t> wave_of;
  for (Matrix &matrix : matrices) {
    Filling &filling = by_owner[matrix.owner];
    if (filling.elements && filling.elements * sizeof(float) + bytes_of(matrix) > planned.limit_bytes)
      filling = {filling.wave + 1, 0};
    matrix.place = filling.elements;
    filling.elements += align_elements(matrix.count());
    wave_of.push_back(filling.wave);
  }
  uint32_t waves = 0;
  for (const uint32_t wave : wave_of) waves = std::max(waves, wave + 1);
  const auto before = static_cast<uint32_t>(
      std::ranges::count(planned.waves, mesh, &MatrixWave::mesh));  // the turns of a mesh alternate
  for (uint32_t wave = 0; wave < waves; ++wave) {
    MatrixWave &added = planned.waves.emplace_back();
    added.mesh = mesh, added.turn = (before + wave) % MatrixPlan::turns;
    added.first = static_cast<uint32_t>(planned.matrices.size());
    for (size_t i = 0; i < matrices.size(); ++i)
      if (wave_of[i] == wave) planned.matrices.push_back(matrices[i]);
    added.count = static_cast<uint32_t>(planned.matrices.size()) - added.first;
  }
}

// ---- areas ----

// The elements that each rank of one replica needs in the areas of one wave.
struct AreaSizes {
  std::map<uint32_t, uint64_t> whole, rows, outer;  // by slot

  void add(const ModelSpec &spec, const ModelPlan &plan, const Matrix &matrix) {
    uint64_t &end = whole[matrix.owner];
    end = std::max(end, matrix.place + align_elements(matrix.count()));
    if (matrix.owner == Matrix::every_rank) return;
    const layout::Mesh &mesh = spec.mesh_of(spec.groups[matrix.group]);
    const SlotCut cut(matrix, plan);
    const uint32_t slices = mesh.slices();
    for (uint32_t slot = cut.slot_of(matrix.first); slot <= cut.slot_of(matrix.end() - 1); ++slot) {
      const uint32_t inner = slot / slices, between = inner * slices + matrix.owner % slices;
      if (slot % slices != matrix.owner % slices) outer[slot] += align_elements(cut.rows(matrix, slot, slot + 1).count);
      // The intermediate rank gets the rows of all slots of the inner rank together, once.
      const bool is_first = slot == cut.slot_of(matrix.first) || slot % slices == 0;
      if (inner != matrix.owner / slices && is_first)
        rows[between] += align_elements(cut.rows(matrix, inner * slices, (inner + 1) * slices).count);
    }
  }
  static uint64_t largest(const std::map<uint32_t, uint64_t> &sizes) {
    uint64_t most = 0;
    for (const auto &[slot, size] : sizes) most = std::max(most, size);
    return most;
  }
};

void size_turns(const ModelSpec &spec, const ModelPlan &plan, MatrixPlan &planned) {
  for (const MatrixWave &wave : planned.waves) {
    AreaSizes sizes;
    for (const Matrix &matrix : planned.of(wave)) sizes.add(spec, plan, matrix);
    MatrixTurn &turn = planned.of_mesh[wave.mesh][wave.turn];
    turn.whole = std::max(turn.whole, AreaSizes::largest(sizes.whole));
    turn.rows = std::max(turn.rows, AreaSizes::largest(sizes.rows));
    turn.outer = std::max(turn.outer, AreaSizes::largest(sizes.outer));
  }
  for (auto &turns : planned.of_mesh) turns[1].begin = turns[0].end();
  for (const MatrixWave &wave : planned.waves)
    for (Matrix &matrix : std::span(planned.matrices).subspan(wave.first, wave.count))
      matrix.place += planned.of_mesh[wave.mesh][wave.turn].begin;
}

}  // namespace

uint64_t cost_of(const Matrix &matrix) noexcept {
  const uint64_t least = std::min(matrix.rows, matrix.columns), most = std::max(matrix.rows, matrix.columns);
  return layout::saturating_multiply(layout::saturating_multiply(least, least), most);
}

MatrixRows rows_of(const Matrix &matrix, const ModelPlan &plan, uint32_t slot) {
  return SlotCut(matrix, plan).rows(matrix, slot, slot + 1);
}

namespace {

// Has any matrix of the mesh rows in the file that can be collected?
bool has_file_rows(const MatrixPlan &planned, const ModelPlan &plan, uint32_t mesh) {
  return std::ranges::any_of(planned.matrices, [&](const Matrix &matrix) {
    const BucketPlan &bucket = plan.buckets[matrix.bucket];
    return bucket.mesh == mesh && std::ranges::any_of(bucket.planes, [](const PlanePlan &plane) {
             return plane.in_file() && plane.kind != PlaneKind::rest && is_number(plane.dtype);
           });
  });
}

}  // namespace

void plan_matrices(const ModelSpec &spec, ModelPlan &plan) {
  MatrixPlan planned;
  Loads loads;
  std::vector<std::vector<Matrix>> dealt(spec.meshes.size()), whole(spec.meshes.size());
  // Groups with meshes of their own are dealt before those on the model's mesh.
  for (auto mesh = static_cast<uint32_t>(spec.meshes.size()); mesh-- > 0;) {
    whole[mesh] = list_matrices(spec, plan, mesh, true);
    for (const Matrix &matrix : whole[mesh])
      for (const uint32_t rank : spec.mesh().ranks) loads[rank] = layout::saturating_add(loads[rank], cost_of(matrix));
    dealt[mesh] = deal_mesh(spec, plan, mesh, loads);
    for (const auto *matrices : {&whole[mesh], &dealt[mesh]})
      for (const Matrix &matrix : *matrices) planned.limit_bytes = std::max(planned.limit_bytes, bytes_of(matrix));
  }
  planned.limit_bytes = spec.matrix_bytes ? spec.matrix_bytes : std::max(planned.limit_bytes, usual_limit);
  planned.of_mesh.resize(spec.meshes.size());
  for (auto mesh = static_cast<uint32_t>(spec.meshes.size()); mesh-- > 0;) {
    add_waves(std::move(dealt[mesh]), mesh, planned);
    add_waves(std::move(whole[mesh]), mesh, planned);
  }
  size_turns(spec, plan, planned);
  for (const uint32_t rank : spec.mesh().ranks) planned.loads.push_back(loads[rank]);
  for (uint32_t mesh = 0; mesh < spec.meshes.size(); ++mesh) {
    uint64_t &bytes = plan.region(RegionId::matrices, mesh).bytes;
    bytes = round_up(checked_multiply(planned.of_mesh[mesh][1].end(), sizeof(float), what), page_bytes, what);
    plan.region(RegionId::file_rows, mesh).bytes = has_file_rows(planned, plan, mesh) ? bytes : 0;
  }
  plan.matrices = std::move(planned);
}

std::optional<std::string> find_matrix_misfit(const ParamSpec &param, const GroupSpec &group, uint64_t matrix_bytes) {
  if (param.matrix_splits.empty()) return std::nullopt;
  const std::string name = format_text("parameter '{}' of group '{}'", param.name, group.name);
  const size_t last = param.shape.size() - 1;
  if (param.is_box())
    for (size_t d = last - 1; d <= last; ++d)
      if (param.shape[d] != param.global_shape[d])
        return format_text(
            "{}: FSDP_MATRIX_LAST_TWO, but the parameter is a box [{}] that cuts the matrices of its tensor [{}]; no "
            "rank of the mesh could have a whole matrix",
            name, fmt::join(param.shape, ", "), fmt::join(param.global_shape, ", "));
  for (size_t split = 0; split < param.matrix_splits.size(); ++split) {
    const uint64_t rows = param.matrix_splits[split], columns = param.shape[last];
    const uint64_t bytes = layout::saturating_multiply(
        layout::saturating_round_up(layout::saturating_multiply(rows, columns), place_alignment), sizeof(float));
    if (matrix_bytes && bytes > matrix_bytes)
      return format_text(
          "{}: split {} is a matrix of {} x {}, which needs {} bytes; matrix_bytes is {}, so give at least {}, or 0",
          name, split, rows, columns, bytes, matrix_bytes, bytes);
  }
  return std::nullopt;
}

uint64_t count_matrices(const ModelSpec &spec) {
  uint64_t count = 0;
  for (const GroupSpec &group : spec.groups)
    for (const ParamSpec &param : group.params) {
      if (param.matrix_splits.empty()) continue;
      uint64_t of_param = param.matrix_splits.size();
      for (size_t d = 0; d + 2 < param.shape.size(); ++d)
        of_param = layout::saturating_multiply(of_param, param.shape[d]);
      count = layout::saturating_add(count, of_param);
    }
  return count;
}

// ---- routes ----

void MatrixRoute::clear() noexcept { whole.clear(), rows.clear(), outer_rows.clear(), inner.clear(), outer.clear(); }

namespace {

// Finds the routes of the rows, matrix by matrix. Each rank of an axis computes the places of all ranks of the axis.
class RouteFinder {
 public:
  RouteFinder(const ModelSpec &spec, const ModelPlan &plan, const MatrixWave &wave, uint32_t rank, RouteScratch &used,
              MatrixRoute &route)
      : plan_(plan),
        mesh_(spec.meshes[wave.mesh]),
        turn_(plan.matrices.of_mesh[wave.mesh][wave.turn]),
        slices_(mesh_.slices()),
        inner_(mesh_.inner(rank)),
        outer_(mesh_.outer_index(rank) % slices_),
        used_(used),
        route_(route) {
    used_.rows.assign(mesh_.inner_size, 0);
    used_.own_rows.assign(slices_, 0);
    used_.outer.assign(slices_, 0);
  }

  void add(const Matrix &matrix, uint32_t index) {
    if (matrix.owner == Matrix::every_rank) {
      route_.whole.push_back({index, matrix.first, matrix.count(), matrix.place});
      return;
    }
    if (matrix.owner % slices_ == outer_) add_inner(matrix);
    add_outer(matrix, index);
  }

 private:
  MatrixRows rows_of_inner(const Matrix &matrix, uint32_t inner) const {
    return SlotCut(matrix, plan_).rows(matrix, inner * slices_, (inner + 1) * slices_);
  }

  // Adds the moves over the inner axis: the ranks of this outer index send their rows to the owner.
  void add_inner(const Matrix &matrix) {
    const SlotCut cut(matrix, plan_);
    const uint32_t owner = matrix.owner / slices_;
    for (uint32_t i = cut.slot_of(matrix.first) / slices_; i <= cut.slot_of(matrix.end() - 1) / slices_; ++i) {
      const MatrixRows rows = rows_of_inner(matrix, i);
      if (i == owner || rows.count == 0) continue;
      route_.inner.push_back(
          {i, owner, rows.count, turn_.rows_begin() + used_.rows[i], matrix.place + rows.first - matrix.first});
      used_.rows[i] += align_elements(rows.count);
    }
  }

  // The place of this inner rank's rows on the rank that gets them over the outer axis: the owner itself, or the
  // intermediate rank.
  uint64_t meet_at(const Matrix &matrix, const MatrixRows &all) {
    if (matrix.owner / slices_ == inner_) return matrix.place + all.first - matrix.first;
    uint64_t &used = used_.own_rows[matrix.owner % slices_];
    const uint64_t place = turn_.rows_begin() + used;
    used += align_elements(all.count);
    return place;
  }

  // Adds this rank's own rows, and the moves over the outer axis, which bring the rows of this inner index together.
  void add_outer(const Matrix &matrix, uint32_t index) {
    const MatrixRows all = rows_of_inner(matrix, inner_);
    if (all.count == 0) return;
    const uint32_t owner = matrix.owner % slices_;
    const uint64_t meeting = meet_at(matrix, all);
    for (uint32_t o = 0; o < slices_; ++o) {
      const MatrixRows rows = memory::rows_of(matrix, plan_, inner_ * slices_ + o);
      if (rows.count == 0) continue;
      const uint64_t place = meeting + rows.first - all.first;
      if (o == owner) {
        auto &own = matrix.owner / slices_ == inner_ ? route_.whole : route_.rows;
        if (o == outer_) own.push_back({index, rows.first, rows.count, place});
        continue;
      }
      const uint64_t at = turn_.outer_begin() + used_.outer[o];
      used_.outer[o] += align_elements(rows.count);
      route_.outer.push_back({o, owner, rows.count, at, place});
      if (o == outer_) route_.outer_rows.push_back({index, rows.first, rows.count, at});
    }
  }

  const ModelPlan &plan_;
  const layout::Mesh &mesh_;
  const MatrixTurn &turn_;
  const uint32_t slices_, inner_, outer_;
  RouteScratch &used_;
  MatrixRoute &route_;
};

}  // namespace

void find_route(const ModelSpec &spec, const ModelPlan &plan, const MatrixWave &wave, uint32_t rank,
                std::span<const uint8_t> left_out, RouteScratch &scratch, MatrixRoute &route) {
  route.clear();
  RouteFinder finder(spec, plan, wave, rank, scratch, route);
  for (uint32_t i = 0; i < wave.count; ++i)
    if (!left_out[wave.first + i]) finder.add(plan.matrices.matrices[wave.first + i], i);
}

// ---- description ----

namespace {

using Out = std::back_insert_iterator<std::string>;

void describe_matrix(Out out, const ModelSpec &spec, const Matrix &matrix) {
  const GroupSpec &group = spec.groups[matrix.group];
  const layout::Mesh &mesh = spec.mesh_of(group);
  fmt::format_to(
      out,
      "{{\"name\": {}, \"batch\": {}, \"split\": {}, \"row_offset\": {}, \"rows\": {}, \"columns\": {}, "
      "\"owner\": {}}}",
      quote_json(group.params[matrix.param].name), matrix.batch, matrix.split, matrix.row_offset, matrix.rows,
      matrix.columns,
      matrix.owner == Matrix::every_rank ? "null" : format_text("{}", mesh.ranks[mesh.holder(matrix.owner)]));
}

uint64_t wire_bytes(const ModelSpec &spec, const ModelPlan &plan, std::span<const Matrix> matrices) {
  uint64_t elements = 0;
  for (const Matrix &matrix : matrices)
    if (!is_whole(spec, matrix)) elements += matrix.count() - rows_of(matrix, plan, matrix.owner).count;
  return elements * sizeof(float);
}

uint64_t largest_share_bytes(const MatrixPlan &planned, const MatrixWave &wave) {
  std::map<uint32_t, uint64_t> of_owner;
  uint64_t most = 0;
  for (const Matrix &matrix : planned.of(wave))
    most = std::max(most, of_owner[matrix.owner] += align_elements(matrix.count()) * sizeof(float));
  return most;
}

void describe_loads(Out out, const ModelSpec &spec, const MatrixPlan &planned) {
  double sum = 0, most = 0;
  for (const uint64_t load : planned.loads)
    sum += static_cast<double>(load), most = std::max(most, static_cast<double>(load));
  fmt::format_to(out, "\"loads\": [");
  for (size_t r = 0; r < planned.loads.size(); ++r)
    fmt::format_to(out, "{}{{\"rank\": {}, \"cost\": {}}}", r ? ", " : "", spec.mesh().ranks[r], planned.loads[r]);
  fmt::format_to(out, "], \"load_max_over_mean\": {:.4f}, ",
                 sum > 0 ? most / (sum / static_cast<double>(planned.loads.size())) : 1.0);
}

}  // namespace

std::string describe_matrices(const ModelSpec &spec, const ModelPlan &plan) {
  const MatrixPlan &planned = plan.matrices;
  uint64_t bytes = 0;
  for (uint32_t mesh = 0; mesh < spec.meshes.size(); ++mesh) bytes += plan.region(RegionId::matrices, mesh).bytes;
  std::string text;
  const Out out(text);
  fmt::format_to(out, "{{\"matrix_bytes\": {}, \"region_bytes\": {}, \"wire_bytes\": {}, ", planned.limit_bytes, bytes,
                 wire_bytes(spec, plan, planned.matrices));
  describe_loads(out, spec, planned);
  fmt::format_to(out, "\"waves\": [");
  for (const MatrixWave &wave : planned.waves) {
    fmt::format_to(out, "{}\n  {{\"ranks\": [{}], \"largest_bytes\": {}, \"wire_bytes\": {}, \"matrices\": [",
                   &wave == planned.waves.data() ? "" : ",", fmt::join(spec.meshes[wave.mesh].ranks, ", "),
                   largest_share_bytes(planned, wave), wire_bytes(spec, plan, planned.of(wave)));
    for (const Matrix &matrix : planned.of(wave)) {
      fmt::format_to(out, "{}\n    ", &matrix == planned.of(wave).data() ? "" : ",");
      describe_matrix(out, spec, matrix);
    }
    fmt::format_to(out, "]}}");
  }
  fmt::format_to(out, "]}}\n");
  return text;
}

}  // namespace fsdp::memory
