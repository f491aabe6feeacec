// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/plan/load_plan.h"

#include <algorithm>
#include <map>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "base/text.h"

namespace fsdp::checkpoint {
namespace {

LoadedRows at(LoadedRows rows, const Box &box) {
  rows.box = box;
  return rows;
}

// Adds the wanted rows that each file has.
void add_files(const ManifestPart &part, const LoadedRows &wanted, FileRows &files) {
  const Box &own = wanted.kept;
  const bool scalar = own.shape.empty();
  if (!common_count(own, part.box)) return;
  const uint64_t first = scalar ? 0 : own.offset[part.axis], end = scalar ? 1 : first + own.shape[part.axis];
  uint64_t row = scalar ? 0 : part.box.offset[part.axis];
  for (const RowCut &cut : part.cuts) {
    const uint64_t begin = row;
    row += cut.rows * cut.files;
    if (row <= first || begin >= end || row == begin) continue;
    for (uint64_t i = first > begin ? (first - begin) / cut.rows : 0; i < cut.files && begin + i * cut.rows < end;
         ++i) {
      Box stored = part.box;
      if (!scalar) stored.offset[part.axis] = begin + i * cut.rows, stored.shape[part.axis] = cut.rows;
      if (const auto common = intersect(own, stored)) files[cut.file(i)].push_back(at(wanted, *common));
    }
  }
}

// The number of the box's elements that are stored. Parts do not overlap.
uint64_t stored_count(const Box &own, const ManifestTensor &stored) {
  uint64_t count = 0;
  for (const ManifestPart &part : stored.parts) count += common_count(own, part.box);
  return count;
}

// Says how the two tensors differ; empty if they do not. `encodes`: the stored tensor has numbers, which become codes.
std::string difference(const KeptTensor &own, const ManifestTensor &stored, bool encodes) {
  if (!std::ranges::equal(own.global_shape(), stored.shape))
    return format_text("{} has shape [{}] here and [{}] in the checkpoint", quote_json(own.name),
                       fmt::join(own.global_shape(), ", "), fmt::join(stored.shape, ", "));
  if (encodes ? !is_converted(*stored.type) : !own.is_loaded_from(*stored.type))
    return format_text("{} is of {} here and of {} in the checkpoint, which is not converted", quote_json(own.name),
                       own.type->name, stored.type->name);
  const Box box = own.box();
  if (const uint64_t count = stored_count(box, stored); count < box.count())
    return format_text("{} has [{}] from [{}] on here, and of these {} elements the checkpoint has {}",
                       quote_json(own.name), fmt::join(box.shape, ", "), fmt::join(box.offset, ", "), box.count(),
                       count);
  return "";
}

// All planes of a frozen quantized parameter, or of a state in codes, which are adjacent in the list; for any other
// tensor, only that tensor.
std::span<const KeptTensor> planes_of(std::span<const KeptTensor> tensors) {
  const KeptTensor &first = tensors[0];
  if (first.kind == ShardKind::optimizer && first.numbers_name.empty()) return tensors.first(1);
  const auto end = std::ranges::find_if(tensors, [&](const KeptTensor &tensor) {
    return tensor.param != first.param || tensor.kind != first.kind || tensor.numbers_name != first.numbers_name;
  });
  return tensors.first(static_cast<size_t>(end - tensors.begin()));
}

std::string quoted(const std::vector<std::string> &names) {
  std::string text;
  for (const std::string &name : names) text += (text.empty() ? "" : ", ") + quote_json(name);
  return text;
}

}  // namespace

void LoadPlan::refuse_parts(const ModelShards &shards) {
  const std::unordered_set<std::string_view> lacking(missing.begin(), missing.end());
  std::span<const KeptTensor> left = shards.tensors();
  while (!left.empty()) {
    const auto planes = planes_of(left);
    left = left.subspan(planes.size());
    std::vector<std::string> there, not_there;
    for (const KeptTensor &plane : planes) (lacking.contains(plane.name) ? not_there : there).push_back(plane.name);
    if (there.empty() || not_there.empty()) continue;
    const KeptTensor &first = planes[0];
    other.push_back(format_text("the planes of {} are loaded together or not at all: {} there, {} missing",
                                quote_json(first.numbers_name.empty() ? first.param->name : first.numbers_name),
                                quoted(there), quoted(not_there)));
  }
}

void LoadPlan::drop_repeated() {
  std::unordered_set<std::string> known;
  std::erase_if(other, [&](const std::string &text) { return !known.insert(text).second; });
}

namespace {

// The tensors of a checkpoint by name. Finds the form from which a tensor of the model is loaded.
class Sources {
 public:
  explicit Sources(const Manifest &manifest) {
    for (const ManifestTensor &tensor : manifest.tensors) stored_[tensor.name] = &tensor;
  }
  const ManifestTensor *find(const std::string &name) const {
    const auto found = stored_.find(name);
    return found == stored_.end() ? nullptr : found->second;
  }
  // Are codes and scales made from numbers? If not, both are loaded as they are. Boxes of one tensor may have been
  // saved in either form, so the form that has all of the model's box decides.
  bool encodes(const KeptTensor &own) const {
    if (own.numbers_name.empty()) return false;
    const ManifestTensor *const numbers = find(own.numbers_name), *const codes = find(own.numbers_name + ".code");
    if (!numbers || (codes && has_all(own, *codes))) return false;
    return !codes || has_all(own, *numbers);
  }
  // Is a state wanted as numbers, but stored only as codes?
  bool is_coded_only(const KeptTensor &own) const {
    if (own.kind != ShardKind::optimizer || !own.plane || !own.numbers_name.empty()) return false;
    const ManifestTensor *const numbers = find(own.name);
    return find(own.name + ".code") && !(numbers && has_all(own, *numbers));
  }

