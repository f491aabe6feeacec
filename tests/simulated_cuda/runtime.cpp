// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/runtime.h"

#include <pthread.h>

#include <cstdlib>
#include <string>

#include "simulated_cuda/environment.h"

namespace simulated {
namespace {

constexpr uint64_t first_memory = uint64_t{16} << 30;

std::atomic<uint64_t> thread_number{0};

std::atomic<uint32_t> generation{1};

// Counts the forks from which this process descends since the first call. Every CUDA call reads the count; getpid would
// be a system call.
uint32_t forks_so_far() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++generation; });
  if (registered != 0) std::abort();
  return generation.load(std::memory_order_relaxed);
}

// Ends the threads before the process's static objects are destroyed. A forked child has no such threads.
struct Ending {
  Runtime &runtime;
  ~Ending() {
    if (!runtime.forked()) runtime.reset();
  }
};

}  // namespace

Runtime &runtime() {
  static Runtime &only = *new Runtime;  // never destroyed, because other static objects may still call CUDA
  static Ending ending{only};
  return only;
}

Thread &this_thread() {
  thread_local Thread thread;
  const uint64_t life = runtime().life.load(std::memory_order_relaxed);
  if (thread.life != life) {
    Stream *const stream = thread.stream;
    thread = {};
    thread.life = life;
    thread.number = thread_number.fetch_add(1, std::memory_order_relaxed) + 1;
    thread.stream = stream;
  }
  return thread;
}

void fail_device_of_this_stream(cudaError_t error) {
  if (Stream *stream = this_thread().stream) stream->device.fail(error);
}

Runtime::Runtime() {
  const Settings settings = environment_settings();
  device_memory = settings.memory_mib << 20;
  timing.longest_us = static_cast<uint32_t>(settings.delay_us);
  timing.seed = settings.seed;
  strict = settings.strict != 0;
  timing.word_ns = static_cast<uint32_t>(settings.word_ns);
  first_queues = settings.queues;
  stream_room = settings.stream_room;
  fair_queues = settings.fair_queues != 0;
  create_devices(static_cast<int>(settings.devices));
}
Runtime::~Runtime() = default;

void Runtime::create_devices(int count) {
  const std::unique_lock lock(mutex_);
  devices_.clear();
  const uint64_t queues = first_queues ? *first_queues : HardwareQueues::of_environment();
  for (int index = 0; index < count; ++index)
    devices_.push_back(std::make_unique<Device>(index, device_memory.load(), queues));
}

void Runtime::set_devices(int count) {
  reset();
  create_devices(count);
}

void Runtime::set_queues(uint64_t count) {
  const int devices = device_count();
  reset();
  first_queues = count;
  create_devices(devices);
}

void Runtime::set_memory(uint64_t bytes) {
  device_memory = bytes;
  for (auto &device : devices_) device->memory = bytes;
}

bool Runtime::forked() const {
  const uint32_t me = forks_so_far();
  uint32_t nobody = 0;
  if (process_.compare_exchange_strong(nobody, me, std::memory_order_relaxed)) return false;
  return nobody != me;
}

void Runtime::join_streams() {
  timing.stopping = true;
  futex_wake_all(timing.holds);
  for (auto &device : devices_) device->stopping = true;
  for (Stream *stream : known_) stream->close();
  for (Stream *stream : lanes_) stream->close();
  // All threads end before the first queue is destroyed, because they wait for each other's work.
  for (Stream *stream : known_) stream->join();
  for (Stream *stream : lanes_) stream->join();
  timing.stopping = false;
}

void Runtime::reset() {
  join_streams();
  known_.clear();
  lanes_.clear();
  per_thread_.clear();
  graph_execs.clear();
  graphs.clear();
  events.clear();
  captures.clear();
  open_captures = 0;
  streams.clear();
  memory.clear();
  virtual_memory.clear();
  calls.clear();
  timing.longest_us = 0;
  timing.seed = 0;
  timing.word_ns = static_cast<uint32_t>(environment_settings().word_ns);
  strict = fabric = false;
  files = peers = true;
  capability = first_capability;
  slices = 1;
  kernels = pageable_copies = faulty_kernel = 0;
  foreign_calls = implicit_contexts = 0;
  device_memory = first_memory;
  first_queues = environment_settings().queues;
  stream_room = environment_settings().stream_room;
  fair_queues = environment_settings().fair_queues != 0;
  process_ = 0;
  ++life;
  create_devices(1);
}

Device *Runtime::device(int index) {
  const std::shared_lock lock(mutex_);
  return index >= 0 && index < device_count() ? devices_[static_cast<size_t>(index)].get() : nullptr;
}

Device &Runtime::current() { return *device(current_device(this_thread())); }

Stream *Runtime::stream(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return &legacy(current());
  if (handle == cudaStreamPerThread) return per_thread();
  Stream *found = streams.find(handle);
  if (found) note_device(found->device);
  return found;
}

Event *Runtime::event(cudaEvent_t handle) {
  Event *found = events.find(handle);
  if (found) note_device(found->device);
  return found;
}

void Runtime::note_device(const Device &device) {
  if (current_device(this_thread()) != device.index) ++foreign_calls;
}

void Runtime::know(Stream *stream) {
  const std::unique_lock lock(mutex_);
  known_.push_back(stream);
}

std::pair<cudaStream_t, Stream *> Runtime::create_stream(Device &device, bool blocking) {
  const auto created = streams.create(device, blocking, ++stream_number_, device.queues.join(fair_queues));
  know(created.second);
  return created;
}

Stream &Runtime::legacy(Device &device) {
  if (Stream *present = device.legacy.load()) return *present;
  const std::lock_guard lock(device.mutex);
  if (!device.legacy.load()) device.legacy = create_stream(device, false).second;
  return *device.legacy.load();
}

Stream *Runtime::per_thread() {
  const std::pair key{this_thread().number, current_device(this_thread())};
  {
    const std::shared_lock lock(mutex_);
    if (const auto found = per_thread_.find(key); found != per_thread_.end()) return found->second;
  }
  // It belongs to this thread alone, so no other thread can create it meanwhile
  Stream *stream = create_stream(current(), true).second;
  const std::unique_lock lock(mutex_);
  return per_thread_[key] = stream;
}

std::unique_ptr<Stream> Runtime::create_lane(Device &device) {
  auto lane = std::make_unique<Stream>(device, false, ++stream_number_, nullptr);
  const std::unique_lock lock(mutex_);
  lanes_.push_back(lane.get());
  return lane;
}

template <class Condition>
std::vector<Stream *> Runtime::known(Condition condition) const {
  const std::shared_lock lock(mutex_);
  std::vector<Stream *> found;
  for (Stream *stream : known_) {
    if (condition(*stream)) found.push_back(stream);
  }
  return found;
}

std::vector<Stream *> Runtime::blocking_streams(const Device &device) {
  return known([&](const Stream &stream) { return stream.blocking && &stream.device == &device; });
}

std::vector<Stream *> Runtime::all_streams(const Device &device) {
  return known([&](const Stream &stream) { return &stream.device == &device; });
}

}  // namespace simulated
