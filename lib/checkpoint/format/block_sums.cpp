// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/format/block_sums.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <charconv>

#include "base/checked.h"
#include "checkpoint/format/json_document.h"

namespace fsdp::checkpoint {
namespace {

constexpr size_t digits = 16;

}  // namespace

struct BlockSums::State {
  XXH3_state_t state;
};

uint64_t block_count(uint64_t data_bytes) { return divide_up(data_bytes, block_bytes); }

std::string format_sums(std::span<const uint64_t> sums) {
  std::string text;
  text.reserve(sums.size() * digits);
  for (const uint64_t sum : sums) text += format_text("{:016x}", sum);
  return text;
}

std::vector<uint64_t> parse_sums(std::string_view text, uint64_t count, std::string_view file) {
  if (text.size() != count * digits)
    refuse_file(file, "it has sums of {} bytes, and {} blocks of data need {}", text.size(), count, count * digits);
  std::vector<uint64_t> sums(count);
  for (uint64_t i = 0; i < count; ++i) {
    const char *first = text.data() + i * digits;
    const auto [end, error] = std::from_chars(first, first + digits, sums[i], 16);
    if (error != std::errc() || end != first + digits) refuse_file(file, "the sum of block {} is no number", i);
  }
  return sums;
}

uint64_t sum_of(std::span<const std::byte> block) { return XXH3_64bits(block.data(), block.size()); }

std::string long_sum_of(std::string_view bytes) {
  const XXH128_hash_t sum = XXH3_128bits(bytes.data(), bytes.size());
  return format_text("{:016x}{:016x}", sum.high64, sum.low64);
}

BlockSums::BlockSums() : state_(new State) { XXH3_64bits_reset(&state_->state); }
BlockSums::~BlockSums() = default;

void BlockSums::add(std::span<const std::byte> data) {
  while (!data.empty()) {
    const size_t some = std::min<uint64_t>(data.size(), block_bytes - in_block_);
    XXH3_64bits_update(&state_->state, data.data(), some);
    in_block_ += some;
    data = data.subspan(some);
    if (in_block_ < block_bytes) return;
    sums_.push_back(XXH3_64bits_digest(&state_->state));
    XXH3_64bits_reset(&state_->state);
    in_block_ = 0;
  }
}

std::vector<uint64_t> BlockSums::finish() {
  if (in_block_) sums_.push_back(XXH3_64bits_digest(&state_->state));
  in_block_ = 0;
  XXH3_64bits_reset(&state_->state);
  return std::exchange(sums_, {});
}

}  // namespace fsdp::checkpoint
