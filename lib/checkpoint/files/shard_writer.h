// SPDX-License-Identifier: Apache-2.0
// Writes a rank's part of a checkpoint to the disk. One thread copies the rank's memory block by block and sums it;
// another thread writes the full blocks. So the memory may change as soon as the first thread is done, however slow the
// disk is.
//
//   the rank's memory --packing thread--> a block of four --writing thread--> file
//
// The header is written last, because it has the checksums.
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

// Copies bytes [first, first + to.size()) of a tensor's rows to `to`. The packing thread calls it in rising order, once
// for each byte.
using ReadRows = std::function<void(uint64_t first, std::span<std::byte> to)>;

struct ShardToWrite {
  Fd folder;
  std::string name;   // name in the folder
  std::string shown;  // path for messages
  ShardFile file;
  std::vector<ReadRows> rows;  // one entry for each of the header's tensors, in their order
};
// A file that is on the disk.
struct WrittenShard {
  uint64_t bytes = 0;
  std::string header_sum;
};

// Memory for full blocks that wait for the disk. The more there is, the sooner all data is copied.
struct Staging {
  static constexpr uint64_t block_bytes = uint64_t{8} << 20;
  // With at least this many blocks, copying and writing overlap.
  static constexpr size_t least_blocks = 4;
  static constexpr uint64_t least_bytes = least_blocks * block_bytes;

  std::vector<std::byte *> blocks;            // aligned for direct I/O
  std::vector<std::shared_ptr<void>> owners;  // owners of the blocks' memory
  // Allocates least_blocks blocks.
  static Staging allocate();
  // Adds as many blocks as fit into the memory.
  void add(std::span<std::byte> memory, std::shared_ptr<void> owner);
};

class ShardWriter {
 public:
  // Pieces of this size are summed while they are in the cache.
  static constexpr uint64_t cached_bytes = uint64_t{256} << 10;
  // There must be at least one shard. `piece_bytes` is the size of a request to ReadRows.
  ShardWriter(std::vector<ShardToWrite> shards, Staging staging, uint64_t piece_bytes = cached_bytes);

  // pack() and write() are each the body of a thread, and return when their work is done or given up. The first error
  // ends both. `poll` is called about every 20 ms while pack() waits for the disk, and throws to end the packing.
  void pack(const std::function<void()> &poll) noexcept;
  void write() noexcept;
  // Makes both threads return soon, at the latest when a call into the file system returns. Any thread may call it. Has
  // no effect once everything is on the disk.
  void give_up(fsdp_status status, const char *why) noexcept;
  // Is all data copied, or will it never be? await_packed() waits for that, for at most `longest`. Any thread may call
  // both.
  bool is_packed() const { return packed_.load(std::memory_order_acquire); }
  void await_packed(std::chrono::milliseconds longest);
  // Is all data on the disk, or will it never be? await_written() waits for that.
  bool is_written() const { return finished_.load(std::memory_order_acquire); }
  void await_written(std::chrono::milliseconds longest);
  uint64_t bytes_written() const { return written_bytes_.load(std::memory_order_relaxed); }
  uint64_t bytes_in_all() const { return total_bytes_; }
  // Called after both threads have returned. Returns the files, or throws the reason why there are none.
  std::vector<WrittenShard> result() const;

 private:
  struct Block {
    size_t shard;
    uint64_t offset;  // offset in the file
    uint64_t bytes;   // 0: the file's data is complete
    std::byte *data;  // address in the staging
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
