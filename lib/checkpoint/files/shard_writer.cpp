// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/files/shard_writer.h"

#include <algorithm>
#include <cstring>

#include "checkpoint/files/file.h"
#include "checkpoint/format/shard_file.h"

namespace fsdp::checkpoint {
namespace {

constexpr std::chrono::milliseconds poll_period(20);

}  // namespace

Staging Staging::allocate() {
  const auto bytes = std::make_shared<AlignedBytes>(least_bytes);
  Staging staging;
  staging.add(bytes->bytes(), bytes);
  return staging;
}

void Staging::add(std::span<std::byte> memory, std::shared_ptr<void> owner) {
  for (; memory.size() >= block_bytes; memory = memory.subspan(block_bytes)) blocks.push_back(memory.data());
  owners.push_back(std::move(owner));
}

ShardWriter::ShardWriter(std::vector<ShardToWrite> shards, Staging staging, uint64_t piece_bytes)
    : shards_(std::move(shards)), staging_(std::move(staging)), piece_bytes_(piece_bytes), free_(staging_.blocks) {
  for (const ShardToWrite &shard : shards_)
    total_bytes_ += shard.file.header.data_offset + shard.file.header.data_bytes();
}

void ShardWriter::fail_with(const Error &error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!finished_) failure_.set(error);
  }
  changed_.notify_all();
}

void ShardWriter::give_up(fsdp_status status, const char *why) noexcept {
  try {
    fail_with(Error(status, why));
  } catch (...) {  // no memory for the text
    fail_with(Error(status, {}));
  }
}

// Runs the body of a thread; an exception ends both threads.
template <class Body>
void ShardWriter::attempt(Body body) noexcept {
  if (const auto failure = capture_error(body)) fail_with(*failure);
}

std::vector<WrittenShard> ShardWriter::result() const {
  failure_.check();
  const std::lock_guard lock(mutex_);
  return written_;
}

// ---- the packing thread ----

void ShardWriter::pack(const std::function<void()> &poll) noexcept {
  attempt([&] {
    for (size_t i = 0; i < shards_.size(); ++i) pack_shard(i, poll);
  });
  {
    const std::lock_guard lock(mutex_);
    packed_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void ShardWriter::await_packed(std::chrono::milliseconds longest) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, longest, [&] { return is_packed(); });
}

void ShardWriter::pack_shard(size_t number, const std::function<void()> &poll) {
  ShardToWrite &shard = shards_[number];
  SafetensorsHeader &header = shard.file.header;
  BlockSums sums;
  for (uint64_t at = 0; at < header.data_bytes(); at += Staging::block_bytes) {
    std::byte *const data = take_free(poll);
    if (!data) return;
    const uint64_t bytes = std::min(Staging::block_bytes, header.data_bytes() - at);
    for (uint64_t done = 0; done < bytes; done += piece_bytes_) {
      const std::span<std::byte> piece(data + done, std::min(piece_bytes_, bytes - done));
      fill(shard, at + done, piece);
      sums.add(piece);
    }
    std::memset(data + bytes, 0, round_up(bytes, io_alignment) - bytes);
    hand_over({number, header.data_offset + at, bytes, data, {}});
  }
  hand_over({number, 0, 0, nullptr, write_shard_header(header, sums.finish())});
}

// Fills the block with the data bytes from `at` on, which may belong to several tensors.
void ShardWriter::fill(const ShardToWrite &shard, uint64_t at, std::span<std::byte> block) const {
  const std::vector<StoredTensor> &tensors = shard.file.header.tensors;
  auto tensor = std::ranges::upper_bound(tensors, at, {}, &StoredTensor::end);
  while (!block.empty()) {
    const size_t some = std::min<uint64_t>(block.size(), tensor->end - at);
    if (some) shard.rows[static_cast<size_t>(tensor - tensors.begin())](at - tensor->begin, block.first(some));
    block = block.subspan(some);
    at += some;
    ++tensor;
  }
}

std::byte *ShardWriter::take_free(const std::function<void()> &poll) {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, poll_period, [&] { return failure_.failed() || !free_.empty(); })) {
    lock.unlock();
    poll();
    lock.lock();
  }
  if (failure_.failed()) return nullptr;
  std::byte *const block = free_.back();
  free_.pop_back();
  return block;
}

void ShardWriter::hand_over(Block block) {
  {
    const std::lock_guard lock(mutex_);
    full_.push_back(std::move(block));
  }
  changed_.notify_all();
}

// ---- the writing thread ----

void ShardWriter::write() noexcept {
  attempt([&] { write_shards(); });
  {
    const std::lock_guard lock(mutex_);
    finished_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void ShardWriter::await_written(std::chrono::milliseconds longest) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, longest, [&] { return is_written(); });
}

void ShardWriter::write_shards() {
  for (const ShardToWrite &shard : shards_) {
    if (failure_.failed()) return;
    OutFile file(shard.folder.get(), shard.name, shard.shown);
    while (true) {
      const std::optional<Block> block = take_full();
      if (!block) return;
      if (!block->header.empty()) {
        const AlignedBytes header(block->header.size());
        std::memcpy(header.bytes().data(), block->header.data(), block->header.size());
        file.write(0, header.bytes());
        const uint64_t bytes = block->header.size() + shard.file.header.data_bytes();
        file.finish(bytes);
        const std::lock_guard lock(mutex_);
        written_.push_back({bytes, long_sum_of(block->header)});
        written_bytes_ += block->header.size();
        break;
      }
      file.write(block->offset, {block->data, round_up(block->bytes, io_alignment)});
      written_bytes_ += block->bytes;
      give_back(block->data);
    }
  }
}

std::optional<ShardWriter::Block> ShardWriter::take_full() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_.failed() || !full_.empty(); });
  if (failure_.failed()) return std::nullopt;
  Block block = std::move(full_.front());
  full_.pop_front();
  return block;
}

void ShardWriter::give_back(std::byte *block) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(block);
  }
  changed_.notify_all();
}

}  // namespace fsdp::checkpoint
