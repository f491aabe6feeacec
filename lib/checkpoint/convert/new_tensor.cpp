// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/convert/new_tensor.h"

#include <algorithm>

#include "base/error.h"
#include "base/json.h"

namespace fsdp::checkpoint {
namespace {

// Rows of a stored tensor that are rows of a new one, both as they are seen here.
struct RowUse {
  std::string name;  // of the stored one
  const SpreadTensor *from;
  uint64_t first, to, count;
  bool transposed;
  bool keeps_type = false;  // whatever the others become
};
using RowUses = std::map<std::string, std::vector<RowUse>>;  // by the new name

std::string rows_text(uint64_t first, uint64_t end) { return format_text("rows {} to {}", first, end); }

// As it is seen here, where theirs may be turned.
std::vector<uint64_t> seen_shape(const RowUse &use, bool stored_is_theirs) {
  std::vector<uint64_t> shape = use.from->shape;
  if (use.transposed && shape.size() != 2)
    fail(FSDP_INVALID_ARGUMENT, "{} has shape [{}], and only matrices are transposed", quote_json(use.name),
         fmt::join(shape, ", "));
  if (use.transposed && stored_is_theirs) std::ranges::reverse(shape);
  return shape;
}

// Rows of a matrix are the columns of a transposed one.
Box box_of_rows(std::vector<uint64_t> shape, uint64_t first, uint64_t count, bool columns) {
  if (!shape.empty()) shape[0] = count;
  Box box{std::vector<uint64_t>(shape.size(), 0), std::move(shape)};
  if (!box.offset.empty()) box.offset[0] = first;
  if (columns) std::ranges::reverse(box.offset), std::ranges::reverse(box.shape);
  return box;
}

class NewTensorMaker {
 public:
  NewTensorMaker(bool from_theirs, const ElementType *as) : from_theirs_(from_theirs), as_(as) {}

  NewTensor make(const std::string &name, std::vector<RowUse> &uses) const {
    std::ranges::stable_sort(uses, {}, &RowUse::to);
    NewTensor made{name, type_of(uses[0]), {}, {}, {}};
    const std::vector<uint64_t> seen = seen_shape(uses[0], from_theirs_);
    uint64_t next = 0;
    for (const RowUse &use : uses) next = add(made, use, uses[0], next);
    made.shape = seen;
    if (!made.shape.empty()) made.shape[0] = next;
    if (uses[0].transposed && !from_theirs_) std::ranges::reverse(made.shape);
    return made;
  }

 private:
  const ElementType *type_of(const RowUse &use) const {
    if (!is_known(*use.from->type))
      fail(FSDP_UNSUPPORTED, "tensor {} is of {}, which this release does not know", quote_json(use.name),
           quote_json(use.from->unknown_type));
    if (use.from->type->bits < 8)
      fail(FSDP_UNSUPPORTED, "tensor {} has elements of {} bits, which cannot be read", quote_json(use.name),
           use.from->type->bits);
    return as_ && is_converted(*use.from->type) && !use.keeps_type ? as_ : use.from->type;
  }
  void check_fits(const NewTensor &made, const RowUse &use, const RowUse &first) const;
  uint64_t add(NewTensor &made, const RowUse &use, const RowUse &first, uint64_t next) const;

