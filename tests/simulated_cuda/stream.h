// SPDX-License-Identifier: Apache-2.0
// A stream has a queue in order, and a thread that runs the queued work. A caller that enqueues holds the mutex. The
// stream's thread never takes it, so that finished work has no edge to the next call.
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

// Marks the stream as waiting while its thread waits.
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
  // queue is NULL if the stream has a queue of its own.
  Stream(Device &device, bool blocking, uint64_t number, HardwareQueue *queue);
  ~Stream();
  Stream(const Stream &) = delete;
  Stream &operator=(const Stream &) = delete;

  // A stream accepts about a thousand pieces of unfinished work. A caller that adds more waits here, possibly for ever.
  // The caller must not hold the mutex.
  void await_room() const;
  // The caller must hold mutex(). `waits` says that `run` waits for a value in memory.
  Work *push(std::function<void()> run, std::vector<Work *> after = {}, bool waits = false);
  Work *last() const { return last_; }
  std::mutex &mutex() { return mutex_; }
  const HardwareQueue *queue() const { return queue_; }  // NULL: the stream has its own queue

  // The queued work is still done, and then the thread ends.
  void close();
  void join();

  Device &device;
  const bool blocking;  // the stream is ordered with the legacy stream
  const uint64_t number;
  unsigned flags = 0;
  int priority = 0;
  std::atomic<uint64_t> maker{0};  // the number of the thread that created it
  Word delay_us{0};                // pause before each piece of work, in addition to the delay of all streams
  // Returns whether the thread waits for other work, a value in memory or the end of a Hold. The call creates no edge.
  std::atomic<bool> waits{false};

  // mutex() guards the capture that the stream is in, and the nodes on which its next node depends.
  Capture *capture = nullptr;
  std::vector<Node *> tips;
  size_t lane = 0;

 private:
  Work *next_of(Work *work);
  void do_piece(Work &work);
  void pause();

  HardwareQueue *const queue_;
  std::mutex mutex_;
  std::deque<Work> works_;  // kept until the end, because events refer to them
  Work *last_;
  bool closed_ = false;
  Word pushed_{0};
  // ThreadSanitizer must see no edge between finished work and the next call.
  std::atomic<uint64_t> enqueued_{0}, done_{0};
  uint64_t random_;
  std::thread thread_;
};

}  // namespace simulated
