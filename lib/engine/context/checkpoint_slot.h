// SPDX-License-Identifier: Apache-2.0
// The save that is under way in the background, one at most. It lives, and with it its models, until its end has been
// waited for or its context ends.
#pragma once

#include <memory>
#include <mutex>

#include "base/error.h"

namespace fsdp::engine {

class OpenSave {
 public:
  virtual ~OpenSave() = default;
  // The calling thread waits for its end, polling. Throws why there is no checkpoint, also when asked again.
  virtual void wait(const char *call) = 0;
  // Any thread, as all that follows.
  virtual void give_up(fsdp_status status, const char *why) noexcept = 0;
  virtual bool under_way() const noexcept = 0;
  // Models that have been copied are needed no more.
  virtual void release_models() = 0;
};

// Any thread.
class CheckpointSlot {
 public:
  std::shared_ptr<OpenSave> get() const {
    const std::lock_guard lock(mutex_);
    return save_;
  }
  void set(std::shared_ptr<OpenSave> save) {
    const std::lock_guard lock(mutex_);
    save_.swap(save);  // the one before ends outside the lock
  }
  void forget(const OpenSave *save) noexcept {
    std::shared_ptr<OpenSave> last;  // ends outside the lock
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
