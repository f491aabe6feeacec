// SPDX-License-Identifier: Apache-2.0
// The thread of a save that accesses the file system. A disk may block this thread for any time, but no other thread of
// the save. The thread owns its data, and is abandoned if it does not return.
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

// The folder of checkpoints, and the new checkpoint in it.
struct SaveFolder {
  std::optional<Folder> folder;
  std::optional<NewCheckpoint> made;
};

class DiskThread {
 public:
  // Starts to write the blocks that `writer` packs. `writer` is NULL if the rank writes no file.
  DiskThread(std::shared_ptr<SaveFolder> folder, std::shared_ptr<ShardWriter> writer);
  // Waits for the thread, for at most the patience.
  ~DiskThread();
  DiskThread(const DiskThread &) = delete;
  DiskThread &operator=(const DiskThread &) = delete;

  // Runs `work` on the thread once the writer is done; there is one piece of work at a time. result() throws its error.
  void begin(std::function<void(SaveFolder &)> work);
  bool idle() const;
  void await_idle(std::chrono::milliseconds longest) const;
  void result() const;
  // How long the destructor waits for the thread.
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }

 private:
  // State that this object and the thread own together.
  struct DiskWork {
    std::shared_ptr<SaveFolder> folder;
    std::shared_ptr<ShardWriter> writer;
    mutable std::mutex mutex;
    mutable std::condition_variable changed;
    std::function<void(SaveFolder &)> work;  // work that is waiting to run
    bool busy = false;                       // work is waiting or under way
    std::optional<Error> failure;            // error of the last work
    bool ends = false, ended = false;
  };
  static void *run(void *kept);
  static void serve(DiskWork &state);

  std::shared_ptr<DiskWork> state_;
  std::chrono::milliseconds patience_{1000};
  pthread_t thread_;
};

}  // namespace fsdp::checkpoint
