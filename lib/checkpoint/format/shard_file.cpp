// SPDX-License-Identifier: Apache-2.0

#include "checkpoint/format/shard_file.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <string_view>
#include <unordered_set>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/checked.h"
#include "base/text.h"
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
    refuse_file(file, "it has checksums of {} bytes, and {} blocks of data need {}", text.size(), count,
                count * digits);
  std::vector<uint64_t> sums(count);
  for (uint64_t i = 0; i < count; ++i) {
    const char *first = text.data() + i * digits;
    const auto [end, error] = std::from_chars(first, first + digits, sums[i], 16);
    if (error != std::errc() || end != first + digits) refuse_file(file, "the checksum of block {} is no number", i);
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

namespace {

constexpr const char *sharding_key = "DCP_SHARDING_INFO";
constexpr const char *offsets_key = "saved_offsets";
constexpr const char *sums_key = "libfsdp.sums";

// The text must have an entry for every tensor, because PyTorch cannot read the folder if one is missing.
std::string sharding_text(std::span<const ShardTensor> tensors, std::span<const uint32_t> order) {
  std::string text = "{";
  for (const uint32_t index : order)
    text += format_text(R"({}{}:{{"{}":[{}]}})", text.size() > 1 ? "," : "", quote_json(tensors[index].name),
                        offsets_key, fmt::join(tensors[index].box.offset, ","));
  return text + "}";
}

}  // namespace

ShardFile plan_shard_file(std::span<const ShardTensor> tensors) {
  std::unordered_set<std::string_view> names{"__metadata__"};
  for (const ShardTensor &tensor : tensors)
    if (!names.insert(tensor.name).second)
      fail(FSDP_INVALID_ARGUMENT, "a tensor called {} cannot be saved: the name is taken", quote_json(tensor.name));
  ShardFile file;
  file.order.resize(tensors.size());
  std::iota(file.order.begin(), file.order.end(), 0);
  std::ranges::stable_sort(file.order, std::greater<>(), [&](uint32_t index) { return tensors[index].type->bits; });
  for (const uint32_t index : file.order)
    file.header.tensors.push_back({tensors[index].name, tensors[index].type, tensors[index].box.shape});
  place_tensors(file.header);
  file.header.metadata = {{"DCP_VERSION", "1.0"}, {"format", "pt"}, {sharding_key, sharding_text(tensors, file.order)}};
  write_shard_header(file.header, std::vector<uint64_t>(block_count(file.header.data_bytes())));
  return file;
}

std::string write_shard_header(SafetensorsHeader &header, std::span<const uint64_t> sums) {
  header.metadata[sums_key] = format_sums(sums);
  return write_header(header, data_alignment);
}

std::vector<std::vector<uint64_t>> saved_offsets(const SafetensorsHeader &header, std::string_view file) {
  std::vector<std::vector<uint64_t>> all;
  const auto found = header.metadata.find(sharding_key);
  const bool says = found != header.metadata.end();
  const nlohmann::json document = says ? parse_json(found->second, file) : nlohmann::json();
  for (const StoredTensor &tensor : header.tensors) {
    all.emplace_back(tensor.shape.size());
    if (!says) continue;
    const JsonValue offsets = JsonValue(document, file)[tensor.name][offsets_key];
    all.back() = offsets.unsigned_numbers(max_dimensions);
    offsets.require(all.back().size() == tensor.shape.size(), format_text("{} numbers", tensor.shape.size()));
  }
  return all;
}

std::vector<uint64_t> read_sums(const SafetensorsHeader &header, std::string_view file) {
  const auto found = header.metadata.find(sums_key);
  if (found == header.metadata.end()) return {};
  return parse_sums(found->second, block_count(header.data_bytes()), file);
}

std::string shard_name(uint32_t rank, uint32_t number) {
  return format_text("shard-{:05}-model-{:05}-of-{:05}.safetensors", uint64_t{rank} + 1, number + 1, number + 1);
}

}  // namespace fsdp::checkpoint
