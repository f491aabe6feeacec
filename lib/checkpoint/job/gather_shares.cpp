// SPDX-License-Identifier: Apache-2.0

#include "checkpoint/job/gather_shares.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "base/text.h"
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

// If bytes are wanted twice, or if boxes are interleaved, the file is read again from its beginning.
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

// The kept box of the stored tensor has our shape transposed: its element (c, r) is our element (r, c).
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

namespace {

constexpr uint64_t least_piece = 512, turn_bytes = uint64_t{1} << 20;

// The size of the piece that each holder sends at once.
uint64_t piece_of(uint32_t holders) { return std::max(turn_bytes / holders / least_piece * least_piece, least_piece); }

struct SharedRows {
  const KeptTensor *tensor;
  uint64_t rows, row_bytes, element;  // rows that each holder keeps, bytes per row and per element
};

// Walks the part of one holder, tensor by tensor, in pieces of whole elements.
class ShareWalk {
 public:
  ShareWalk(std::span<const SharedRows> tensors, ModelShards::Holder holder) : tensors_(tensors), holder_(holder) {}

  // Calls visit(tensor, first byte in the kept part, offset in the piece, bytes).
  template <class Visit>
  void take_piece(uint64_t piece, Visit visit) {
    uint64_t used = 0;
    for (; tensor_ < tensors_.size(); ++tensor_, done_ = 0) {
      const SharedRows &rows = tensors_[tensor_];
      const RowRange share = ModelShards::share_of(rows.rows, holder_);
      const uint64_t left = share.count * rows.row_bytes - done_;
      const uint64_t now = std::min(left, (piece - used) / rows.element * rows.element);
      if (now > 0) visit(rows, share.first * rows.row_bytes + done_, used, now);
      used += now, done_ += now;
      if (now < left) return;
    }
  }
  bool done() const { return tensor_ == tensors_.size(); }

 private:
  std::span<const SharedRows> tensors_;
  ModelShards::Holder holder_;
  size_t tensor_ = 0;
  uint64_t done_ = 0;  // finished bytes of the holder's part of the tensor
};

std::vector<SharedRows> shared_rows_of(const KeptAccess &shared, std::span<const KeptTensor *const> tensors) {
  std::vector<SharedRows> all;
  for (const KeptTensor *tensor : tensors) {
    const RowRange kept = shared.shards.kept_rows(*tensor, shared.rank);
    if (kept.count == 0) continue;
    all.push_back({tensor, kept.count, *stored_bytes(*tensor->type, tensor->row_size()), tensor->type->bits / 8});
  }
  return all;
}

// Keeps the first error. The exchange goes on after an error, because other ranks wait for it.
class Attempts {
 public:
  template <class Body>
  void attempt(Body body) {
    if (!failure) failure = capture_error(body);
  }
  std::optional<Error> failure;
};

}  // namespace

uint64_t gather_bytes(uint32_t holders) { return turn_bytes + std::max(turn_bytes, holders * piece_of(holders)); }

std::optional<Error> gather_shares(transport::Team &holders, const KeptAccess &shared,
                                   std::span<const KeptTensor *const> tensors) {
  const std::vector<SharedRows> rows = shared_rows_of(shared, tensors);
  const uint32_t count = holders.size(), own = holders.rank();
  const uint64_t piece = piece_of(count);
  const std::span<std::byte> mine = shared.staging.first(piece), all = shared.staging.subspan(piece, piece * count);
  std::vector<ShareWalk> walks;
  for (uint32_t number = 0; number < count; ++number) walks.emplace_back(rows, ModelShards::Holder{number, count});
  Attempts attempts;
  while (!std::ranges::all_of(walks, &ShareWalk::done)) {
    walks[own].take_piece(piece, [&](const SharedRows &from, uint64_t first, uint64_t at, uint64_t bytes) {
      attempts.attempt([&] { shared.read(*from.tensor, first, mine.subspan(at, bytes)); });
    });
    holders.all_gather(mine.data(), piece, all.data(), "rows that others have read");
    for (uint32_t number = 0; number < count; ++number) {
      if (number == own) continue;
      const std::span<const std::byte> theirs = all.subspan(number * piece, piece);
      walks[number].take_piece(piece, [&](const SharedRows &to, uint64_t first, uint64_t at, uint64_t bytes) {
        attempts.attempt(
            [&] { shared.write(*to.tensor, first / to.element, *to.tensor->type, theirs.subspan(at, bytes)); });
      });
    }
  }
  return attempts.failure;
}

}  // namespace fsdp::checkpoint
