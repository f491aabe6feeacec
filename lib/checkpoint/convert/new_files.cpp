// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/convert/new_files.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/checked.h"
#include "base/library_thread.h"
#include "checkpoint/format/block_sums.h"

namespace fsdp::checkpoint {
namespace {

// Each has its folder open.
constexpr size_t files_at_once = 64;

// The disk's side.
class WriterThread {
 public:
  explicit WriterThread(ShardWriter &writer) : writer_(writer) {
    const BlockedSignals blocked;
    thread_ = std::thread([this] { writer_.write(); });
  }
  ~WriterThread() {
    writer_.give_up(FSDP_ABORTED, "the writing was given up");  // changes nothing where it is complete
    thread_.join();
  }
  WriterThread(const WriterThread &) = delete;
  WriterThread &operator=(const WriterThread &) = delete;

 private:
  ShardWriter &writer_;
  std::thread thread_;
};

ShardFile plan_file(const NewFile &file) {
  std::vector<ShardTensor> parts;
  for (const NewTensor *tensor : file.tensors) parts.push_back({tensor->name, tensor->type, whole(tensor->shape)});
  ShardFile planned = plan_shard_file(parts);
  if (file.as_shard) return planned;
  planned.header.metadata = {{"format", "pt"}};
  write_shard_header(planned.header, std::vector<uint64_t>(block_count(planned.header.data_bytes())));
  return planned;
}

class FilesWriter {
 public:
  FilesWriter(const NewCheckpoint &folder, const std::vector<NewFile> &files, NewTensorReader &reader,
              const Progress &progress)
      : folder_(folder), reader_(reader), progress_(progress) {
    for (const NewFile &file : files) {
      planned_.push_back(plan_file(file));
      const SafetensorsHeader &header = planned_.back().header;
      all_ = checked_add(all_, header.data_offset + header.data_bytes(), "bytes of all files");
    }
  }

  void write(const NewFile *first, size_t count, size_t number) {
    std::vector<ShardToWrite> shards;
    for (size_t i = 0; i < count; ++i) shards.push_back(shard_of(first[i], std::move(planned_[number + i])));
    ShardWriter writer(std::move(shards), Staging::allocate());
    const auto poll = [&] { progress_(done_ + writer.bytes_written(), all_); };
    poll_ = poll;
    {
      const WriterThread thread(writer);
      writer.pack(poll);
      while (!writer.is_written()) {
        poll();
        writer.await_written(std::chrono::milliseconds(20));
      }
    }
    std::ranges::move(writer.result(), std::back_inserter(written));
    done_ += writer.bytes_in_all();
    progress_(done_, all_);
  }

  std::vector<WrittenShard> written;

 private:
  ShardToWrite shard_of(const NewFile &file, ShardFile planned) {
    ShardToWrite shard{folder_.make_folder(""), file.name, folder_.shown(file.name), std::move(planned), {}};
    for (const uint32_t index : shard.file.order)
      shard.rows.push_back([this, tensor = file.tensors[index]](uint64_t at, std::span<std::byte> to) {
        poll_();
        reader_.read(*tensor, at, to);
      });
    return shard;
  }

  const NewCheckpoint &folder_;
  NewTensorReader &reader_;
  const Progress &progress_;
  std::vector<ShardFile> planned_;
  std::function<void()> poll_;
  uint64_t done_ = 0, all_ = 0;
};

}  // namespace

std::vector<WrittenShard> write_new_files(const NewCheckpoint &folder, const std::vector<NewFile> &files,
                                          NewTensorReader &reader, const Progress &progress) {
  FilesWriter writer(folder, files, reader, progress);
  for (size_t at = 0; at < files.size(); at += files_at_once)
    writer.write(files.data() + at, std::min(files_at_once, files.size() - at), at);
  return std::move(writer.written);
}

uint64_t data_bytes_of(const NewTensor &tensor) {
  return stored_bytes(*tensor.type, whole(tensor.shape).count()).value_or(0);
}

}  // namespace fsdp::checkpoint
