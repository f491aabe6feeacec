// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/files/shard_reader.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>

#include "base/library_thread.h"
#include "base/text.h"
#include "checkpoint/format/json_document.h"
#include "checkpoint/format/shard_file.h"

namespace fsdp::checkpoint {
namespace {

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

std::string read_header_bytes(const InFile &file) {
  const AlignedBytes first(io_alignment);
  const uint64_t some = std::min<uint64_t>(file.bytes(), length_bytes);
  std::array<std::byte, length_bytes> length{};
  std::ranges::copy(file.read(0, some, first.bytes()), length.begin());
  const uint64_t bytes = length_bytes + read_header_length(length, file.bytes(), file.shown());
  const AlignedBytes buffer(InFile::needed_for(0, bytes));
  return std::string(text_of(file.read(0, bytes, buffer.bytes())));
}

}  // namespace

ShardReader::ShardReader(int folder, const std::string &name, std::string shown, LinkPolicy links)
    : file_(folder, name, std::move(shown), links) {
  const std::string bytes = read_header_bytes(file_);
  header_ = parse_header(std::string_view(bytes).substr(length_bytes), file_.bytes(), file_.shown());
  header_sum_ = long_sum_of(bytes);
  offsets_ = saved_offsets(header_, file_.shown());
  sums_ = read_sums(header_, file_.shown());
}

// The error names the tensors of a damaged block, because users want to know them.
void ShardReader::refuse_block(const ByteRange &block) const {
  std::string names;
  for (const StoredTensor &tensor : header_.tensors)
    if (tensor.begin < block.end && block.begin < tensor.end)
      names += (names.empty() ? "" : ", ") + quote_json(tensor.name);
  refuse_file(file_.shown(), "bytes {} to {}, of {}, are not what was written there", header_.data_offset + block.begin,
              header_.data_offset + block.end, names);
}

// Reads at most a chunk, from the beginning of a block to the end of a block.
std::span<const std::byte> ShardReader::read_blocks(const ByteRange &range, std::span<std::byte> buffer) const {
  const auto bytes = file_.read(header_.data_offset + range.begin, range.end - range.begin, buffer);
  check_sums(range, bytes);
  return bytes;
}

void ShardReader::check_sums(const ByteRange &range, std::span<const std::byte> bytes) const {
  for (uint64_t at = range.begin; !sums_.empty() && at < range.end; at += block_bytes) {
    const uint64_t end = std::min(at + block_bytes, range.end);
    if (sum_of(bytes.subspan(at - range.begin, end - at)) != sums_[at / block_bytes]) refuse_block({at, end});
  }
}

uint64_t ShardReader::verify(std::span<std::byte> buffer, const std::function<void(const Error &)> &damaged,
                             const std::function<void(uint64_t bytes)> &passed) const {
  const uint64_t bytes = header_.data_bytes();
  for (uint64_t at = 0; at < bytes; at += chunk_bytes) {
    const ByteRange chunk{at, std::min(at + chunk_bytes, bytes)};
    verify_chunk(chunk, buffer, damaged);
    if (passed) passed(chunk.end - chunk.begin);
  }
  return bytes;
}

// Blocks are verified one by one only if the chunk has a damaged block.
void ShardReader::verify_chunk(const ByteRange &chunk, std::span<std::byte> buffer,
                               const std::function<void(const Error &)> &damaged) const {
  try {
    read_blocks(chunk, buffer);
    return;
  } catch (const Error &) {
    if (!damaged) throw;
  }
  for (uint64_t at = chunk.begin; at < chunk.end; at += block_bytes) try {
      read_blocks({at, std::min(at + block_bytes, chunk.end)}, buffer);
    } catch (const Error &error) {
      damaged(error);
    }
}

// Reads the chunks that runs need, in the file's order. A thread reads the next chunk into the other half of the buffer
// while the caller verifies and takes the current one, so the disk and the processor work at the same time.
class ShardReader::ReadAhead {
 public:
  ReadAhead(const ShardReader &reader, const WantedRuns &runs, std::span<std::byte> buffer)
      : reader_(reader), buffer_(buffer) {
    for (const ByteRange &range : blocks_of(runs, block_bytes, reader.header_.data_bytes()))
      for (uint64_t at = range.begin; at < range.end; at += chunk_bytes)
        chunks_.push_back({at, std::min(at + chunk_bytes, range.end)});
    if (chunks_.size() < 2) return;
    thread_ = LibraryThread{"fsdp-load", "a load"}.start(run, this);
  }
  ~ReadAhead() {
    if (!thread_) return;
    {
      const std::lock_guard lock(mutex_);
      taken_ = chunks_.size() + 1;  // as if all chunks were taken, so that the thread ends
      ends_ = true;
    }
    changed_.notify_all();
    pthread_join(*thread_, nullptr);
  }
  ReadAhead(const ReadAhead &) = delete;
  ReadAhead &operator=(const ReadAhead &) = delete;

