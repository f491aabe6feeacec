// SPDX-License-Identifier: Apache-2.0

#include "checkpoint/convert/new_tensor.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/format/json_document.h"

namespace fsdp::checkpoint {

namespace {

// Rows of a stored tensor that become rows of a new one; rows are counted after transposing on both sides.
struct RowUse {
  std::string name;  // name of the stored tensor
  const SpreadTensor *from;
  uint64_t first, to, count;
  bool transposed;
  bool keeps_type = false;  // its type stays, even if others are converted
};
using RowUses = std::map<std::string, std::vector<RowUse>>;  // key: the new name

std::string rows_text(uint64_t first, uint64_t end) { return format_text("rows {} to {}", first, end); }

// The shape of the stored tensor after transposing.
std::vector<uint64_t> seen_shape(const RowUse &use, bool stored_is_theirs) {
  std::vector<uint64_t> shape = use.from->shape;
  if (use.transposed && shape.size() != 2)
    fail(FSDP_INVALID_ARGUMENT, "{} has shape [{}], and only matrices are transposed", quote_json(use.name),
         fmt::join(shape, ", "));
  if (use.transposed && stored_is_theirs) std::ranges::reverse(shape);
  return shape;
}

// The rows of a transposed matrix are the columns of the stored one.
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

  bool from_theirs_;  // true: from their names to ours; false: from our names to theirs
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

// Returns the row at which the next rows must begin. When our tensors become theirs, repeated rows are those of a twin.
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

// A rename that applies to a tensor of ours, and the tensor's name in the other program.
struct ReverseRename {
  const Rename *rename;
  std::string theirs;
  uint64_t count = 0;
};

std::vector<ReverseRename> reverse_renames(const std::string &name, std::span<const Rename> renames) {
  std::vector<ReverseRename> reversed;
  for (const Rename &rename : renames)
    if (const auto text = match_name(rename.ours, name)) {
      if (rename.theirs.find('*') != rename.theirs.npos && rename.ours.find('*') == rename.ours.npos)
        fail(FSDP_INVALID_ARGUMENT, "the rename of {} to {} has no way back: what '*' stood for is not known",
             quote_json(rename.theirs), quote_json(rename.ours));
      reversed.push_back({&rename, fill_name(rename.theirs, *text)});
    }
  std::ranges::stable_sort(reversed, {}, [](const ReverseRename &reverse) { return reverse.rename->to_row; });
  return reversed;
}

// Counts the rows of each reverse rename, because each row of ours goes to one place.
void count_rows(const std::string &name, uint64_t rows, std::vector<ReverseRename> &reversed) {
  uint64_t next = 0;
  for (size_t i = 0; i < reversed.size(); ++i) {
    const uint64_t to = reversed[i].rename->to_row,
                   end = i + 1 < reversed.size() ? reversed[i + 1].rename->to_row : rows;
    if (to > next) fail(FSDP_INVALID_ARGUMENT, "{} of {} go nowhere", rows_text(next, to), quote_json(name));
    if (to < next || (i && to == reversed[i - 1].rename->to_row))
      fail(FSDP_INVALID_ARGUMENT, "row {} of {} goes to two tensors, also to {}", to, quote_json(name),
           quote_json(reversed[i].theirs));
    reversed[i].count = reversed[i].rename->row_count ? reversed[i].rename->row_count : end > to ? end - to : 0;
    next = to + reversed[i].count;
  }
  if (next != rows)
    fail(FSDP_INVALID_ARGUMENT, "{} of {} go {}", rows_text(std::min(next, rows), std::max(next, rows)),
         quote_json(name), next < rows ? "nowhere" : "somewhere, and it does not have them");
}

// Throws if a tensor is incomplete: a checkpoint may have only those boxes of a tensor that the saved models have.
void require_whole(const SpreadTensors &tensors) {
  for (const auto &[name, tensor] : tensors) {
    uint64_t count = 0;
    for (const auto &[file, box] : tensor.boxes) count += box->count();
    if (const uint64_t all = whole(tensor.shape).count(); count != all)
      fail(FSDP_INVALID_ARGUMENT, "tensor {} of shape [{}] is not whole: {} of its {} elements were saved",
           quote_json(name), fmt::join(tensor.shape, ", "), count, all);
  }
}

// Is this a plane of scales, by its name in libfsdp or in other programs? The type of such a plane is not converted,
// because that would change the scales.
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
    std::vector<ReverseRename> reversed = reverse_renames(name, renames);
    const bool scales = is_plane_of_scales(name, ours);
    if (reversed.empty()) {
      uses[name].push_back({name, &tensor, 0, 0, rows_of(tensor.shape), false, scales});
      continue;
    }
    count_rows(name, rows_of(tensor.shape), reversed);
    for (const ReverseRename &reverse : reversed)
      uses[reverse.theirs].push_back({name, &tensor, reverse.rename->to_row, reverse.rename->from_row, reverse.count,
                                      reverse.rename->transposed, scales});
  }
  return make_all(uses, {false, as});
}

