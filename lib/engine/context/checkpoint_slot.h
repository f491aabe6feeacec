// SPDX-License-Identifier: Apache-2.0
// The save that is under way in the background; there is at most one. The save and its models live until a caller has
// waited for its end, or until its context ends.
#pragma once

#include <memory>
#include <mutex>

#include "base/error.h"

namespace fsdp::engine {

class OpenSave {
 public:
  virtual ~OpenSave() = default;
  // Polls on the calling thread until the save has ended. If the save made no checkpoint, each call throws the reason.
  virtual void wait(const char *call) = 0;
  // Any thread may call this function and those below.
  virtual void give_up(fsdp_status status, const char *why) noexcept = 0;
  virtual bool under_way() const noexcept = 0;
  // Releases the models that the save has copied.
  virtual void release_models() = 0;
};

// Holds the context's save. Any thread may use it.
class CheckpointSlot {
 public:
  std::shared_ptr<OpenSave> get() const {
    const std::lock_guard lock(mutex_);
    return save_;
  }
  void set(std::shared_ptr<OpenSave> save) {
    const std::lock_guard lock(mutex_);
    save_.swap(save);  // the previous save is destroyed outside the lock
  }
  void forget(const OpenSave *save) noexcept {
    std::shared_ptr<OpenSave> last;  // destroyed outside the lock
    const std::lock_guard lock(mutex_);
    if (save_.get() == save) last = std::move(save_);
  }
  void release_models() {
    if (const auto save = get()) save->release_models();
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<OpenSave> save_;
};

}  // namespace fsdp::engine
