// SPDX-License-Identifier: Apache-2.0
// The thread of a save that touches the file system, and so may be held by a disk for as long as that likes. No other
// thread of the save is ever held: this one owns what it works on, and is left alone if it does not come back.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/files/shard_writer.h"

namespace fsdp::checkpoint {

// The folder, and the checkpoint that is made in it.
struct SaveFolder {
  std::optional<Folder> folder;
  std::optional<NewCheckpoint> made;
};

class DiskThread {
 public:
  // Writes what the writer packs from now on; a rank that writes no file has none.
  DiskThread(std::shared_ptr<SaveFolder> folder, std::shared_ptr<ShardWriter> writer);
  // Waits for it for its patience at most.
  ~DiskThread();
  DiskThread(const DiskThread &) = delete;
  DiskThread &operator=(const DiskThread &) = delete;

  // Once the writer is through: does the work; one at a time. What it throws result() throws.
  void begin(std::function<void(SaveFolder &)> work);
  bool idle() const;
  void await_idle(std::chrono::milliseconds longest) const;
  void result() const;
  // So long it is waited for when it ends.
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }

 private:
  // The thread's own, too.
  struct DiskWork {
    std::shared_ptr<SaveFolder> folder;
    std::shared_ptr<ShardWriter> writer;
    mutable std::mutex mutex;
    mutable std::condition_variable changed;
    std::function<void(SaveFolder &)> work;  // that is to be done
    bool busy = false;                       // there is work, or it is under way
    std::optional<Error> failure;            // of the last one
    bool ends = false, ended = false;
  };
  static void *run(void *kept);
  static void serve(DiskWork &state);

  std::shared_ptr<DiskWork> state_;
  std::chrono::milliseconds patience_{1000};
  pthread_t thread_;
};

}  // namespace fsdp::checkpoint