namespace {

constexpr uint64_t converted_at_once = 1024;

uint64_t element_bytes(const ElementType &type) { return type.bits / 8; }

// The box of the stored tensor that corresponds to a box of the new one.
Box source_of(const TensorPiece &piece, const Box &in_new) {
  Box source = in_new;
  for (size_t d = 0; d < source.offset.size(); ++d) source.offset[d] -= piece.to.offset[d];
  if (piece.transposed) std::ranges::reverse(source.offset), std::ranges::reverse(source.shape);
  for (size_t d = 0; d < source.offset.size(); ++d) source.offset[d] += piece.source.offset[d];
  return source;
}

// Copies adjacent elements to places that are `step` elements apart.
void scatter(std::byte *to, uint64_t step, const std::byte *from, uint64_t count, uint64_t element) {
  const auto all = [&]<size_t size>() {
    for (uint64_t i = 0; i < count; ++i) std::memcpy(to + i * step * size, from + i * size, size);
  };
  if (element == 1) all.operator()<1>();
  if (element == 2) all.operator()<2>();
  if (element == 4) all.operator()<4>();
  if (element == 8) all.operator()<8>();
}

}  // namespace

NewTensorReader::OpenFile::OpenFile(ShardReader opened) : reader(std::move(opened)) {
  const std::vector<StoredTensor> &tensors = reader.header().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) numbers[tensors[i].name] = i;
}

// If too many files are open, the file that was unused for the longest time is closed.
NewTensorReader::OpenFile &NewTensorReader::open(uint32_t file) {
  auto found = open_.find(file);
  if (found == open_.end()) {
    if (open_.size() == max_open)
      open_.erase(std::ranges::min_element(open_, {}, [](const auto &one) { return one.second->used; }));
    found = open_.emplace(file, std::make_unique<OpenFile>(files_.open(file))).first;
  }
  found->second->used = ++uses_;
  return *found->second;
}

void NewTensorReader::read(const NewTensor &tensor, uint64_t first, std::span<std::byte> to) {
  const uint64_t element = element_bytes(*tensor.type);
  if (!tensor.turns()) {
    make({&tensor, first / element, to}, split_range(tensor.shape, first / element, to.size() / element));
    return;
  }
  for (uint64_t at = first / element; !to.empty();) {
    if (window_.tensor != &tensor || at < window_.first || at >= window_.first + window_.to.size() / element)
      move_window(tensor, at);
    const auto here = window_.to.subspan((at - window_.first) * element);
    const size_t some = std::min(here.size(), to.size());
    std::memcpy(to.data(), here.data(), some);
    to = to.subspan(some);
    at += some / element;
  }
}

// The window has whole rows; if a row is longer than the window, it has a part of the row.
void NewTensorReader::move_window(const NewTensor &tensor, uint64_t element) {
  const uint64_t most = window_bytes / element_bytes(*tensor.type), row = tensor.shape[1];
  const uint64_t column = element % row;
  Box box{{element / row, column}, {1, std::min(row - column, most)}};
  if (column == 0 && row <= most) box.shape = {std::min(tensor.shape[0] - box.offset[0], most / row), row};
  window_memory_.resize(box.count() * element_bytes(*tensor.type));
  window_ = {&tensor, element, window_memory_};
  make(window_, {&box, 1});
}

void NewTensorReader::make(const NewElements &range, std::span<const Box> boxes) {
  for (const TensorPiece &piece : range.tensor->pieces) fill(range, boxes, piece);
  for (const TensorPiece &twin : range.tensor->twins) {
    twin_memory_.assign(range.to.begin(), range.to.end());
    fill({range.tensor, range.first, twin_memory_}, boxes, twin);
    if (std::memcmp(twin_memory_.data(), range.to.data(), range.to.size()) != 0)
      fail(FSDP_INVALID_ARGUMENT, "{} and {} have different values, and would both be {}", quote_json(twin.name),
           quote_json(range.tensor->pieces[0].name), quote_json(range.tensor->name));
  }
}

