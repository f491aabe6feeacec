// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/plan/model_shards.h"

#include <algorithm>

#include "base/checked.h"
#include "base/dtype.h"
#include "memory/plane.h"

namespace fsdp::checkpoint {
namespace {

using memory::Extent;
using memory::PlaneKind;

}  // namespace

ModelShards::ModelShards(const memory::ModelSpec &spec, const memory::ModelPlan &plan, bool counts_steps,
                         uint64_t least)
    : spec_(spec) {
  for (size_t g = 0; g < spec.groups.size(); ++g)
    for (uint32_t p = 0; p < spec.groups[g].params.size(); ++p)
      for (const uint32_t b : plan.groups[g].buckets) {
        const memory::BucketPlan &bucket = plan.buckets[b];
        const auto found = std::ranges::find(bucket.params, p);
        if (found == bucket.params.end()) continue;
        add(bucket, static_cast<uint32_t>(found - bucket.params.begin()), spec.groups[g].params[p], counts_steps);
      }
  count_writers(least);
  find_writers(ShardKind::weights);
  find_writers(ShardKind::optimizer);
}

void ModelShards::add(const memory::BucketPlan &bucket, uint32_t tensor, const memory::ParamSpec &param,
                      bool counts_steps) {
  add_weights(bucket, tensor, param);
  for (uint32_t index = 0; !param.frozen() && index < spec_.states.size(); ++index)
    add_state(bucket, tensor, param, index);
  if (counts_steps && !param.frozen())
    tensors_.push_back({format_text("state.{}.step", param.name), find_element_type("F64"), ShardKind::optimizer,
                        &param, &bucket, tensor, nullptr});
}

// Codes and their scales follow one another.
void ModelShards::add_state(const memory::BucketPlan &bucket, uint32_t tensor, const memory::ParamSpec &param,
                            uint32_t index) {
  const memory::StateSpec &state = spec_.states[index];
  const memory::PlanePlan *const plane = bucket.find(PlaneKind::state, index);
  const memory::PlanePlan *const scales = bucket.find(PlaneKind::state_scales, index);
  const auto add = [&](const memory::PlanePlan *kept, std::string name) {
    tensors_.push_back(
        {std::move(name), &element_type(kept->dtype), ShardKind::optimizer, &param, &bucket, tensor, kept});
    if (scales) tensors_.back().numbers_name = stored_name(param, state);
  };
  if (!scales) return add(plane, stored_name(param, state));
  add(plane, coded_name(param, state, false));
  add(scales, coded_name(param, state, true));
  tensors_.back().scales = stored_shape(param, *scales);
}

// Planes of main weights are not saved, since publishing makes them again. A frozen parameter has only its planes.
void ModelShards::add_weights(const memory::BucketPlan &bucket, uint32_t tensor, const memory::ParamSpec &param) {
  const auto add = [&](std::string name, const memory::PlanePlan &plane) {
    tensors_.push_back(
        {std::move(name), &element_type(plane.dtype), ShardKind::weights, &param, &bucket, tensor, &plane});
    if (is_scales(plane.kind)) tensors_.back().scales = stored_shape(param, plane);
  };
  if (!param.frozen() || !param.quantized()) {
    add(param.name, bucket.home());
    if (bucket.find(PlaneKind::rest)) tensors_.back().type = &element_type(FSDP_FLOAT32);
    return;
  }
  for (const memory::PlanePlan &plane : bucket.planes)
    if (is_published(plane.kind)) add(stored_name(param, plane), plane);
}

// ---- places ----

// Slots of an inner rank are neighbours, and so are its replicas.
uint32_t ModelShards::place_of(uint32_t rank) const {
  const layout::Mesh &mesh = spec_.mesh;
  return mesh.inner(rank) * mesh.outer_size + mesh.outer_index(rank);
}

uint32_t ModelShards::rank_at(uint32_t place) const {
  const layout::Mesh &mesh = spec_.mesh;
  return place % mesh.outer_size * mesh.inner_size + place / mesh.outer_size;
}

ModelShards::Holding ModelShards::holding(Extent extent, uint32_t place) const {
  const layout::Mesh &mesh = spec_.mesh;
  const bool alone = extent == Extent::shard && mesh.slices() > 1;
  const uint32_t count = extent == Extent::whole ? mesh.size() : alone ? 1 : mesh.outer_size;
  return {place / count * count, count, writer_counts_[static_cast<size_t>(extent)]};
}

// Sets, for each extent, how many holders of a slice write it: as many as can each write at least `least` bytes.
void ModelShards::count_writers(uint64_t least) {
  std::array<uint64_t, 3> bytes{};
  for (const KeptTensor &tensor : tensors_) {
    if (!tensor.plane) continue;  // has only a few bytes
    uint64_t &sum = bytes[static_cast<size_t>(tensor.plane->owned)];
    const uint64_t whole = checked_multiply(tensor.element_count(), tensor.type->bits / 8, "bytes");
    sum = checked_add(sum, whole, "bytes of a checkpoint");
  }
  for (const Extent extent : {Extent::shard, Extent::group, Extent::whole}) {
    const auto index = static_cast<size_t>(extent);
    writer_counts_[index] = 1;
    const uint32_t holders = holding(extent, 0).count;
    const uint64_t slice = bytes[index] / (spec_.mesh.size() / holders);
    writer_counts_[index] = static_cast<uint32_t>(std::clamp<uint64_t>(slice / least, 1, holders));
  }
}

// ---- rows ----

RowRange ModelShards::kept_rows(const KeptTensor &tensor, uint32_t rank) const {
  if (!tensor.plane) return {0, 1};
  const layout::Slice slice = memory::slice_of(tensor.layout(), tensor.tensor, tensor.plane->owned, spec_.mesh, rank);
  return {slice.tensor_offset / tensor.row_size(), slice.count / tensor.row_size()};
}

// Each rank reads its own number of steps.
ModelShards::Holder ModelShards::holder(const KeptTensor &tensor, uint32_t rank) const {
  if (!tensor.plane) return {};
  if (tensor.owned() == Extent::whole) return {rank, spec_.mesh.size()};
  const uint32_t count = holding(tensor.owned(), place_of(rank)).count;
  return count == 1 ? Holder{} : Holder{spec_.mesh.outer_index(rank), count};
}

RowRange ModelShards::rows_at(const KeptTensor &tensor, uint32_t place) const {
  const Holding held = holding(tensor.owned(), place);
  const uint64_t number = place - held.first;
  if (number >= held.writers) return {};
  const RowRange kept = kept_rows(tensor, rank_at(place));
  const uint64_t begin = kept.count * number / held.writers, end = kept.count * (number + 1) / held.writers;
  return {kept.first + begin, end - begin};
}

std::array<uint32_t, 2> ModelShards::places_of(const KeptTensor &tensor) const {
  const layout::Mesh &mesh = spec_.mesh;
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
  std::vector<size_t> boxes(spec_.mesh.size());  // the most boxes of a tensor, by place
  for (const KeptTensor &tensor : tensors_) {
    if (tensor.kind != kind) continue;
    const bool one = tensor.row_dimensions() <= 1;
    const auto [begin, end] = places_of(tensor);
    for (uint32_t place = begin; place < end; ++place)
      if (const bool known = one && boxes[place]; !known)
        if (const RowRange rows = rows_at(tensor, place); rows.count > 0)
          boxes[place] = std::max(boxes[place], one ? 1 : boxes_of(tensor, rows).size());
  }
  auto &writers = writers_[static_cast<size_t>(kind)];
  writers.resize(*std::ranges::max_element(boxes));
  for (uint32_t place = 0; place < boxes.size(); ++place)
    for (size_t file = 0; file < boxes[place]; ++file) writers[file].push_back(rank_at(place));
}

namespace {

// Along this axis the box is a range. It has size 1 in the dimensions before the axis, and is whole in those after it.
uint32_t axis_of(const KeptTensor &tensor, const Box &box) {
  uint32_t axis = tensor.row_dimensions() - 1;
  while (axis > 0 && box.shape[axis] == tensor.shape()[axis]) --axis;
  return axis;
}

}  // namespace

// Boxes come in the order of rows. A box that continues the last part along the same axis is added to that part.
void ModelShards::add_parts(std::vector<ManifestPart> &parts, const KeptTensor &tensor, uint32_t place,
                            const std::vector<std::vector<uint32_t>> &files) const {
  const std::vector<Box> boxes = boxes_of(tensor, rows_at(tensor, place));
  for (size_t file = 0; file < boxes.size(); ++file) {
    const Box &box = boxes[file];
    const uint32_t axis = axis_of(tensor, box);
    const auto before = [&](const Box &of) { return std::span(of.offset).first(axis); };
    if (parts.empty() || parts.back().axis != axis || !std::ranges::equal(before(parts.back().box), before(box)))
      parts.push_back({box, {}, axis}), parts.back().box.shape[axis] = 0;
    parts.back().box.shape[axis] += box.shape[axis];
    parts.back().add_rows(files[file][place], box.shape[axis]);
  }
}

std::vector<ManifestTensor> ModelShards::manifest_tensors(ShardKind kind, uint32_t first_file) const {
  std::vector<std::vector<uint32_t>> numbers(files(kind), std::vector<uint32_t>(spec_.mesh.size()));
  for (uint32_t file = 0; file < files(kind); ++file)
    for (const uint32_t writer : writers(kind, file)) numbers[file][place_of(writer)] = first_file++;
  std::vector<ManifestTensor> described;
  for (const KeptTensor &tensor : tensors_) {
    if (tensor.kind != kind) continue;
    const std::span<const uint64_t> shape = tensor.global_shape();
    described.push_back({tensor.name, tensor.type, {shape.begin(), shape.end()}, {}});
    std::vector<ManifestPart> &parts = described.back().parts;
    const auto [begin, end] = places_of(tensor);
    if (tensor.row_dimensions() > 1) {
      for (uint32_t place = begin; place < end; ++place) add_parts(parts, tensor, place, numbers);
      continue;
    }
    parts.push_back({tensor.box(), {}});
    for (uint32_t place = begin; place < end; ++place)
      if (const RowRange rows = rows_at(tensor, place); rows.count > 0)
        parts.back().add_rows(numbers[0][place], rows.count);
  }
  return described;
}

}  // namespace fsdp::checkpoint
