// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/gather_shares.h"

#include <algorithm>
#include <vector>

namespace fsdp::checkpoint {
namespace {

constexpr uint64_t least_piece = 512, turn_bytes = uint64_t{1} << 20;

// That each holder gives at once.
uint64_t piece_of(uint32_t holders) { return std::max(turn_bytes / holders / least_piece * least_piece, least_piece); }

struct SharedRows {
  const KeptTensor *tensor;
  uint64_t rows, row_bytes, element;  // that each of them keeps
};

// The part of one holder, tensor behind tensor, in pieces of whole elements.
class ShareWalk {
 public:
  ShareWalk(std::span<const SharedRows> tensors, ModelShards::Holder holder) : tensors_(tensors), holder_(holder) {}

  // visit(tensor, first byte of what is kept, place in the piece, bytes)
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
  uint64_t done_ = 0;  // bytes of its part of the tensor
};

std::vector<SharedRows> shared_rows_of(const KeptAccess &shared, std::span<const KeptTensor *const> tensors) {
  std::vector<SharedRows> all;
  for (const KeptTensor *tensor : tensors) {
    const RowRange kept = shared.shards.kept_rows(*tensor, shared.rank);
    if (kept.count == 0) continue;
    const uint64_t bytes = *stored_bytes(*tensor->type, ModelShards::box_of(*tensor, kept).count());
    all.push_back({tensor, kept.count, bytes / kept.count, tensor->type->bits / 8});
  }
  return all;
}

// The exchange goes on whatever happens here: others wait for it.
class Attempts {
 public:
  template <class Body>
  void attempt(Body body) {
    if (failure) return;
    try {
      body();
    } catch (const Error &error) {
      failure = error;
    }
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