// Boxes are in order, and so are their parts in one file. A transposed piece has one box.
void NewTensorReader::fill(const NewElements &range, std::span<const Box> boxes, const TensorPiece &piece) {
  std::vector<Box> sources;
  for (const Box &box : boxes)
    if (const auto common = intersect(box, piece.to)) sources.push_back(source_of(piece, *common));
  if (sources.empty()) return;
  for (const auto &[file, stored] : piece.from->boxes) {
    std::vector<Box> here;
    for (const Box &source : sources)
      if (const auto common = intersect(source, *stored)) here.push_back(*common);
    if (!here.empty()) fill_from(range, here, piece, file);
  }
}

void NewTensorReader::fill_from(const NewElements &range, std::span<const Box> sources, const TensorPiece &piece,
                                uint32_t file) {
  const OpenFile &opened = open(file);
  const auto number = opened.numbers.find(piece.name);
  if (number == opened.numbers.end() || opened.reader.header().tensors[number->second].type != piece.from->type)
    refuse_file(opened.reader.shown(), "tensor {} is no longer what it was", quote_json(piece.name));
  std::vector<WantedBox> wanted;
  for (const Box &source : sources) wanted.push_back({number->second, source, piece.source});
  const auto counts = opened.reader.read(
      wanted, buffer_.bytes(),
      [&](uint32_t, uint64_t at, std::span<const std::byte> elements) { take(range, piece, at, elements); });
  bytes_read_ += counts.read;
}

// `at` is the position of the first element in the piece's source.
void NewTensorReader::take(const NewElements &range, const TensorPiece &piece, uint64_t at,
                           std::span<const std::byte> elements) {
  const ElementType &from = *piece.from->type, &to = *range.tensor->type;
  const uint64_t size = element_bytes(to);
  if (!piece.transposed) {
    const Box &box = piece.to;
    const uint64_t row = box.offset.empty() || !box.shape[0] ? 0 : box.count() / box.shape[0];
    const uint64_t first = box.offset.empty() ? 0 : box.offset[0] * row;
    return convert(from, to, elements, range.to.data() + (first + at - range.first) * size);
  }
  const uint64_t columns = piece.source.shape[1], step = range.tensor->shape[1];
  std::array<std::byte, converted_at_once * sizeof(double)> some;
  for (uint64_t left = elements.size() / element_bytes(from), done = 0; left;) {
    const uint64_t row = at / columns, column = at % columns;
    const uint64_t count = std::min({left, columns - column, converted_at_once});
    convert(from, to, elements.subspan(done * element_bytes(from), count * element_bytes(from)), some.data());
    const uint64_t place = (piece.to.offset[0] + column) * step + piece.to.offset[1] + row;
    scatter(range.to.data() + (place - range.first) * size, step, some.data(), count, size);
    at += count, done += count, left -= count;
  }
}

// Converts in aligned memory, because elements in other programs' files need not be aligned. F64 is converted through
// fp32, but rounded only once, as in loads.
void NewTensorReader::convert(const ElementType &from, const ElementType &to, std::span<const std::byte> elements,
                              std::byte *out) {
  if (&from == &to) {
    std::memcpy(out, elements.data(), elements.size());
    return;
  }
  const uint64_t size = element_bytes(from), all = elements.size() / size;
  alignas(64) std::array<double, converted_at_once> aligned;
  alignas(64) std::array<float, converted_at_once> rounded;
  for (uint64_t done = 0; done < all;) {
    const uint64_t some = std::min(all - done, converted_at_once);
    std::memcpy(aligned.data(), elements.data() + done * size, some * size);
    const void *source = aligned.data();
    if (!from.dtype) {
      for (uint64_t i = 0; i < some; ++i) rounded[i] = narrow(aligned[i], to.dtype);
      source = rounded.data();
    }
    cast_(out + done * element_bytes(to), to.dtype, source, from.dtype ? from.dtype : FSDP_FLOAT32, some);
    done += some;
  }
}

}  // namespace fsdp::checkpoint
