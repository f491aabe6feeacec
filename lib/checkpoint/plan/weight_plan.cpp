// SPDX-License-Identifier: Apache-2.0

#include "checkpoint/plan/weight_plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

#include "base/error.h"
#include "base/text.h"

namespace fsdp::checkpoint {

void check_renames(std::span<const Rename> renames, std::string_view call) {
  for (size_t i = 0; i < renames.size(); ++i) {
    const Rename &rename = renames[i];
    const auto stars = [](const std::string &text) { return std::ranges::count(text, '*'); };
    if (stars(rename.theirs) > 1 || stars(rename.ours) > stars(rename.theirs))
      fail(FSDP_INVALID_ARGUMENT, "{}: renames[{}]: {} to {}: one '*' in theirs, and then one or none in ours", call, i,
           quote_json(rename.theirs), quote_json(rename.ours));
  }
}

std::optional<std::string> match_name(const std::string &pattern, const std::string &name) {
  const size_t star = pattern.find('*');
  if (star == pattern.npos) return pattern == name ? std::optional<std::string>("") : std::nullopt;
  const std::string_view before = std::string_view(pattern).substr(0, star),
                         behind = std::string_view(pattern).substr(star + 1);
  if (name.size() < before.size() + behind.size() || !name.starts_with(before) || !name.ends_with(behind))
    return std::nullopt;
  return name.substr(before.size(), name.size() - before.size() - behind.size());
}

std::string fill_name(std::string pattern, const std::string &text) {
  if (const size_t star = pattern.find('*'); star != pattern.npos) pattern.replace(star, 1, text);
  return pattern;
}

namespace {

// A tensor of theirs whose rows become rows [begin, end) of a whole tensor of ours.
struct Use {
  Rename rename;  // with its row_count filled in
  const SpreadTensor *theirs;
  std::string name;  // name of their tensor

  uint64_t begin() const { return rename.to_row; }
  uint64_t end() const { return rename.to_row + rename.row_count; }
};

uint64_t first_row_of(const Box &box) { return box.offset.empty() ? 0 : box.offset[0]; }

std::vector<uint64_t> as_seen(const SpreadTensor &theirs, const Rename &rename) {
  std::vector<uint64_t> shape = theirs.shape;
  if (rename.transposed) std::ranges::reverse(shape);
  return shape;
}

class WeightPlanner {
 public:
  WeightPlanner(const ModelShards &shards, std::span<const StoredFile> files, std::span<const Rename> renames)
      : shards_(shards), renames_(renames), theirs_(collect_tensors(files)) {
    for (uint32_t i = 0; i < shards.tensors().size(); ++i)
      if (shards.tensors()[i].kind == ShardKind::weights) numbers_[shards.tensors()[i].name].push_back(i);
  }

  LoadPlan plan(uint32_t rank) {
    for (const auto &[name, theirs] : theirs_) find_uses(name, theirs);
    for (uint32_t i = 0; i < shards_.tensors().size(); ++i)
      if (shards_.tensors()[i].kind == ShardKind::weights) plan_tensor(i, rank);
    plan_.refuse_parts(shards_);
    plan_.drop_repeated();
    for (auto &[file, rows] : files_) plan_.files.push_back({file, std::move(rows)});
    return std::move(plan_);
  }

 private:
  void find_uses(const std::string &name, const SpreadTensor &theirs);
  void use(const std::string &ours, const Use &use);
  void use(uint32_t number, Use use);
  std::string difference(const KeptTensor &own, const Use &use) const;
  bool covers(const KeptTensor &own, std::vector<Use> &uses);
  static Box theirs_of(Box box, const Use &use, uint64_t begin, uint64_t end);
  bool is_stored(const KeptTensor &own, const Use &use, const Box &wanted);
  void plan_tensor(uint32_t number, uint32_t rank);
  void take(uint32_t number, const Use &use, const Box &kept, uint64_t first);

