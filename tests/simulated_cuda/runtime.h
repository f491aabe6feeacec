// SPDX-License-Identifier: Apache-2.0
// The one object of the process, like CUDA's runtime. It has the devices, handles, memory, captures and counters.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "simulated_cuda/calls.h"
#include "simulated_cuda/device.h"
#include "simulated_cuda/event.h"
#include "simulated_cuda/graph.h"
#include "simulated_cuda/handles.h"
#include "simulated_cuda/memory.h"
#include "simulated_cuda/virtual_memory.h"

namespace simulated {

inline constexpr int first_capability = 9;  // major

// Reads create no edges, because pauses order nothing.
struct Timing {
  std::atomic<uint32_t> longest_us{0};
  std::atomic<uint64_t> seed{0};
  std::atomic<uint32_t> word_ns{0};
  std::atomic<bool> stopping{false};
  Word holds{0};
};

// CUDA keeps this state for each thread.
struct Thread {
  uint64_t life = 0;  // the runtime's generation; a reset starts the next one
  uint64_t number = 0;
  int chosen = 0;  // chosen by cudaSetDevice
  std::vector<int>
      contexts;  // devices with a current primary context, the last one on top; empty before the first call
  cudaError_t last = cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool in_host_function = false;
  Stream *stream = nullptr;  // the stream's thread works for this device
};
Thread &this_thread();
// Returns the device as the runtime sees it: that of the current context, or else the chosen one.
inline int current_device(const Thread &thread) {
  return thread.contexts.empty() ? thread.chosen : thread.contexts.back();
}

class Runtime {
 public:
  Runtime();
  ~Runtime();
  void reset();
  void set_devices(int count);
  void set_queues(uint64_t count);  // queues of each device, set in a reset; 0: each stream has its own
  void set_memory(uint64_t bytes);  // the devices keep their allocated memory

  Device *device(int index);  // returns nullptr if no device has that index
  Device &current();          // the calling thread's device; devices must exist
  int device_count() const { return static_cast<int>(devices_.size()); }
  bool forked() const;

  // Accepts NULL, cudaStreamLegacy, cudaStreamPerThread or a handle, and returns nullptr if there is no such stream.
  // Counts the thread's call if the stream belongs to another device than the current one.
  Stream *stream(cudaStream_t handle);
  Event *event(cudaEvent_t handle);
  void note_device(const Device &device);
  Stream &legacy(Device &device);
  std::pair<cudaStream_t, Stream *> create_stream(Device &device, bool blocking);
  std::unique_ptr<Stream> create_lane(Device &device);  // handle of a graph
  // Returns the streams that are ordered with the legacy stream of the device.
  std::vector<Stream *> blocking_streams(const Device &device);
  std::vector<Stream *> all_streams(const Device &device);  // includes destroyed streams, which may still work

  Timing timing;
  Calls calls;
  Memory memory;
  VirtualMemory virtual_memory;
  Handles<Stream, cudaStream_t> streams{0x51000000};
  Handles<Event, cudaEvent_t> events{0x52000000};
  Handles<Graph, cudaGraph_t> graphs{0x53000000};
  Handles<GraphExec, cudaGraphExec_t> graph_execs{0x54000000};

  std::atomic<uint64_t> life{1};
  std::atomic<bool> strict{false}, fabric{false}, files{true}, peers{true};
  std::atomic<int> capability{first_capability};
  std::atomic<int> slices{1};  // number of devices on each GPU
  std::atomic<uint64_t> kernels{0}, pageable_copies{0};
  std::atomic<uint64_t> foreign_calls{0}, implicit_contexts{0};
  std::atomic<uint64_t> faulty_kernel{0};  // counts down to the call that fails
  std::atomic<int> kernel_fault{cudaSuccess};
  std::atomic<uint64_t> device_memory;
  std::atomic<uint64_t> stream_room{0};  // a stream accepts this many pieces of work; 0: any number
  std::atomic<bool> fair_queues{false};  // streams share no queue if there are enough
  std::optional<uint64_t> first_queues;  // queues of a device; unset: CUDA's variable decides

  std::shared_mutex captures_mutex;
  std::deque<Capture> captures;
  std::atomic<int> open_captures{0};

 private:
  void create_devices(int count);
  void join_streams();
  Stream *per_thread();
  void know(Stream *stream);
  template <class Condition>
  std::vector<Stream *> known(Condition condition) const;

  mutable std::shared_mutex mutex_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::map<std::pair<uint64_t, int>, Stream *> per_thread_;
  std::vector<Stream *> known_;  // public streams; destroyed ones are included, because they may still work
  std::vector<Stream *> lanes_;
  std::atomic<uint64_t> stream_number_{0};
  mutable std::atomic<uint32_t> process_{0};  // the process that used it first, as a number of forks; 0: none
};

Runtime &runtime();

// Lets work fail its device: the device of the stream that runs the calling thread.
void fail_device_of_this_stream(cudaError_t error);

}  // namespace simulated
