// SPDX-License-Identifier: Apache-2.0
// A rank's part of a save, from the time when all ranks have seen the folder to the save's end. Its thread packs,
// watches the disk thread and reads the reports of other ranks. It never waits for the disk itself or for a caller.
#pragma once

#include <pthread.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/job/disk_thread.h"
#include "checkpoint/job/save.h"
#include "checkpoint/job/save_report.h"

namespace fsdp::checkpoint {

// One of a rank's files of a kind.
struct SavedFile {
  ShardKind kind;
  uint32_t number;
};

// The task of a rank.
struct SaveTask {
  SaveOrder order;
  std::string name;  // the name of the complete checkpoint
  std::string id;    // its id until it is complete
  std::shared_ptr<SaveFolder> folder = std::make_shared<SaveFolder>();
  std::vector<ShardToWrite> shards;
  std::vector<SavedFile> files;  // kind and number of each shard's file
  Manifest manifest;             // set on the first rank; the sizes of files are still missing
};

// Reads the size and the checksum of a written file, as a rank reports them.
ReportedFile read_reported(int checkpoint, const std::string &name, const std::string &shown);

class Save::Keeper {
 public:
  Keeper(const SaveRanks &ranks, std::unique_ptr<SaveTask> task);
  ~Keeper();
  Keeper(const Keeper &) = delete;
  Keeper &operator=(const Keeper &) = delete;

  const std::string &name() const noexcept { return result_.name; }
  SaveProgress progress() const noexcept;
  void await_packed(std::chrono::milliseconds longest) const;
  void await_end(std::chrono::milliseconds longest) const;
  SaveResult result() const;
  void give_up(fsdp_status status, const char *why) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void run() noexcept;
  // -- this rank's files --
  void write();
  void note_files();
  void watch_disk();
  // -- the other ranks --
  bool first() const { return team_.rank() == 0; }
  SaveReport read(uint32_t place) const noexcept;
  void post(SaveState state) noexcept;
  void look();
  void look_at_job();
  void pause();
  template <class Condition>
  void wait_until(Condition condition);
  // lead() does the first rank's work, follow() that of the others.
  std::optional<Error> lead(std::optional<Error> failure);
  bool written_by_all();
  void await_written_by_all();
  std::optional<Error> find_failure(std::optional<Error> failure) const;
  void await_all_let_go();
  void collect_files();
  void await_shown(uint32_t number);
  bool take_files(uint32_t place, uint32_t number, const std::map<std::string_view, ManifestFile *> &files);
  bool take_unreported(uint32_t place, uint32_t number, const std::map<std::string_view, ManifestFile *> &files);
  std::vector<ReportedFile> read_files(const std::vector<std::string> &names);
  void work_on_disk(std::function<void(SaveFolder &)> work);
  void commit();
  void remove_older();
  void await_heard();
  std::optional<Error> follow(std::optional<Error> failure);
  void show_files(uint32_t number) noexcept;
  std::optional<SaveReport> await_first(const Error &lost);
  std::optional<SaveReport> read_end() noexcept;
  void finish(std::optional<Error> failure) noexcept;

  transport::Team &team_;
  transport::World &world_;
  const std::chrono::milliseconds timeout_, patience_;
  std::unique_ptr<SaveTask> task_;
  std::shared_ptr<ShardWriter> writer_;  // NULL: this rank has no file
  std::optional<DiskThread> disk_;
  uint64_t number_ = 0;                                               // number of the save, in reports
  SaveReport report_;                                                 // this rank's report
  std::vector<std::array<ReportedFile, shard_kinds>> written_files_;  // this rank's files, by their number
  bool heard_ = false;    // on other ranks: the first rank has posted how the save ended
  uint32_t written_ = 1;  // on the first rank: the number of places that have written
  Clock::time_point looked_, looked_at_ranks_, moved_;
  uint64_t moved_bytes_ = 0;
  std::chrono::microseconds pause_{0};
  SaveResult result_;
  Failure given_up_;  // set when this rank's caller gives up the save

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<Error> failure_;
  bool packed_ = false, ended_ = false;
  SaveProgress end_;
  pthread_t thread_;
};

}  // namespace fsdp::checkpoint
