// SPDX-License-Identifier: Apache-2.0
// A stream: a queue in order and a thread that works it off. The thread that enqueues holds the mutex; the thread never
// takes it, so that a finished piece of work has no edge to the next call.
#pragma once

#include <deque>
#include <mutex>
#include <thread>

#include "simulated_cuda/hardware_queue.h"
#include "simulated_cuda/work.h"

namespace simulated {

struct Capture;
struct Device;
struct Node;

// For the length of a wait of the stream's thread.
class StreamWait {
 public:
  explicit StreamWait(std::atomic<bool> &waits) : waits_(waits) { waits_.store(true, std::memory_order_relaxed); }
  ~StreamWait() { waits_.store(false, std::memory_order_relaxed); }
  StreamWait(const StreamWait &) = delete;
  StreamWait &operator=(const StreamWait &) = delete;

 private:
  std::atomic<bool> &waits_;
};

class Stream {
 public:
  // queue: NULL where it has one of its own.
  Stream(Device &device, bool blocking, uint64_t number, HardwareQueue *queue);
  ~Stream();
  Stream(const Stream &) = delete;
  Stream &operator=(const Stream &) = delete;

  // A stream takes about a thousand pieces of work that are not done; a caller that brings more waits, for ever if need
  // be. Without the mutex.
  void await_room() const;
  // The caller holds mutex().
  // waits: `run` waits for a value in memory.
  Work *push(std::function<void()> run, std::vector<Work *> after = {}, bool waits = false);
  Work *last() const { return last_; }
  std::mutex &mutex() { return mutex_; }
  const HardwareQueue *queue() const { return queue_; }  // NULL: its own

  // What is queued is still done; then the thread ends.
  void close();
  void join();

  Device &device;
  const bool blocking;  // ordered with the legacy stream
  const uint64_t number;
  unsigned flags = 0;
  int priority = 0;
  std::atomic<uint64_t> maker{0};  // the number of the thread that created it
  Word delay_us{0};                // before each piece of work, beside the delay of all streams
  // Its thread is in the middle of a wait, for other work, a value in memory or the end of a hold. No edge.
  std::atomic<bool> waits{false};

  // Guarded by mutex(): what the stream is captured into, and what its next node depends on.
  Capture *capture = nullptr;
  std::vector<Node *> tips;
  size_t lane = 0;

 private:
  Work *next_of(Work *work);
  void do_piece(Work &work);
  void pause();

  HardwareQueue *const queue_;
  std::mutex mutex_;
  std::deque<Work> works_;  // kept until the end: events refer to them
  Work *last_;
  bool closed_ = false;
  Word pushed_{0};
  // No edge for ThreadSanitizer between work that is done and the next call.
  std::atomic<uint64_t> enqueued_{0}, done_{0};
  uint64_t random_;
  std::thread thread_;
};

}  // namespace simulated
