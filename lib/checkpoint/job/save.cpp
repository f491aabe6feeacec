// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/save.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include "base/checked.h"
#include "base/library_thread.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/files/shard_writer.h"
#include "comm/together.h"

namespace fsdp::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t files_in_folder = 1024;

// What the first rank tells of the checkpoint that it has begun.
struct Beginning {
  char id[40] = {};
  uint64_t sequence = 0;
};

// What each rank tells of the files that it has written; without a sum it has none of the kind.
struct WrittenFiles {
  struct One {
    uint64_t bytes = 0;
    char header_sum[40] = {};
  };
  One kinds[shard_kinds];
};

// How far a rank's writing is, as ranks tell each other while any of them is at it.
enum class Way : uint8_t { writing, done, failed };

// The disk's side of a save, while the calling thread copies.
class WritingThread {
 public:
  // patience: how long it is waited for when it is given up; peers wait for this rank meanwhile.
  WritingThread(std::shared_ptr<ShardWriter> writer, std::chrono::milliseconds patience)
      : writer_(std::move(writer)), patience_(patience) {
    auto kept = std::make_unique<std::shared_ptr<ShardWriter>>(writer_);
    thread_ = LibraryThread{"fsdp-save", "a save"}.start(run, kept.get());
    kept.release();  // the thread's own
  }
  // A thread that a dead disk holds is left alone: it owns what it works on, and ends when the disk lets it go.
  ~WritingThread() {
    writer_->give_up(FSDP_ABORTED, "the save was given up");  // changes nothing where it is complete
    writer_->await_written(patience_);
    if (writer_->is_written())
      pthread_join(thread_, nullptr);
    else
      pthread_detach(thread_);
  }
  WritingThread(const WritingThread &) = delete;
  WritingThread &operator=(const WritingThread &) = delete;

 private:
  static void *run(void *kept) {
    const std::unique_ptr<std::shared_ptr<ShardWriter>> writer(static_cast<std::shared_ptr<ShardWriter> *>(kept));
    (*writer)->write();
    return nullptr;
  }
  std::shared_ptr<ShardWriter> writer_;
  std::chrono::milliseconds patience_;
  pthread_t thread_;
};

// One save, on this rank.
class Saving {
 public:
  Saving(comm::Team &team, const Waiter &waiter, const std::string &path, const SavedModel &model,
         const SaveChoice &choice)
      : team_(team), waiter_(waiter), path_(path), model_(model), choice_(choice) {}

  SaveResult run() {
    comm::agree_on(team_, "what is saved", said());
    begin();
    join();
    write();
    const std::vector<WrittenFiles> all = tell();
    comm::attempt_together(team_, "a save's commit", [&] {
      if (first()) commit(all);
    });
    return result_;
  }

 private:
  bool first() const { return team_.rank() == 0; }
  std::string said() const;
  void begin();
  void join();
  void write();
  void write_files();
  void look_after(const ShardWriter &writer);
  Way meet(Way mine);
  std::chrono::milliseconds between_meetings() const {
    return std::chrono::milliseconds(std::min<uint32_t>(1000, waiter_.timeout_ms() / 4));
  }
  ShardToWrite shard_of(ShardKind kind, const std::vector<const KeptTensor *> &tensors);
  std::vector<WrittenFiles> tell();
  void commit(const std::vector<WrittenFiles> &all);
  void remove_older() noexcept;
  std::string folder_of(ShardKind kind, uint32_t place) const;
  static Manifest describe(const SavedModel &model, uint32_t ranks, uint64_t sequence);

  comm::Team &team_;
  const Waiter &waiter_;
  const std::string &path_;
  const SavedModel &model_;
  const SaveChoice &choice_;
  std::optional<Folder> folder_;
  std::optional<NewCheckpoint> made_;
  bool gave_up_ = false;           // a rank's part has failed
  std::optional<Error> lost_;      // ranks cannot meet any more
  Clock::time_point met_, moved_;  // when ranks met last, and when this one's disk took something
  uint64_t written_so_far_ = 0;
  Beginning beginning_;
  WrittenFiles written_;
  SaveResult result_;
};

// All of it must be the same, or ranks would write parts of different checkpoints.
std::string Saving::said() const {
  return format_text("step {}, layout {:016x}, replace {}, keep {}", model_.step, model_.described.layout_hash,
                     choice_.replace, choice_.keep);
}

