// SPDX-License-Identifier: Apache-2.0
// Brings a rank's part of a checkpoint to the disk. One thread copies it, block by block, out of where it lives, and
// sums it; another writes the blocks that are full. So the memory that is copied may change as soon as the first thread
// is through, however slow the disk is.
//
//   where it lives --packing thread--> a block of four --writing thread--> file          header: last, since it has the
//   sums
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/failure.h"
#include "base/fd.h"
#include "checkpoint/files/file.h"
#include "checkpoint/format/shard_file.h"

namespace fsdp::checkpoint {

// Bytes [first, first + to.size()) of a tensor's rows. Called on the packing thread, in rising order, each byte once.
using ReadRows = std::function<void(uint64_t first, std::span<std::byte> to)>;

struct ShardToWrite {
  Fd folder;
  std::string name;   // in it
  std::string shown;  // for messages
  ShardFile file;
  std::vector<ReadRows> rows;  // of the header's tensors, in their order
};

// Of a file that is on the disk.
struct WrittenShard {
  uint64_t bytes = 0;
  std::string header_sum;
};

// Memory that full blocks wait in for the disk: the more of it, the sooner everything has been copied.
struct Staging {
  static constexpr uint64_t block_bytes = uint64_t{8} << 20;
  // So that copying and writing overlap.
  static constexpr size_t least_blocks = 4;
  static constexpr uint64_t least_bytes = least_blocks * block_bytes;

  std::vector<std::byte *> blocks;            // where direct I/O wants them
  std::vector<std::shared_ptr<void>> owners;  // keep them

  // least_bytes of its own.
  static Staging allocate();
  // As many blocks as fit.
  void add(std::span<std::byte> memory, std::shared_ptr<void> owner);
};

class ShardWriter {
 public:
  // What is copied at once is summed while it is in the cache.
  static constexpr uint64_t cached_bytes = uint64_t{256} << 10;
  // shards: at least one. piece_bytes: how much is asked of ReadRows at once.
  ShardWriter(std::vector<ShardToWrite> shards, Staging staging, uint64_t piece_bytes = cached_bytes);

  // Each is the body of a thread, and returns when its work is done or given up. The first error ends both. `poll` is
  // called about every 20 ms while the disk is behind, and throws what ends the packing.
  void pack(const std::function<void()> &poll) noexcept;
  void write() noexcept;
  // From any thread: both return soon, though not before a call into the file system that they are in does. Changes
  // nothing once all is on the disk.
  void give_up(fsdp_status status, const char *why) noexcept;

  // All has been copied, or never will be; waits for it a while at most. Any thread.
  bool is_packed() const { return packed_.load(std::memory_order_acquire); }
  void await_packed(std::chrono::milliseconds longest);
  // All is on the disk, or never will be; as above.
  bool is_written() const { return finished_.load(std::memory_order_acquire); }
  void await_written(std::chrono::milliseconds longest);
  uint64_t bytes_written() const { return written_bytes_.load(std::memory_order_relaxed); }
  uint64_t bytes_in_all() const { return total_bytes_; }
  // After both threads have returned: the files, or why there are none.
  std::vector<WrittenShard> result() const;

 private:
  struct Block {
    size_t shard;
    uint64_t offset;  // in the file
    uint64_t bytes;   // 0: the file's data is complete
    std::byte *data;  // in the staging
    std::string header;
  };
  void fail_with(const Error &error) noexcept;
  template <class Body>
  void attempt(Body body) noexcept;
  void pack_shard(size_t number, const std::function<void()> &poll);
  void fill(const ShardToWrite &shard, uint64_t at, std::span<std::byte> block) const;
  std::byte *take_free(const std::function<void()> &poll);
  void hand_over(Block block);
  std::optional<Block> take_full();
  void give_back(std::byte *block);
  void write_shards();

  std::vector<ShardToWrite> shards_;
  Staging staging_;
  uint64_t piece_bytes_;
  uint64_t total_bytes_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Block> full_;
  std::vector<std::byte *> free_;
  Failure failure_;
  std::vector<WrittenShard> written_;
  std::atomic<bool> packed_{false}, finished_{false};
  std::atomic<uint64_t> written_bytes_{0};
};

}  // namespace fsdp::checkpoint