 private:
  // Does the stored tensor have all of the model's box? For scales, the box of their codes is compared.
  static bool has_all(const KeptTensor &own, const ManifestTensor &stored) {
    Box box = whole(own.param->shape);
    if (own.param->is_box()) box.offset = own.param->global_offset;
    const std::vector<uint64_t> &shape = own.param->is_box() ? own.param->global_shape : own.param->shape;
    return shape == stored.shape && stored_count(box, stored) >= box.count();
  }
  std::unordered_map<std::string_view, const ManifestTensor *> stored_;
};

// Adds the names in a checkpoint that belong to a tensor of the model: for a state, the names of each of its forms.
void add_names(const KeptTensor &own, std::unordered_set<std::string> &known) {
  known.insert(own.name);
  if (own.kind != ShardKind::optimizer || !own.plane) return;
  const std::string &numbers = own.numbers_name.empty() ? own.name : own.numbers_name;
  for (const char *form : {"", ".code", ".absmax"}) known.insert(numbers + form);
}

// Finds the first box of each tensor, because each name is listed only once.
class FirstNames {
 public:
  explicit FirstNames(const ModelShards &shards) : all_differ_(shards.one_mesh()) {}
  bool add(const std::string &name) { return all_differ_ || names_.insert(name).second; }

 private:
  bool all_differ_;
  std::unordered_set<std::string_view> names_;
};

}  // namespace

void LoadPlan::add(const ModelShards &shards, uint32_t index, const ManifestTensor &stored, uint32_t rank,
                   bool one_replica, FileRows &rows) {
  const KeptTensor &own = shards.tensors()[index];
  const RowRange kept = shards.kept_rows(own, rank);
  const bool shares = one_replica && own.cover == 0;  // ranks exchange rows over the model's mesh
  const ModelShards::Holder holder = shares ? shards.holder(own, rank) : ModelShards::Holder{};
  if (holder.count > 1) shared.push_back(index);
  const RowRange share = ModelShards::share_of(kept.count, holder);
  if (share.count == 0) return;
  uint64_t first = share.first * own.row_size();
  for (Box &box : ModelShards::boxes_of(own, {kept.first + share.first, share.count})) {
    const uint64_t count = box.count();
    const LoadedRows wanted{index, stored.name, stored.type, {}, std::move(box), first};
    for (const ManifestPart &part : stored.parts) add_files(part, wanted, rows);
    first += count;
  }
}

LoadPlan plan_load(const ModelShards &shards, const Manifest &manifest, uint32_t rank, const LoadChoice &choice) {
  LoadPlan plan;
  const Sources sources(manifest);
  std::unordered_set<std::string> known;
  FirstNames first(shards);
  FileRows rows;
  for (uint32_t i = 0; i < shards.tensors().size(); ++i) {
    const KeptTensor &own = shards.tensors()[i];
    add_names(own, known);
    if (own.kind == ShardKind::optimizer && !choice.states) continue;
    const bool is_first = first.add(own.name), encodes = sources.encodes(own);
    const ManifestTensor *const stored = sources.find(encodes ? own.numbers_name : own.name);
    if (encodes && is_first) plan.encoded.push_back(own.name);
    if (encodes && own.is_scales()) {  // scales are made together with the codes
      if (is_first) plan.loaded.push_back(own.name);
    } else if (sources.is_coded_only(own)) {
      plan.other.push_back(
          format_text("{} is in codes of 8 bits in the checkpoint (FSDP_OPTIMIZER_ADAMW_8BIT) and in {} "
                      "here, and codes are not decoded; FSDP_LOAD_WEIGHTS_ONLY loads the weights alone",
                      quote_json(own.name), own.type->name));
    } else if (!stored) {
      if (is_first) plan.missing.push_back(own.name);
    } else if (std::string text = difference(own, *stored, encodes); !text.empty()) {
      plan.other.push_back(std::move(text));
    } else {  // one rank must read all numbers of a block to make its codes
      if (is_first) plan.loaded.push_back(own.name);
      plan.add(shards, i, *stored, rank, choice.one_replica && !encodes, rows);
    }
  }
  for (const ManifestTensor &tensor : manifest.tensors)
    if (!known.contains(tensor.name) && (choice.states || !tensor.name.starts_with("state.")))
      plan.unexpected.push_back(tensor.name);
  plan.refuse_parts(shards);
  plan.drop_repeated();
  for (auto &[file, some] : rows) plan.files.push_back({file, std::move(some)});
  return plan;
}

}  // namespace fsdp::checkpoint
