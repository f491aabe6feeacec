// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/file_lane.h"

#include <algorithm>

#include "engine/context/context.h"

namespace fsdp::engine {

FileLane::FileLane(Context &context, const Storage &storage, const std::shared_ptr<device::Memory> &memory,
                   const std::string &name)
    : context_(context),
      thread_("fsdp-home-file", storage.home_file(), memory, context.device_traits().host_memory),
      done_(context.device().create_event()),
      lane_(context.device().create_host_lane(name)) {}

FileLane::~FileLane() {
  ends_ = true;
  lane_.reset();
}

void FileLane::await() {
  record(*done_);
  context_.device().synchronize(*done_);
}

// Enqueued piece by piece, so that a stream that waits for the lane sees a slow disk move, and does not time out.
void FileLane::enqueue(bool reads, const HomePages &pages, const char *what) {
  for (uint64_t done = 0; done < pages.bytes; done += file_piece_bytes) {
    const HomePages piece{pages.offset + done, std::min(file_piece_bytes, pages.bytes - done), pages.memory + done};
    lane_->stream().run([this, reads, piece, what] { move(reads, piece, what); });
  }
}

// Called in the lane.
void FileLane::move(bool reads, const HomePages &pages, const char *what) try {
  if (ends_) return;
  thread_.await(reads ? thread_.read({&pages, 1}) : thread_.write({&pages, 1}), disk_patience(context_.timeout_ms()),
                [this] {
                  context_.failure().check();
                  return !ends_;
                });
} catch (Error &error) {
  error.message = format_text("rank {}: {}: {}; the context has failed: make a new one, and load the last checkpoint",
                              context_.rank(), what, error.message);
  context_.fail_for_good(error, false);  // the error of a stream alone fails only this rank
  throw;
}

}  // namespace fsdp::engine