  // Returns the bytes from `at` to `end` or the end of a block. The caller takes them while summing has left them in
  // the cache.
  std::span<const std::byte> get(uint64_t at, uint64_t end) {
    while (at >= now_.end) move_on();
    while (at >= block_.end) check_next_block();
    return bytes_.subspan(at - now_.begin, std::min(end, block_.end) - at);
  }
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  std::span<const std::byte> read(size_t number) const {
    const ByteRange &chunk = chunks_[number];
    return reader_.file_.read(reader_.header_.data_offset + chunk.begin, chunk.end - chunk.begin,
                              buffer_.subspan(number % 2 * half_bytes, half_bytes));
  }
  static void *run(void *self) {
    static_cast<ReadAhead *>(self)->read_all();
    return nullptr;
  }
  // Reads at most one chunk ahead of the caller's chunk.
  void read_all() noexcept {
    for (size_t number = 0; number < chunks_.size(); ++number) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return number <= taken_ + 1; });
      if (ends_) return;
      lock.unlock();
      std::span<const std::byte> bytes;
      std::exception_ptr failure;
      try {
        bytes = read(number);
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      halves_[number % 2] = bytes, failure_ = failure, read_ = number + 1;
      changed_.notify_all();
      if (failure) return;
    }
  }
  void move_on() {
    const size_t number = next_++;
    now_ = chunks_[number];
    if (thread_) {
      std::unique_lock lock(mutex_);
      taken_ = number;  // the caller has finished with all earlier chunks
      changed_.notify_all();
      changed_.wait(lock, [&] { return read_ > number || failure_; });
      if (read_ <= number || (failure_ && read_ == number + 1)) std::rethrow_exception(failure_);
      bytes_ = halves_[number % 2];
    } else {
      bytes_ = read(number);
    }
    block_ = {now_.begin, now_.begin};
    bytes_read_ += bytes_.size();
  }
  void check_next_block() {
    block_ = {block_.end, std::min(block_.end + block_bytes, now_.end)};
    reader_.check_sums(block_, bytes_.subspan(block_.begin - now_.begin, block_.end - block_.begin));
  }

  const ShardReader &reader_;
  std::span<std::byte> buffer_;
  std::vector<ByteRange> chunks_;
  size_t next_ = 0;
  ByteRange now_{0, 0}, block_{0, 0};  // the caller's chunk, and the current block of the chunk
  std::span<const std::byte> bytes_;
  uint64_t bytes_read_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  size_t taken_ = 0, read_ = 0;  // the number of the caller's chunk, and how many chunks have been read
  std::array<std::span<const std::byte>, 2> halves_;
  std::exception_ptr failure_;
  bool ends_ = false;
  std::optional<pthread_t> thread_;
};

void ShardReader::check_has(const WantedBox &wanted) const {
  const StoredTensor &tensor = header_.tensors[wanted.tensor];
  const Box stored{offsets_[wanted.tensor], tensor.shape};
  if (wanted.box.shape.size() == stored.shape.size() && intersect(wanted.box, stored) == wanted.box) return;
  refuse_file(file_.shown(), "tensor {} is [{}] from [{}] on here, and [{}] from [{}] on are wanted",
              quote_json(tensor.name), fmt::join(stored.shape, ", "), fmt::join(stored.offset, ", "),
              fmt::join(wanted.box.shape, ", "), fmt::join(wanted.box.offset, ", "));
}

// Checks that runs never go backwards, because a damaged manifest may say that the same rows are in two parts of a
// tensor.
void ShardReader::check_order(const WantedRuns &runs) const {
  uint64_t end = 0;
  runs.for_each([&](const WantedRun &run) {
    if (run.begin < end)
      refuse_file(file_.shown(), "its bytes from {} on are wanted twice, or after others behind them",
                  header_.data_offset + run.begin);
    end = run.end;
  });
}

// In files of other programs an element may be in two chunks. Its first bytes are kept until the second chunk is read.
ShardReader::Counts ShardReader::read(std::span<const WantedBox> wanted, std::span<std::byte> buffer,
                                      const TakeElements &take) const {
  for (const WantedBox &box : wanted) check_has(box);
  const WantedRuns runs(header_, offsets_, wanted);
  check_order(runs);
  ReadAhead chunk(*this, runs, buffer);
  runs.for_each([&](const WantedRun &run) {
    const uint32_t element = header_.tensors[wanted[run.wanted].tensor].type->bits / 8;
    std::array<std::byte, 8> cut;
    uint64_t in_cut = 0, to = run.to;
    for (uint64_t at = run.begin; at < run.end;) {
      auto some = chunk.get(at, in_cut ? at + element - in_cut : run.end);
      at += some.size();
      const uint64_t whole = in_cut ? 0 : some.size() / element * element;
      if (whole) take(run.wanted, to, some.first(whole)), to += whole / element;
      some = some.subspan(whole);
      std::ranges::copy(some, cut.begin() + static_cast<ptrdiff_t>(in_cut));
      in_cut += some.size();
      if (in_cut == element) take(run.wanted, to++, std::span(cut).first(element)), in_cut = 0;
    }
  });
  return {runs.bytes(), chunk.bytes_read()};
}

}  // namespace fsdp::checkpoint