  bool from_theirs_;  // else from ours
  const ElementType *as_;
};

void NewTensorMaker::check_fits(const NewTensor &made, const RowUse &use, const RowUse &first) const {
  if (type_of(use) != made.type)
    fail(FSDP_INVALID_ARGUMENT, "{} would be of two types: {} is of {}, and {} of {}", quote_json(made.name),
         quote_json(first.name), first.from->type_name(), quote_json(use.name), use.from->type_name());
  const std::vector<uint64_t> mine = seen_shape(use, from_theirs_), others = seen_shape(first, from_theirs_);
  if (mine.size() != others.size() ||
      !std::equal(mine.begin() + !mine.empty(), mine.end(), others.begin() + !mine.empty()))
    fail(FSDP_INVALID_ARGUMENT, "{} cannot be made of {} of shape [{}] and {} of shape [{}]: their rows differ",
         quote_json(made.name), quote_json(first.name), fmt::join(others, ", "), quote_json(use.name),
         fmt::join(mine, ", "));
  if (use.transposed != first.transposed && !from_theirs_)
    fail(FSDP_INVALID_ARGUMENT, "{} would be transposed for {}, and not for {}", quote_json(made.name),
         quote_json(first.name), quote_json(use.name));
}

// Returns where the next rows must begin. The same rows again are a twin's, where ours become theirs.
uint64_t NewTensorMaker::add(NewTensor &made, const RowUse &use, const RowUse &first, uint64_t next) const {
  check_fits(made, use, first);
  const std::vector<uint64_t> seen = seen_shape(use, from_theirs_);
  const TensorPiece piece{use.name, use.from, box_of_rows(seen, use.first, use.count, use.transposed && from_theirs_),
                          box_of_rows(seen, use.to, use.count, use.transposed && !from_theirs_), use.transposed};
  if (use.to == next) {
    made.pieces.push_back(piece);
    return next + use.count;
  }
  const bool tied = !from_theirs_ && made.pieces.back().to == piece.to;
  if (!tied)
    fail(FSDP_INVALID_ARGUMENT, "{} of {} come {}", rows_text(std::min(next, use.to), std::max(next, use.to)),
         quote_json(made.name),
         use.to < next ? format_text("twice, also from {}", quote_json(use.name)) : "from nowhere");
  made.twins.push_back(piece);
  return next;
}

void check_rows(const RowUse &use, uint64_t rows) {
  if (use.first > rows || use.count > rows - use.first)
    fail(FSDP_INVALID_ARGUMENT, "{} has {} rows, not {} from {} on", quote_json(use.name), rows, use.count, use.first);
}

std::vector<NewTensor> make_all(RowUses &uses, const NewTensorMaker &maker) {
  std::vector<NewTensor> made;
  for (auto &[name, of_one] : uses) made.push_back(maker.make(name, of_one));
  return made;
}

// A rename of a tensor of ours, and what it is called there.
struct WayBack {
  const Rename *rename;
  std::string theirs;
  uint64_t count = 0;
};

std::vector<WayBack> ways_back(const std::string &name, std::span<const Rename> renames) {
  std::vector<WayBack> ways;
  for (const Rename &rename : renames)
    if (const auto text = match_name(rename.ours, name)) {
      if (rename.theirs.find('*') != rename.theirs.npos && rename.ours.find('*') == rename.ours.npos)
        fail(FSDP_INVALID_ARGUMENT, "the rename of {} to {} has no way back: what '*' stood for is not known",
             quote_json(rename.theirs), quote_json(rename.ours));
      ways.push_back({&rename, fill_name(rename.theirs, *text)});
    }
  std::ranges::stable_sort(ways, {}, [](const WayBack &way) { return way.rename->to_row; });
  return ways;
}

// Each row of ours goes to one place.
void count_rows(const std::string &name, uint64_t rows, std::vector<WayBack> &ways) {
  uint64_t next = 0;
  for (size_t i = 0; i < ways.size(); ++i) {
    const uint64_t to = ways[i].rename->to_row, end = i + 1 < ways.size() ? ways[i + 1].rename->to_row : rows;
    if (to > next) fail(FSDP_INVALID_ARGUMENT, "{} of {} go nowhere", rows_text(next, to), quote_json(name));
    if (to < next || (i && to == ways[i - 1].rename->to_row))
      fail(FSDP_INVALID_ARGUMENT, "row {} of {} goes to two tensors, also to {}", to, quote_json(name),
           quote_json(ways[i].theirs));
    ways[i].count = ways[i].rename->row_count ? ways[i].rename->row_count : end > to ? end - to : 0;
    next = to + ways[i].count;
  }
  if (next != rows)
    fail(FSDP_INVALID_ARGUMENT, "{} of {} go {}", rows_text(std::min(next, rows), std::max(next, rows)),
         quote_json(name), next < rows ? "nowhere" : "somewhere, and it does not have them");
}

// A checkpoint may have boxes of tensors alone, those of the models that were saved.
void require_whole(const SpreadTensors &tensors) {
  for (const auto &[name, tensor] : tensors) {
    uint64_t count = 0;
    for (const auto &[file, box] : tensor.boxes) count += box->count();
    if (const uint64_t all = whole(tensor.shape).count(); count != all)
      fail(FSDP_INVALID_ARGUMENT, "tensor {} of shape [{}] is not whole: {} of its {} elements were saved",
           quote_json(name), fmt::join(tensor.shape, ", "), count, all);
  }
}

// What codes are multiplied by, as it is called here and by others: another type would be another scale.
bool is_plane_of_scales(const std::string &name, const SpreadTensors &tensors) {
  for (const std::string_view end : {"_scale", "_scale_inv"}) {
    if (!name.ends_with(end)) continue;
    const auto codes = tensors.find(name.substr(0, name.size() - end.size()));
    if (codes != tensors.end() && codes->second.type->dtype == FSDP_FLOAT8_E4M3) return true;
  }
  return false;
}

}  // namespace

bool NewTensor::turns() const {
  return std::ranges::any_of(pieces, &TensorPiece::transposed) || std::ranges::any_of(twins, &TensorPiece::transposed);
}

std::vector<NewTensor> plan_import(const SpreadTensors &theirs, std::span<const Rename> renames) {
  require_whole(theirs);
  RowUses uses;
  for (const auto &[name, tensor] : theirs) {
    bool renamed = false;
    for (const Rename &rename : renames)
      if (const auto text = match_name(rename.theirs, name)) {
        RowUse use{name, &tensor, rename.from_row, rename.to_row, rename.row_count, rename.transposed};
        const uint64_t rows = rows_of(seen_shape(use, true));
        if (!use.count && use.first < rows) use.count = rows - use.first;
        check_rows(use, rows);
        uses[fill_name(rename.ours, *text)].push_back(use);
        renamed = true;
      }
    if (!renamed) uses[name].push_back({name, &tensor, 0, 0, rows_of(tensor.shape), false});
  }
  return make_all(uses, {true, nullptr});
}

std::vector<NewTensor> plan_export(const SpreadTensors &ours, std::span<const Rename> renames, const ElementType *as) {
  require_whole(ours);
  RowUses uses;
  for (const auto &[name, tensor] : ours) {
    std::vector<WayBack> ways = ways_back(name, renames);
    const bool scales = is_plane_of_scales(name, ours);
    if (ways.empty()) {
      uses[name].push_back({name, &tensor, 0, 0, rows_of(tensor.shape), false, scales});
      continue;
    }
    count_rows(name, rows_of(tensor.shape), ways);
    for (const WayBack &way : ways)
      uses[way.theirs].push_back(
          {name, &tensor, way.rename->to_row, way.rename->from_row, way.count, way.rename->transposed, scales});
  }
  return make_all(uses, {false, as});
}

}  // namespace fsdp::checkpoint
