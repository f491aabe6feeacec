// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/convert/new_tensor_reader.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/json.h"
#include "checkpoint/format/json_document.h"

namespace fsdp::checkpoint {
namespace {

constexpr uint64_t converted_at_once = 1024;

uint64_t element_bytes(const ElementType &type) { return type.bits / 8; }

// Where in the stored tensor a box of the new one is.
Box source_of(const TensorPiece &piece, const Box &in_new) {
  Box source = in_new;
  for (size_t d = 0; d < source.offset.size(); ++d) source.offset[d] -= piece.to.offset[d];
  if (piece.transposed) std::ranges::reverse(source.offset), std::ranges::reverse(source.shape);
  for (size_t d = 0; d < source.offset.size(); ++d) source.offset[d] += piece.source.offset[d];
  return source;
}

// Elements that lie behind each other in the source go `step` elements from each other.
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

// The one that was not used for the longest time makes room.
NewTensorReader::OpenFile &NewTensorReader::open(uint32_t file) {
  auto found = open_.find(file);
  if (found == open_.end()) {
    if (open_.size() == most_open)
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

// Whole rows, or a part of one that is longer than the window.
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

// The boxes follow each other, and so do what they are of one file; of a transposed piece there is one box.
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

// at: the first element's place in the piece's source.
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

// By way of memory that is aligned, which their files need not be; F64 by way of fp32, and yet rounded once, as loads
// do it.
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
