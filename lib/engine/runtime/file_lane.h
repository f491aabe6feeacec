// SPDX-License-Identifier: Apache-2.0
// Reads and writes of the home file in the order of streams. They run in a lane of host work, and wait there for the
// thread that moves the bytes. An error of the disk fails the context on all ranks.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "device/device.h"
#include "engine/runtime/home_thread.h"
#include "engine/runtime/storage.h"

namespace fsdp::engine {

class FileLane {
 public:
  // `memory` has all bytes that come from the file or go to it.
  FileLane(Context &context, const Storage &storage, const std::shared_ptr<device::Memory> &memory,
           const std::string &name);
  // Ends without waiting for the disk: what is enqueued and not begun is dropped.
  ~FileLane();
  FileLane(const FileLane &) = delete;
  FileLane &operator=(const FileLane &) = delete;

  // Later reads and writes start after the event.
  void wait(const device::Event &event) { lane_->wait(event); }
  // Later work on the stream starts after the reads and writes that are enqueued now.
  void release(device::Stream &stream) { lane_->release(stream); }
  void record(device::Event &event) { lane_->stream().record(event); }
  // Blocks the calling thread until what is enqueued now is done.
  void await();
  // `what` names the bytes in errors, and must outlive the lane.
  void read(const HomePages &pages, const char *what) { enqueue(true, pages, what); }
  void write(const HomePages &pages, const char *what) { enqueue(false, pages, what); }

 private:
  void enqueue(bool reads, const HomePages &pages, const char *what);
  void move(bool reads, const HomePages &pages, const char *what);

  Context &context_;
  std::atomic<bool> ends_ = false;
  HomeThread thread_;
  std::unique_ptr<device::Event> done_;
  std::unique_ptr<device::HostLane> lane_;
};

}  // namespace fsdp::engine
