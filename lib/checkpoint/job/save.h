// SPDX-License-Identifier: Apache-2.0
// All ranks save the rows that they keep to a folder as one checkpoint, and train on during the save. The checkpoint
// appears when it is complete, or not at all.
//
//   callers        agree on what is saved; the first rank makes .tmp-ID, and all ranks see it; then they go on
//   "fsdp-save"    copies and sums the rows that this rank keeps, block by block; then it posts its progress
//                  (SaveReport), and on the first rank it waits for all reports before anything gets a name
//   "fsdp-disk"    writes the blocks; on the first rank it then writes the manifest and names the checkpoint
//
// If a rank fails, all ranks learn its error, and nothing of the checkpoint is left. If a rank dies before all ranks
// have written, the save fails on the others; a later death changes nothing. The next save removes leftovers of an
// earlier job.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/failure.h"
#include "checkpoint/files/shard_writer.h"
#include "checkpoint/plan/save_plan.h"
#include "transport/team.h"

namespace fsdp::checkpoint {

// Objects of the rank that a save uses. All of them must outlive the save.
struct SaveRanks {
  transport::Team &team;
  transport::World &world;
  const Waiter &waiter;  // the caller's waiter
};

struct SaveChoice {
  bool replace = false;                  // replace an existing checkpoint of this step
  bool commit_manifest = false;          // the checkpoint has its name from the start; not with `replace`
  uint32_t keep = 0;                     // number of the newest checkpoints that stay in the folder; 0: all
  uint32_t patience_ms = 30'000;         // time for other hosts to see the folder that the first rank made
  std::vector<std::string> spared = {};  // checkpoints of the folder that `keep` does not remove
};

// A rank's order to save.
struct SaveOrder {
  std::string folder;
  uint64_t step = 0;
  std::vector<SavedModel> models = {};
  std::vector<SavedBytes> bytes = {};
  std::map<std::string, std::string> keys = {};  // keys are stored as they are
  SaveChoice choice = {};
  Staging staging = {};  // without blocks the save allocates its own staging
  uint64_t piece_bytes = ShardWriter::cached_bytes;
};

struct SaveResult {
  std::string name;     // the checkpoint's name in the folder
  uint64_t bytes = 0;   // bytes that this rank has written
  std::string warning;  // on the first rank: older checkpoints that could not be removed; empty: none
};
struct SaveProgress {
  uint64_t bytes = 0, bytes_in_all = 0;  // written bytes, and total bytes, of this rank's files
  bool packed = false;                   // everything is copied, or never will be, so the memory may change
  bool ended = false;
};
// A save that is under way. Only functions that are marked as collective wait for other ranks.
class Save {
 public:
  // Collective over the team. Throws on all ranks, and names the rank and the file. SYSTEM: an error of a file.
  // INVALID_STATE: a checkpoint of this step exists and must not be replaced. MISMATCH: ranks save different steps or
  // choices. INVALID_ARGUMENT: names come twice.
  Save(const SaveRanks &ranks, SaveOrder order);
  // Gives the save up if it has not been committed.
  ~Save();
  Save(const Save &) = delete;
  Save &operator=(const Save &) = delete;

  const std::string &name() const noexcept;  // the checkpoint's name in the folder
  SaveProgress progress() const noexcept;
  void await_packed(std::chrono::milliseconds longest) const;
  void await_end(std::chrono::milliseconds longest) const;
  // Called after the save's end. The result is the same on all ranks, except for the bytes. If there is no checkpoint,
  // throws an error like the constructor, UNSUPPORTED if the file system cannot exchange two names, or the error that
  // ended the job or this save.
  SaveResult result() const;
  // Makes the save end soon, unless it is being committed. Any thread may call it. Has no effect after the save's end.
  void give_up(fsdp_status status, const char *why) noexcept;

 private:
  class Keeper;
  std::unique_ptr<Keeper> keeper_;
};

// Saves in one call, which returns when the save has ended.
SaveResult save(const SaveRanks &ranks, SaveOrder order);

}  // namespace fsdp::checkpoint
