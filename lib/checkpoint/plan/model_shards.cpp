// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/plan/model_shards.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/text.h"
#include "memory/plane.h"

namespace fsdp::checkpoint {
namespace {

using memory::Extent;
using memory::PlaneKind;

}  // namespace

ModelShards::ModelShards(const memory::ModelSpec &spec, const memory::ModelPlan &plan, bool counts_steps,
                         uint64_t least)
    : spec_(spec), meshes_(spec) {
  for (size_t g = 0; g < spec.groups.size(); ++g) add_group(plan, g, counts_steps);
  count_writers(least);
  find_writers(ShardKind::weights);
  find_writers(ShardKind::optimizer);
}

void ModelShards::add_group(const memory::ModelPlan &plan, size_t group, bool counts_steps) {
  const std::vector<MeshGroup> &meshes = meshes_.meshes_of(group);
  for (uint32_t m = 0; m < meshes.size(); ++m)
    for (uint32_t p = 0; p < meshes[m].params->size(); ++p)
      for (const uint32_t b : plan.groups[group].buckets) {
        const memory::BucketPlan &bucket = plan.buckets[b];
        const auto found = std::ranges::find(bucket.params, p);
        if (found == bucket.params.end()) continue;
        add({bucket, static_cast<uint32_t>(found - bucket.params.begin()), (*meshes[m].params)[p],
             meshes_.cover_of(group), m, meshes[m].counts[p], meshes[m].names[p]},
            counts_steps);
      }
}

void ModelShards::add(const Adding &adding, bool counts_steps) {
  const memory::ParamSpec &param = adding.param;
  add_weights(adding);
  for (uint32_t index = 0; index < spec_.states.size(); ++index)
    if (spec_.has_state(param, spec_.states[index])) add_state(adding, index);
  if (counts_steps && !param.frozen() && !param.by_caller())
    add_tensor(adding, format_text("state.{}.step", param.name), ShardKind::optimizer, *find_element_type("F64"),
               nullptr)
        .counts = adding.names;  // all boxes of a tensor share one number of steps
}

KeptTensor &ModelShards::add_tensor(const Adding &adding, std::string name, ShardKind kind, const ElementType &type,
                                    const memory::PlanePlan *plane) {
  KeptTensor &tensor = tensors_.emplace_back(
      KeptTensor{std::move(name), &type, kind, &adding.param, &adding.bucket, adding.tensor, plane});
  tensor.cover = adding.cover, tensor.mesh = adding.mesh;
  tensor.counts = adding.counts;
  return tensor;
}

// Codes and their scales are adjacent in the list.
void ModelShards::add_state(const Adding &adding, uint32_t index) {
  const memory::ParamSpec &param = adding.param;
  const memory::StateSpec &state = spec_.states[index];
  const memory::PlanePlan *const plane = adding.bucket.find(PlaneKind::state, index);
  const memory::PlanePlan *const scales = adding.bucket.find(PlaneKind::state_scales, index);
  const auto add = [&](const memory::PlanePlan *kept, std::string name) {
    add_tensor(adding, std::move(name), ShardKind::optimizer, element_type(kept->dtype), kept);
    if (scales) tensors_.back().numbers_name = stored_name(param, state);
  };
  if (!scales) return add(plane, stored_name(param, state));
  add(plane, coded_name(param, state, false));
  add(scales, coded_name(param, state, true));
  tensors_.back().scales = stored_shape(param, *scales);
}

// Planes of main weights are not saved, because publishing makes them again. A frozen parameter has only its planes.
void ModelShards::add_weights(const Adding &adding) {
  const memory::ParamSpec &param = adding.param;
  const auto add = [&](std::string name, const memory::PlanePlan &plane) {
    add_tensor(adding, std::move(name), ShardKind::weights, element_type(plane.dtype), &plane);
    if (is_scales(plane.kind)) tensors_.back().scales = stored_shape(param, plane);
  };
  if (!param.frozen() || !param.quantized()) {
    add(param.name, adding.bucket.owned_plane());
    if (adding.bucket.find(PlaneKind::rest)) tensors_.back().type = &element_type(FSDP_FLOAT32);
    return;
  }
  for (const memory::PlanePlan &plane : adding.bucket.planes)
    if (is_published(plane.kind)) add(stored_name(param, plane), plane);
}

// ---- places ----

// The slots of an inner rank are neighbours, and so are its replicas.
uint32_t ModelShards::place_of(const layout::Mesh &mesh, uint32_t rank) {
  return mesh.inner(rank) * mesh.outer_size + mesh.outer_index(rank);
}

uint32_t ModelShards::rank_at(const layout::Mesh &mesh, uint32_t place) {
  return place % mesh.outer_size * mesh.inner_size + place / mesh.outer_size;
}

uint32_t ModelShards::place_in_model(const KeptTensor &tensor, uint32_t place) const {
  if (tensor.cover == 0) return place;
  return place_of(spec_.mesh(), cover_of(tensor).of_model[tensor.mesh][rank_at(mesh_of(tensor), place)]);
}

// All meshes of a cover have one shape.
ModelShards::Holding ModelShards::holding(uint32_t cover, Extent extent, uint32_t place) const {
  const layout::Mesh &mesh = meshes_.covers()[cover].meshes[0];
  const bool alone = extent == Extent::shard && mesh.slices() > 1;
  const uint32_t count = extent == Extent::whole ? mesh.size() : alone ? 1 : mesh.outer_size;
  return {place / count * count, count, writer_counts_[cover][static_cast<size_t>(extent)]};
}

// Sets, for each extent, how many holders of a slice write it: as many as can each write at least `least` bytes. All
// meshes of a cover have the same number of bytes.
void ModelShards::count_writers(uint64_t least) {
  std::vector<std::array<uint64_t, 3>> bytes(meshes_.covers().size());
  for (const KeptTensor &tensor : tensors_) {
    if (!tensor.plane || tensor.mesh) continue;  // a tensor without a plane has only a few bytes
    uint64_t &sum = bytes[tensor.cover][static_cast<size_t>(tensor.plane->owned)];
    const uint64_t whole = checked_multiply(tensor.element_count(), tensor.type->bits / 8, "bytes");
    sum = checked_add(sum, whole, "bytes of a checkpoint");
  }
  writer_counts_.resize(bytes.size());
  for (uint32_t cover = 0; cover < bytes.size(); ++cover)
    for (const Extent extent : {Extent::shard, Extent::group, Extent::whole}) {
      const auto index = static_cast<size_t>(extent);
      const uint32_t holders = holding(cover, extent, 0).count;
      const uint64_t slice = bytes[cover][index] / (meshes_.covers()[cover].meshes[0].size() / holders);
      writer_counts_[cover][index] = static_cast<uint32_t>(std::clamp<uint64_t>(slice / least, 1, holders));
    }
}

// ---- rows ----

RowRange ModelShards::kept_by(const KeptTensor &tensor, uint32_t rank) const {
  if (!tensor.plane) return {0, 1};
  const layout::Slice slice =
      memory::slice_of(tensor.layout(), tensor.tensor, tensor.plane->owned, mesh_of(tensor), rank);
  return {slice.tensor_offset / tensor.row_size(), slice.count / tensor.row_size()};
}

// Each rank reads its own number of steps.
ModelShards::Holder ModelShards::holder(const KeptTensor &tensor, uint32_t rank) const {
  if (!tensor.plane) return {};
  if (tensor.owned() == Extent::whole) return {rank, spec_.mesh().size()};
  const uint32_t count = holding(0, tensor.owned(), place_of(spec_.mesh(), rank)).count;
  return count == 1 ? Holder{} : Holder{spec_.mesh().outer_index(rank), count};
}

RowRange ModelShards::rows_at(const KeptTensor &tensor, uint32_t place) const {
  const Holding held = holding(tensor.cover, tensor.owned(), place);
  const uint64_t number = place - held.first;
  if (number >= held.writers || !tensor.counts) return {};
  const RowRange kept = kept_by(tensor, rank_at(mesh_of(tensor), place));
  const uint64_t begin = kept.count * number / held.writers, end = kept.count * (number + 1) / held.writers;
  return {kept.first + begin, end - begin};
}

std::array<uint32_t, 2> ModelShards::places_of(const KeptTensor &tensor) const {
  const layout::Mesh &mesh = mesh_of(tensor);
  if (tensor.owned() == Extent::whole) return {0, mesh.size()};
  const layout::Placement &placement = tensor.layout().tensors[tensor.tensor];
  const layout::SubBucket &sub = tensor.layout().sub_buckets[placement.sub_bucket];
  const uint64_t start = placement.full_offset - sub.full_offset;
  const uint64_t first = start / sub.shard_count, last = (start + placement.count - 1) / sub.shard_count;
  const uint32_t places = mesh.size() / mesh.slots();  // number of places of a slot
  const auto begin = static_cast<uint32_t>(first) * places, end = static_cast<uint32_t>(last + 1) * places;
  const uint32_t group = tensor.owned() == Extent::group ? mesh.outer_size : 1;
  return {begin / group * group, static_cast<uint32_t>(round_up(end, group))};
}

std::vector<Box> ModelShards::boxes_of(const KeptTensor &tensor, const RowRange &rows) {
  if (rows.count == 0) return {};
  std::vector<Box> boxes = split_range(tensor.shape(), rows.first * tensor.row_size(), rows.count * tensor.row_size());
  const Box own = tensor.box();
  for (Box &box : boxes)
    for (size_t d = 0; d < box.offset.size(); ++d) box.offset[d] += own.offset[d];
  return boxes;
}

std::vector<WrittenBox> ModelShards::written_by(uint32_t rank, ShardKind kind, uint32_t file) const {
  std::vector<WrittenBox> written;
  for (const KeptTensor &tensor : tensors_) {
    if (tensor.kind != kind) continue;
    const RowRange own = rows(tensor, rank);
    std::vector<Box> boxes = boxes_of(tensor, own);
    if (file >= boxes.size()) continue;
    uint64_t first = (own.first - kept_rows(tensor, rank).first) * tensor.row_size();
    for (uint32_t before = 0; before < file; ++before) first += boxes[before].count();
    written.push_back({&tensor, std::move(boxes[file]), first});
  }
  return written;
}

void ModelShards::find_writers(ShardKind kind) {
  const layout::Mesh &mesh = spec_.mesh();
  std::vector<size_t> boxes(mesh.size());  // by place in the model's mesh: the maximum number of boxes of a tensor
  for (const KeptTensor &tensor : tensors_) {
    if (tensor.kind != kind || !tensor.counts) continue;
    const bool one = tensor.row_dimensions() <= 1;
    const auto [begin, end] = places_of(tensor);
    for (uint32_t place = begin; place < end; ++place) {
      size_t &most = boxes[place_in_model(tensor, place)];
      if (const bool known = one && most; known) continue;
      if (const RowRange rows = rows_at(tensor, place); rows.count > 0)
        most = std::max(most, one ? 1 : boxes_of(tensor, rows).size());
    }
  }
  auto &writers = writers_[static_cast<size_t>(kind)];
  writers.resize(*std::ranges::max_element(boxes));
  for (uint32_t place = 0; place < boxes.size(); ++place)
    for (size_t file = 0; file < boxes[place]; ++file) writers[file].push_back(rank_at(mesh, place));
}

namespace {

// The axis along which the box is a range. The box has size 1 in the dimensions before the axis, and is whole in those
// after it.
uint32_t axis_of(const KeptTensor &tensor, const Box &box) {
  uint32_t axis = tensor.row_dimensions() - 1;
  while (axis > 0 && box.shape[axis] == tensor.shape()[axis]) --axis;
  return axis;
}

}  // namespace

// Boxes come in the order of rows. A box that continues the last part along the same axis is added to that part.
void ModelShards::add_boxes(std::vector<ManifestPart> &parts, const KeptTensor &tensor, uint32_t place,
                            const std::vector<std::vector<uint32_t>> &files) const {
  const std::vector<Box> boxes = boxes_of(tensor, rows_at(tensor, place));
  for (size_t file = 0; file < boxes.size(); ++file) {
    const Box &box = boxes[file];
    const uint32_t axis = axis_of(tensor, box);
    const auto before = [&](const Box &of) { return std::span(of.offset).first(axis); };
    if (parts.empty() || parts.back().axis != axis || !std::ranges::equal(before(parts.back().box), before(box)))
      parts.push_back({box, {}, axis}), parts.back().box.shape[axis] = 0;
    parts.back().box.shape[axis] += box.shape[axis];
    parts.back().add_rows(files[file][place_in_model(tensor, place)], box.shape[axis]);
  }
}

// `files` has the numbers of files, indexed by the rank's number of a file and by the place in the model's mesh.
void ModelShards::add_parts(std::vector<ManifestPart> &parts, const KeptTensor &tensor,
                            const std::vector<std::vector<uint32_t>> &files) const {
  if (!tensor.counts) return;
  std::vector<ManifestPart> own;
  const auto [begin, end] = places_of(tensor);
  if (tensor.row_dimensions() > 1) {
    for (uint32_t place = begin; place < end; ++place) add_boxes(own, tensor, place, files);
  } else {
    own.push_back({tensor.box(), {}});
    for (uint32_t place = begin; place < end; ++place)
      if (const RowRange rows = rows_at(tensor, place); rows.count > 0)
        own.back().add_rows(files[0][place_in_model(tensor, place)], rows.count);
  }
  for (ManifestPart &part : own) {
    if (tensor.cover) part.join_cuts();
    parts.push_back(std::move(part));
  }
}

std::vector<ManifestTensor> ModelShards::manifest_tensors(ShardKind kind, uint32_t first_file) const {
  std::vector<std::vector<uint32_t>> numbers(files(kind), std::vector<uint32_t>(spec_.mesh().size()));
  for (uint32_t file = 0; file < files(kind); ++file)
    for (const uint32_t writer : writers(kind, file)) numbers[file][place_of(spec_.mesh(), writer)] = first_file++;
  std::vector<ManifestTensor> described;
  // Maps the name of a tensor to its position in `described`. Several meshes may have boxes of one tensor.
  std::unordered_map<std::string_view, size_t> known;
  for (const KeptTensor &tensor : tensors_) {
    if (tensor.kind != kind) continue;
    const std::span<const uint64_t> shape = tensor.global_shape();
    const auto found = one_mesh() ? known.end() : known.emplace(tensor.name, described.size()).first;
    if (found == known.end() || found->second == described.size())
      described.push_back({tensor.name, tensor.type, {shape.begin(), shape.end()}, {}});
    ManifestTensor &whole = found == known.end() ? described.back() : described[found->second];
    if (whole.type != tensor.type || !std::ranges::equal(whole.shape, shape))
      fail(FSDP_INVALID_ARGUMENT, "two meshes declare {} as boxes of different tensors: {} [{}] and {} [{}]",
           quote_json(tensor.name), whole.type->name, fmt::join(whole.shape, ","), tensor.type->name,
           fmt::join(shape, ","));
    add_parts(whole.parts, tensor, numbers);
  }
  return described;
}

}  // namespace fsdp::checkpoint
