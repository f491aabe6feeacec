// SPDX-License-Identifier: Apache-2.0
// All ranks bring what they keep to a folder as one checkpoint, which is there when it is whole, or not at all; and
// train on meanwhile.
//
//   callers        agree on what is saved; the first rank makes .tmp-ID, all see it; then they go on
//   "fsdp-save"    copies and sums what this rank keeps, block by block; then shows how far its rank is (SaveReport),
//                  and on the first rank has all reports before anything gets a name
//   "fsdp-disk"    writes the blocks; on the first rank then the manifest, and gives the checkpoint its name
//
// Where a rank fails, all learn its error, and nothing of the checkpoint is left. Where a rank dies before all have
// written, so do the others; later its death changes nothing. The next save removes what a job has left.
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

// What a save needs of its rank. All of it lives longer than the save.
struct SaveRanks {
  transport::Team &team;
  transport::World &world;
  const Waiter &waiter;  // of the caller
};

struct SaveChoice {
  bool replace = false;                  // a checkpoint of this step that is there already
  bool commit_manifest = false;          // it has its name from the start; not with replace
  uint32_t keep = 0;                     // so many of the newest stay in the folder; 0: all
  uint32_t patience_ms = 30'000;         // for other hosts to see what the first rank made
  std::vector<std::string> spared = {};  // checkpoints of the folder that stay whatever `keep` is
};

// What a rank brings.
struct SaveOrder {
  std::string folder;
  uint64_t step = 0;
  std::vector<SavedModel> models = {};
  std::vector<SavedBytes> bytes = {};
  std::map<std::string, std::string> keys = {};  // kept as they are
  SaveChoice choice = {};
  Staging staging = {};  // without blocks it gets its own
  uint64_t piece_bytes = ShardWriter::cached_bytes;
};

struct SaveResult {
  std::string name;     // of the checkpoint, in the folder
  uint64_t bytes = 0;   // that this rank has written
  std::string warning;  // the first rank's: older ones that could not be removed; empty: nothing
};

struct SaveProgress {
  uint64_t bytes = 0, bytes_in_all = 0;  // of this rank's files
  bool packed = false;                   // all was copied, or never will be: it may change
  bool ended = false;
};

// A checkpoint on its way. Only what is called collective waits for other ranks.
class Save {
 public:
  // Collective over the team. Throws on all ranks, naming the rank and the file. SYSTEM: a file. INVALID_STATE: a
  // checkpoint of this step is there and is not to be replaced. MISMATCH: ranks save different steps or choices.
  // INVALID_ARGUMENT: names that come twice.
  Save(const SaveRanks &ranks, SaveOrder order);
  // Gives up what has not been committed.
  ~Save();
  Save(const Save &) = delete;
  Save &operator=(const Save &) = delete;

  const std::string &name() const noexcept;  // the checkpoint's, in the folder
  SaveProgress progress() const noexcept;
  void await_packed(std::chrono::milliseconds longest) const;
  void await_end(std::chrono::milliseconds longest) const;
  // After its end, the same on all ranks but for the bytes. Throws why there is no checkpoint: as above; UNSUPPORTED
  // where the file system cannot exchange two names; what ended the job, or this rank's save.
  SaveResult result() const;
  // Any thread; it ends soon, unless it is being committed. Changes nothing after its end.
  void give_up(fsdp_status status, const char *why) noexcept;

 private:
  class Keeper;
  std::unique_ptr<Keeper> keeper_;
};

// From its begin to its end, in one call.
SaveResult save(const SaveRanks &ranks, SaveOrder order);

}  // namespace fsdp::checkpoint
