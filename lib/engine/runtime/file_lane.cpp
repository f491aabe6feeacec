// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/file_lane.h"

#include "engine/context/context.h"

namespace fsdp::engine {

FileLane::FileLane(Context &context, const Storage &storage, const std::shared_ptr<device::Memory> &memory,
                   const std::string &name)
    : context_(context),
      thread_("fsdp-home-file", storage.home_file(), memory, context.device_traits().host_memory),
      lane_(context.device().create_host_lane(name)) {}

void FileLane::enqueue(bool reads, const HomePages &pages, const char *what) {
  lane_->stream().run([this, reads, pages, what] { move(reads, pages, what); });
}

// Called in the lane.
void FileLane::move(bool reads, const HomePages &pages, const char *what) try {
  thread_.await(reads ? thread_.read({&pages, 1}) : thread_.write({&pages, 1}),
                std::chrono::milliseconds(context_.timeout_ms()), [this] { context_.failure().check(); });
} catch (Error &error) {
  error.message = format_text("rank {}: {}: {}; the context has failed: make a new one, and load the last checkpoint",
                              context_.rank(), what, error.message);
  context_.fail_for_good(error, false);  // the stream would fail this rank alone
  throw;
}

}  // namespace fsdp::engine