  const ModelShards &shards_;
  std::span<const Rename> renames_;
  std::map<std::string, SpreadTensor> theirs_;
  // Numbers of our weights, by name. Several meshes may have boxes of one tensor.
  std::unordered_map<std::string_view, std::vector<uint32_t>> numbers_;
  std::map<uint32_t, std::vector<Use>> uses_;  // key: the number of our tensor
  std::map<uint32_t, std::vector<LoadedRows>> files_;
  LoadPlan plan_;
};

void WeightPlanner::find_uses(const std::string &name, const SpreadTensor &theirs) {
  bool renamed = false;
  for (const Rename &rename : renames_)
    if (const auto text = match_name(rename.theirs, name)) {
      renamed = true;
      use(fill_name(rename.ours, *text), {rename, &theirs, name});
    }
  if (!renamed) use(name, {{}, &theirs, name});
}

void WeightPlanner::use(const std::string &ours, const Use &use) {
  const auto found = numbers_.find(ours);
  if (found == numbers_.end()) {  // several renames may match one name, which is listed once
    if (plan_.unexpected.empty() || plan_.unexpected.back() != use.name) plan_.unexpected.push_back(use.name);
    return;
  }
  for (const uint32_t number : found->second) this->use(number, use);
}

void WeightPlanner::use(uint32_t number, Use use) {
  const KeptTensor &own = shards_.tensors()[number];
  if (std::string text = difference(own, use); !text.empty()) {
    plan_.other.push_back(std::move(text));
    return;
  }
  const uint64_t rows = rows_of(as_seen(*use.theirs, use.rename));
  if (!use.rename.row_count) use.rename.row_count = rows - use.rename.from_row;
  uses_[number].push_back(std::move(use));
}

// Says why their tensor cannot be those rows of ours; empty if it can.
std::string WeightPlanner::difference(const KeptTensor &own, const Use &use) const {
  const Rename &rename = use.rename;
  const auto theirs = [&](std::string_view what) {
    return format_text("{} has shape [{}] here; {} has [{}]{}, {}", quote_json(own.name),
                       fmt::join(own.global_shape(), ", "), quote_json(use.name), fmt::join(use.theirs->shape, ", "),
                       rename.transposed ? " transposed" : "", what);
  };
  if (!is_known(*use.theirs->type))
    return format_text("{} is of {}, which this release does not know", quote_json(use.name),
                       quote_json(use.theirs->unknown_type));
  if (!own.is_loaded_from(*use.theirs->type))
    return format_text("{} is of {}, which is not converted{}", quote_json(use.name), use.theirs->type->name,
                       is_converted(*own.type) && !own.is_scales()
                           ? ""
                           : format_text(" to the {} of {}", own.type->name, quote_json(own.name)));
  if (rename.transposed && use.theirs->shape.size() != 2) return theirs("and only matrices are transposed");
  const std::vector<uint64_t> seen = as_seen(*use.theirs, rename);
  const uint64_t rows = rows_of(seen), own_rows = rows_of(own.global_shape());
  if (seen.size() != own.global_shape().size() ||
      !std::equal(seen.begin() + !seen.empty(), seen.end(), own.global_shape().begin() + !seen.empty()))
    return theirs("whose rows are others");
  if (rename.from_row >= rows || rename.row_count > rows - rename.from_row)
    return theirs(format_text("not {} rows from {} on", rename.row_count, rename.from_row));
  const uint64_t count = rename.row_count ? rename.row_count : rows - rename.from_row;
  if (rename.to_row >= own_rows || count > own_rows - rename.to_row)
    return theirs(format_text("and {} rows do not go to {}", count, rename.to_row));
  return "";
}

// Does each row of the model come from exactly one place? Drops uses for rows that the model does not have.
bool WeightPlanner::covers(const KeptTensor &own, std::vector<Use> &uses) {
  const Box box = own.box();
  const uint64_t first = first_row_of(box), end = first + rows_of(box.shape);
  std::erase_if(uses, [&](const Use &use) { return use.begin() >= end || use.end() <= first; });
  std::ranges::sort(uses, {}, [](const Use &use) { return use.begin(); });
  uint64_t next = first;
  for (const Use &use : uses) {
    const uint64_t begin = std::max(use.begin(), first);
    if (begin != next) {
      const bool twice = begin < next;
      plan_.other.push_back(
          format_text("rows {} to {} of {} come {}", std::min(next, begin), std::max(next, begin), quote_json(own.name),
                      twice ? format_text("twice, also from {}", quote_json(use.name)) : "from nowhere"));
      return false;
    }
    next = std::min(use.end(), end);
    if (!is_stored(own, use, theirs_of(box, use, begin, next))) return false;
  }
  if (next == end) return true;
  plan_.other.push_back(format_text("rows {} to {} of {} come from nowhere", next, end, quote_json(own.name)));
  return false;
}

// The box in their tensor that has rows [begin, end) of a box of ours.
Box WeightPlanner::theirs_of(Box box, const Use &use, uint64_t begin, uint64_t end) {
  if (box.shape.empty()) return box;
  box.offset[0] = begin - use.begin() + use.rename.from_row, box.shape[0] = end - begin;
  if (use.rename.transposed) std::ranges::reverse(box.offset), std::ranges::reverse(box.shape);
  return box;
}

bool WeightPlanner::is_stored(const KeptTensor &own, const Use &use, const Box &wanted) {
  uint64_t count = 0;
  for (const auto &[file, box] : use.theirs->boxes)
    if (const auto common = intersect(wanted, *box)) count += common->count();
  if (count == wanted.count()) return true;
  plan_.other.push_back(format_text("{} takes [{}] from [{}] on of {}, and of these {} elements the files have {}",
                                    quote_json(own.name), fmt::join(wanted.shape, ", "), fmt::join(wanted.offset, ", "),
                                    quote_json(use.name), wanted.count(), count));
  return false;
}

void WeightPlanner::plan_tensor(uint32_t number, uint32_t rank) {
  const KeptTensor &own = shards_.tensors()[number];
  const auto uses = uses_.find(number);
  const bool is_first = number == numbers_.at(own.name).front();
  if (uses == uses_.end()) {
    if (is_first) plan_.missing.push_back(own.name);
    return;
  }
  if (!covers(own, uses->second)) return;
  if (is_first) plan_.loaded.push_back(own.name);
  uint64_t first = 0;
  for (const Box &box : ModelShards::boxes_of(own, shards_.kept_rows(own, rank))) {
    for (const Use &use : uses->second) take(number, use, box, first);
    first += box.count();
  }
}

// Takes a box of the rows that the rank keeps. The box's first element has position `first` in these rows. A use has
// rows of the first dimension.
void WeightPlanner::take(uint32_t number, const Use &use, const Box &kept, uint64_t first) {
  const uint64_t first_row = first_row_of(kept), count = rows_of(kept.shape);
  const uint64_t begin = std::max(first_row, use.begin()), end = std::min(first_row + count, use.end());
  if (begin >= end) return;
  LoadedRows rows{number,
                  use.name,
                  use.theirs->type,
                  {},
                  theirs_of(kept, use, begin, end),
                  first + (begin - first_row) * (kept.count() / count),
                  use.rename.transposed};
  for (const auto &[file, box] : use.theirs->boxes)
    if (const auto common = intersect(rows.kept, *box)) {
      rows.box = *common;
      files_[file].push_back(rows);
    }
}

}  // namespace

LoadPlan plan_weights(const ModelShards &shards, std::span<const StoredFile> files, std::span<const Rename> renames,
                      uint32_t rank) {
  return WeightPlanner(shards, files, renames).plan(rank);
}

}  // namespace fsdp::checkpoint
