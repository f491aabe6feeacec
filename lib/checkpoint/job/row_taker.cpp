// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/row_taker.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <unordered_map>

#include "base/json.h"
#include "checkpoint/format/json_document.h"

namespace fsdp::checkpoint {

std::vector<RowTaker::Wanted> RowTaker::find(const ShardReader &reader, std::span<const LoadedRows> rows) const {
  const SafetensorsHeader &header = reader.header();
  std::unordered_map<std::string_view, uint32_t> numbers;
  for (uint32_t i = 0; i < header.tensors.size(); ++i) numbers[header.tensors[i].name] = i;
  std::vector<Wanted> wanted;
  for (const LoadedRows &one : rows) {
    const auto found = numbers.find(one.name);
    if (found == numbers.end()) refuse_file(reader.shown(), "tensor {} is not in it", quote_json(one.name));
    if (const ElementType *type = header.tensors[found->second].type; type != one.type)
      refuse_file(reader.shown(), "tensor {} is of {}, and of {} elsewhere", quote_json(one.name), type->name,
                  one.type->name);
    wanted.push_back({{found->second, one.box, one.kept}, &one});
  }
  std::ranges::stable_sort(wanted, [](const Wanted &a, const Wanted &b) {
    return std::tie(a.box.tensor, a.box.box.offset) < std::tie(b.box.tensor, b.box.box.offset);
  });
  return wanted;
}

// A file is read from its front to its end as often as bytes are wanted twice, or by boxes that lie among each other.
void RowTaker::take(const ShardReader &reader, std::span<const LoadedRows> rows) {
  std::vector<Wanted> left = find(reader, rows);
  while (!left.empty()) {
    std::vector<Wanted> now, later;
    uint64_t end = 0;
    for (Wanted &one : left) {
      reader.check_has(one.box);
      const ByteRange bytes = WantedRuns(reader.header(), reader.offsets(), {&one.box, 1}).span();
      (bytes.begin >= end ? now : later).push_back(one);
      if (bytes.begin >= end) end = bytes.end;
    }
    read(reader, now);
    left = std::move(later);
  }
}

void RowTaker::read(const ShardReader &reader, std::span<const Wanted> wanted) {
  std::vector<WantedBox> boxes;
  for (const Wanted &one : wanted) boxes.push_back(one.box);
  const auto counts =
      reader.read(boxes, buffer_.bytes(), [&](uint32_t number, uint64_t to, std::span<const std::byte> elements) {
        poll_();
        hand_on(*wanted[number].rows, to, elements);
      });
  wanted_bytes_ += counts.wanted;
  read_bytes_ += counts.read;
}

void RowTaker::hand_on(const LoadedRows &rows, uint64_t to, std::span<const std::byte> elements) {
  if (rows.transposed) return turn(rows, to, elements);
  write_(shards_.tensors()[rows.tensor], rows.first + to, *rows.type, elements);
}

// What is kept has the shape [columns, rows] of ours: element (c, r) of it is element (r, c) there.
void RowTaker::turn(const LoadedRows &rows, uint64_t to, std::span<const std::byte> elements) {
  const uint64_t element = rows.type->bits / 8, columns = rows.kept.shape[0], count = rows.kept.shape[1];
  const auto key = std::pair(rows.tensor, rows.first);
  Turned &turned = turned_[key];
  turned.elements.resize(columns * count * element);
  for (uint64_t i = 0; i < elements.size(); i += element, ++to) {
    const uint64_t place = to % count * columns + to / count;
    std::memcpy(turned.elements.data() + place * element, elements.data() + i, element);
  }
  turned.taken += elements.size();
  if (turned.taken < turned.elements.size()) return;
  write_(shards_.tensors()[rows.tensor], rows.first, *rows.type, turned.elements);
  turned_.erase(key);
}

}  // namespace fsdp::checkpoint
