// SPDX-License-Identifier: Apache-2.0
#include "engine/weights/compact_numbers.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/dtype.h"
#include "base/error.h"
#include "base/float_environment.h"
#include "device/main_weight.h"
#include "device/state_codes.h"
#include "memory/plane.h"

namespace fsdp::engine {
namespace {

static_assert(memory::coded_block == device::state_block);
constexpr uint64_t piece_count = uint64_t{1} << 19;  // elements that are converted in one step, a multiple of the block

// Encodes one block of at most state_block numbers, and returns its scale. A second moment above 0 must not become 0,
// because the next update would then be divided by epsilon alone.
float encode_block(std::span<const float> numbers, const device::StateMap &map, bool is_signed, uint8_t *codes) {
  uint32_t largest = 0;
  for (const float number : numbers) largest = std::max(largest, std::bit_cast<uint32_t>(number) & 0x7fffffff);
  const float scale = device::state_scale(largest);
  for (size_t i = 0; i < numbers.size(); ++i) {
    codes[i] = device::state_code(map.limit, numbers[i] / scale);
    if (!is_signed && codes[i] == device::unsigned_zero_code && numbers[i] > 0) codes[i] = 1;
  }
  return scale;
}

template <class T>
std::span<T> piece_of(std::vector<std::byte> &bytes, uint64_t count) {
  return std::span(reinterpret_cast<T *>(bytes.data()), count);
}

uint64_t block_at(uint64_t first) {
  if (first % device::state_block)
    fail(FSDP_INTERNAL, "a piece of a state in codes begins at element {}, within a block", first);
  return first / device::state_block;
}

}  // namespace

bool CompactNumbers::has(const Bucket &bucket, const Plane &plane) {
  if (plane.plan->kind == PlaneKind::main) return bucket.has(PlaneKind::rest);
  return plane.plan->kind == PlaneKind::state && bucket.plan->coded_states && plane.plan->index < memory::adamw_states;
}

CompactNumbers::CompactNumbers(Runtime &runtime, const Bucket &bucket, const Plane &plane, uint32_t tensor,
                               uint64_t longest)
    : storage_(runtime.storage.get()), form_(Form::split), plane_(&plane) {
  if (plane.plan->kind == PlaneKind::state) form_ = plane.plan->index ? Form::unsigned_codes : Form::signed_codes;
  second_ =
      form_ == Form::split ? &bucket.plane(PlaneKind::rest) : &bucket.plane(PlaneKind::state_scales, plane.plan->index);
  const auto part_of = [&](const Plane &of) { return runtime.slice_of(of, tensor, of.plan->owned); };
  slice_ = part_of(plane);
  of_second_ = part_of(*second_);
  const uint64_t blocks = device::state_blocks(std::min({longest, slice_.count, piece_count}));
  numbers_.resize(blocks * device::state_block);
  first_piece_.resize(numbers_.size() * dtype_size(plane.dtype()));
  second_piece_.resize((form_ == Form::split ? numbers_.size() : blocks) * dtype_size(second_->dtype()));
}

void CompactNumbers::read(uint64_t first, std::span<float> to, const CopyOut &copy) {
  const FloatEnvironment standard;
  for (uint64_t done = 0; done < to.size(); done += numbers_.size()) {
    const std::span<float> piece = to.subspan(done, std::min<uint64_t>(numbers_.size(), to.size() - done));
    form_ == Form::split ? read_split(first + done, piece, copy) : read_codes(first + done, piece, copy);
  }
}

void CompactNumbers::read_bytes(uint64_t first_byte, std::span<std::byte> to, const CopyOut &copy) {
  constexpr uint64_t size = sizeof(float);
  for (uint64_t done = 0; done < to.size();) {
    const uint64_t from = first_byte + done, skipped = from % size;
    const uint64_t bytes = std::min<uint64_t>(to.size() - done, numbers_.size() * size - skipped);
    const std::span<float> some = std::span(numbers_).first((skipped + bytes + size - 1) / size);
    read(from / size, some, copy);
    std::memcpy(to.data() + done, reinterpret_cast<const std::byte *>(some.data()) + skipped, bytes);
    done += bytes;
  }
}

void CompactNumbers::read_split(uint64_t first, std::span<float> to, const CopyOut &copy) {
  const std::span<uint16_t> uppers = piece_of<uint16_t>(first_piece_, to.size());
  const std::span<int16_t> rests = piece_of<int16_t>(second_piece_, to.size());
  copy(at(first), std::as_writable_bytes(uppers));
  copy(second_at(first), std::as_writable_bytes(rests));
  for (size_t i = 0; i < to.size(); ++i) to[i] = std::bit_cast<float>(device::join_weight(uppers[i], rests[i]));
}

void CompactNumbers::read_codes(uint64_t first, std::span<float> to, const CopyOut &copy) {
  const device::StateMap &map = form_ == Form::signed_codes ? device::signed_state_map : device::unsigned_state_map;
  const std::span<uint8_t> codes = piece_of<uint8_t>(first_piece_, to.size());
  const std::span<float> scales = piece_of<float>(second_piece_, device::state_blocks(to.size()));
  copy(at(first), std::as_writable_bytes(codes));
  copy(second_at(block_at(first)), std::as_writable_bytes(scales));
  for (size_t i = 0; i < to.size(); ++i) to[i] = map.value[codes[i]] * scales[i / device::state_block];
}

void CompactNumbers::write(uint64_t first, std::span<const float> from) {
  const FloatEnvironment standard;
  for (uint64_t done = 0; done < from.size(); done += numbers_.size()) {
    const std::span<const float> piece = from.subspan(done, std::min<uint64_t>(numbers_.size(), from.size() - done));
    form_ == Form::split ? write_split(first + done, piece) : write_codes(first + done, piece);
  }
}

void CompactNumbers::write_split(uint64_t first, std::span<const float> from) {
  const std::span<uint16_t> uppers = piece_of<uint16_t>(first_piece_, from.size());
  const std::span<int16_t> rests = piece_of<int16_t>(second_piece_, from.size());
  for (size_t i = 0; i < from.size(); ++i) {
    const device::SplitWeight split = device::split_weight(std::bit_cast<uint32_t>(from[i]));
    uppers[i] = split.upper, rests[i] = split.rest;
  }
  storage_->transfer(at(first), FSDP_UINT8, uppers.data(), FSDP_UINT8, uppers.size_bytes());
  storage_->transfer(second_at(first), FSDP_UINT8, rests.data(), FSDP_UINT8, rests.size_bytes());
}

void CompactNumbers::write_codes(uint64_t first, std::span<const float> from) {
  const bool is_signed = form_ == Form::signed_codes;
  const device::StateMap &map = is_signed ? device::signed_state_map : device::unsigned_state_map;
  const std::span<uint8_t> codes = piece_of<uint8_t>(first_piece_, from.size());
  const std::span<float> scales = piece_of<float>(second_piece_, device::state_blocks(from.size()));
  for (size_t block = 0; block < scales.size(); ++block) {
    const uint64_t begin = block * device::state_block;
    scales[block] = encode_block(from.subspan(begin, std::min(device::state_block, from.size() - begin)), map,
                                 is_signed, codes.data() + begin);
  }
  storage_->transfer(at(first), FSDP_UINT8, codes.data(), FSDP_UINT8, codes.size());
  storage_->transfer(second_at(block_at(first)), FSDP_UINT8, scales.data(), FSDP_UINT8, scales.size_bytes());
}

void CompactNumbers::read_as(uint64_t first, uint64_t count, std::byte *to, fsdp_dtype dtype) {
  const auto copy = [&](const std::byte *from, std::span<std::byte> bytes) {
    storage_->transfer(bytes.data(), FSDP_UINT8, from, FSDP_UINT8, bytes.size());
  };
  for (uint64_t done = 0; done < count; done += numbers_.size()) {
    const auto piece = std::span(numbers_).first(std::min<uint64_t>(numbers_.size(), count - done));
    read(first + done, piece, copy);
    storage_->transfer(to + done * dtype_size(dtype), dtype, piece.data(), FSDP_FLOAT32, piece.size());
  }
}

void CompactNumbers::write_from(uint64_t first, uint64_t count, const std::byte *from, fsdp_dtype dtype) {
  for (uint64_t done = 0; done < count; done += numbers_.size()) {
    const auto piece = std::span(numbers_).first(std::min<uint64_t>(numbers_.size(), count - done));
    storage_->transfer(piece.data(), FSDP_FLOAT32, from + done * dtype_size(dtype), dtype, piece.size());
    write(first + done, piece);
  }
}

void StateEncoder::add(const void *key, CompactNumbers &numbers, uint64_t first, std::span<const float> from) {
  constexpr uint64_t size = memory::coded_block;
  while (!from.empty()) {
    const bool ends = first + from.size() == numbers.count();
    const uint64_t whole = first % size ? 0 : ends ? from.size() : from.size() / size * size;
    const uint64_t taken = whole ? whole : std::min(from.size(), size - first % size);
    if (whole)
      numbers.write(first, from.first(taken));
    else
      add_to_cut(key, numbers, first, from.first(taken));
    first += taken, from = from.subspan(taken);
  }
}

void StateEncoder::add_to_cut(const void *key, CompactNumbers &numbers, uint64_t first, std::span<const float> from) {
  const uint64_t block = first / memory::coded_block, begin = block * memory::coded_block;
  auto cut = std::ranges::find_if(cut_, [&](const CutBlock &one) { return one.key == key && one.block == block; });
  if (cut == cut_.end()) cut = cut_.insert(cut_.end(), {key, block});
  std::ranges::copy(from, cut->numbers.begin() + static_cast<ptrdiff_t>(first - begin));
  cut->given += from.size();
  const uint64_t length = std::min(memory::coded_block, numbers.count() - begin);
  if (cut->given < length) return;
  numbers.write(begin, std::span(cut->numbers).first(length));
  cut_.erase(cut);
}

}  // namespace fsdp::engine