void Saving::begin() {
  comm::attempt_together(team_, "a save's folder", [&] {
    if (model_.shards.ranks() != team_.size())
      fail(FSDP_INVALID_ARGUMENT, "the model is of {} ranks, and {} save it", model_.shards.ranks(), team_.size());
    if (!first()) return;
    folder_ = Folder::make(path_);
    folder_->remove_leftovers();
    const std::vector<FolderEntry> there = folder_->list();
    // The commit would find it, too, after all the writing.
    if (!choice_.replace && folder_->has(step_name(model_.step)))
      fail(FSDP_INVALID_STATE, "{}: there is a checkpoint of that name already",
           folder_->shown(step_name(model_.step)));
    beginning_.sequence =
        there.empty() ? 1 : checked_add(there.front().manifest.sequence, 1, "a checkpoint's sequence");
    made_.emplace(*folder_);
    std::strncpy(beginning_.id, made_->id().c_str(), sizeof beginning_.id - 1);
  });
  std::vector<Beginning> all(team_.size());
  team_.exchange_fixed(&beginning_, sizeof beginning_, all.data(), "a save's name");
  beginning_ = all[0];
  result_.name = step_name(model_.step);
}

// Names come late where another host has made them.
void Saving::join() {
  comm::attempt_together(team_, "a save's folder, seen by all", [&] {
    if (first()) return;
    const auto start = Clock::now();
    const auto waited = [&] { return Clock::now() - start; };
    const std::chrono::milliseconds patience(choice_.patience_ms);
    while (!folder_) try {
        folder_ = Folder(path_);
      } catch (const Error &error) {
        if (error.origin_code != ENOENT || waited() >= patience) throw;
        waiter_.poll();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    made_.emplace(*folder_, beginning_.id, choice_.patience_ms, [&] { waiter_.poll(); });
  });
}

ShardToWrite Saving::shard_of(ShardKind kind, const std::vector<const KeptTensor *> &tensors) {
  std::vector<ShardTensor> parts;
  for (const KeptTensor *tensor : tensors)
    parts.push_back(
        {tensor->name, tensor->type, ModelShards::box_of(*tensor, model_.shards.rows(*tensor, team_.rank()))});
  const std::string folder = folder_of(kind, team_.rank());
  const std::string name = shard_name(team_.world_rank(team_.rank()));
  ShardToWrite shard{made_->make_folder(folder),
                     name,
                     made_->shown(folder.empty() ? name : folder + "/" + name),
                     plan_shard_file(parts),
                     {}};
  for (const uint32_t index : shard.file.order) {
    const KeptTensor &tensor = *tensors[index];
    // What it writes begins behind what other holders of its rows write.
    const RowRange kept = model_.shards.kept_rows(tensor, team_.rank()), own = model_.shards.rows(tensor, team_.rank());
    const uint64_t row = *stored_bytes(*tensor.type, ModelShards::box_of(tensor, own).count()) / own.count;
    shard.rows.push_back(
        [this, &tensor, skipped = (own.first - kept.first) * row](uint64_t at, std::span<std::byte> to) {
          waiter_.poll();
          model_.read(tensor, skipped + at, to);
        });
  }
  return shard;
}

// A rank that is slower than others is waited for, however long: all meet while one of them is still writing.
void Saving::write() {
  std::optional<Error> failure;
  try {
    write_files();
  } catch (const Error &error) {
    if (!gave_up_) failure = error;  // else a peer has the reason
  } catch (const std::exception &) {
    failure.emplace(FSDP_OUT_OF_MEMORY, "no memory to save");
  }
  if (lost_) throw *lost_;
  while (meet(failure ? Way::failed : Way::done) == Way::writing) {
  }
  comm::attempt_together(team_, "a save's files", [&] {
    if (failure) throw *failure;
  });
}

// What the slowest rank is at; failed where one is, and then nobody need go on.
Way Saving::meet(Way mine) {
  std::vector<Way> all(team_.size());
  try {
    team_.exchange_fixed(&mine, sizeof mine, all.data(), "a save under way");
  } catch (const Error &error) {
    lost_ = error;
    throw;
  }
  met_ = Clock::now();
  gave_up_ = gave_up_ || std::ranges::find(all, Way::failed) != all.end();
  return std::ranges::find(all, Way::writing) != all.end() ? Way::writing : Way::done;
}

// Called while the disk is at work.
void Saving::look_after(const ShardWriter &writer) {
  waiter_.poll();
  const std::chrono::milliseconds patience(waiter_.timeout_ms());
  const auto now = Clock::now();
  if (const uint64_t bytes = writer.bytes_written(); bytes != written_so_far_) written_so_far_ = bytes, moved_ = now;
  if (now - moved_ > patience)
    throw Error(FSDP_SYSTEM,
                format_text("{}: the disk has taken nothing for {} ms", made_->shown("."), waiter_.timeout_ms()), -1,
                FSDP_ORIGIN_OS, ETIMEDOUT);
  if (now - met_ > between_meetings()) meet(Way::writing);
  if (gave_up_) fail(FSDP_ABORTED, "another rank's part of this save has failed");
}

void Saving::write_files() {
  std::vector<ShardToWrite> shards;
  std::vector<size_t> kinds;
  for (const ShardKind kind : {ShardKind::weights, ShardKind::optimizer}) {
    const std::vector<const KeptTensor *> tensors = model_.shards.written_by(team_.rank(), kind);
    if (tensors.empty()) continue;
    shards.push_back(shard_of(kind, tensors));
    kinds.push_back(static_cast<size_t>(kind));
  }
  met_ = moved_ = Clock::now();
  const auto writer = std::make_shared<ShardWriter>(std::move(shards));
  {
    const WritingThread thread(writer, between_meetings());
    const auto poll = [&] { look_after(*writer); };
    writer->pack(poll);
    while (!writer->is_written()) {
      poll();
      writer->await_written(std::chrono::milliseconds(20));
    }
  }
  const std::vector<WrittenShard> files = writer->result();
  for (size_t i = 0; i < files.size(); ++i) {
    WrittenFiles::One &one = written_.kinds[kinds[i]];
    one.bytes = files[i].bytes;
    std::strncpy(one.header_sum, files[i].header_sum.c_str(), sizeof one.header_sum - 1);
    result_.bytes += one.bytes;
  }
}

std::vector<WrittenFiles> Saving::tell() {
  std::vector<WrittenFiles> all(team_.size());
  team_.exchange_fixed(&written_, sizeof written_, all.data(), "a save's sums");
  return all;
}

// Weights lie where PyTorch looks for them.
std::string Saving::folder_of(ShardKind kind, uint32_t rank) const {
  if (kind == ShardKind::weights) return "";
  return format_text("optimizer/{:04}", rank / files_in_folder);
}

Manifest Saving::describe(const SavedModel &model, uint32_t ranks, uint64_t sequence) {
  Manifest manifest;
  manifest.sequence = sequence;
  manifest.step = model.step;
  manifest.ranks = ranks;
  manifest.models = {model.described};
  manifest.keys = model.keys;
  return manifest;
}

void Saving::commit(const std::vector<WrittenFiles> &all) {
  Manifest manifest = describe(model_, team_.size(), beginning_.sequence);
  for (const ShardKind kind : {ShardKind::weights, ShardKind::optimizer}) {
    auto tensors = model_.shards.manifest_tensors(kind, static_cast<uint32_t>(manifest.files.size()));
    std::ranges::move(tensors, std::back_inserter(manifest.tensors));
    for (const uint32_t rank : model_.shards.writers(kind)) {
      const WrittenFiles::One &one = all[rank].kinds[static_cast<size_t>(kind)];
      const std::string folder = folder_of(kind, rank), name = shard_name(team_.world_rank(rank));
      manifest.files.push_back({folder.empty() ? name : folder + "/" + name, one.bytes, one.header_sum});
    }
  }
  const std::string text = write_manifest(manifest);
  parse_manifest(text, made_->shown(manifest_name));  // nobody could load what it refuses: names that come twice
  made_->commit(result_.name, text, choice_.replace);
  remove_older();
}

// The checkpoint is there: what goes wrong now does not change that.
void Saving::remove_older() noexcept {
  if (choice_.keep == 0) return;
  try {
    const std::vector<FolderEntry> there = folder_->list();
    for (size_t i = choice_.keep; i < there.size(); ++i)
      if (std::ranges::find(choice_.spared, there[i].name) == choice_.spared.end()) folder_->remove(there[i].name);
  } catch (const std::exception &error) {
    result_.warning = error.what();
  }
}

}  // namespace

SaveResult save(comm::Team &team, const Waiter &waiter, const std::string &folder, const SavedModel &model,
                const SaveChoice &choice) {
  return Saving(team, waiter, folder, model, choice).run();
}

}  // namespace fsdp::checkpoint
