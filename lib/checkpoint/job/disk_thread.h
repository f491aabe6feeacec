// SPDX-License-Identifier: Apache-2.0
// The thread of a save that accesses the file system. A disk may block it for any time, but no other thread of the
// save: this thread owns its data, and is left alone if it does not return.
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

// The folder, and the new checkpoint in it.
struct SaveFolder {
  std::optional<Folder> folder;
  std::optional<NewCheckpoint> made;
};

class DiskThread {
 public:
  // Starts writing what `writer` packs. `writer` is NULL if the rank writes no file.
  DiskThread(std::shared_ptr<SaveFolder> folder, std::shared_ptr<ShardWriter> writer);
  // Waits for the thread, for at most the patience.
  ~DiskThread();
  DiskThread(const DiskThread &) = delete;
  DiskThread &operator=(const DiskThread &) = delete;

  // Does the work once the writer is done; one piece of work at a time. result() throws the work's error.
  void begin(std::function<void(SaveFolder &)> work);
  bool idle() const;
  void await_idle(std::chrono::milliseconds longest) const;
  void result() const;
  // How long the destructor waits for the thread.
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }

 private:
  // State that the thread owns, too.
  struct DiskWork {
    std::shared_ptr<SaveFolder> folder;
    std::shared_ptr<ShardWriter> writer;
    mutable std::mutex mutex;
    mutable std::condition_variable changed;
    std::function<void(SaveFolder &)> work;  // work to be done
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
