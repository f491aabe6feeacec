// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

#include "element.h"

namespace harness {
namespace {

// Finds the function in libfsdp's simulated build, or else in an installed CUDA runtime.
template <class Function>
Function *find(const char *name) {
  if (void *symbol = ::dlsym(RTLD_DEFAULT, name)) return reinterpret_cast<Function *>(symbol);
  static void *const runtime = [] {
    for (const char *file : {"libcudart.so", "libcudart.so.13", "libcudart.so.12"})
      if (void *found = ::dlopen(file, RTLD_NOW | RTLD_LOCAL)) return found;
    return static_cast<void *>(nullptr);
  }();
  void *symbol = runtime ? ::dlsym(runtime, name) : nullptr;
  if (!symbol) throw std::runtime_error(std::string("FSDP_TEST_DEVICE=cuda, but there is no ") + name);
  return reinterpret_cast<Function *>(symbol);
}

void check_cuda(int error, const char *call) {
  if (error) throw std::runtime_error(std::string(call) + " returned " + std::to_string(error));
}

constexpr int any_direction = 4;  // cudaMemcpyDefault
thread_local bool host_thread = false;

}  // namespace

void stay_on_host(bool host) { host_thread = host; }

bool on_gpu() {
  static const bool gpu = [] {
    const char *device = std::getenv("FSDP_TEST_DEVICE");
    return device && std::string(device) == "cuda";
  }();
  return gpu && !host_thread;
}

fsdp_context_options place(fsdp_context_options options) {
  if (!on_gpu() || options.device) return options;
  const char *transport = std::getenv("FSDP_TEST_TRANSPORT");
  options.device = FSDP_DEVICE_CUDA;
  const bool nccl = transport && std::string(transport) == "nccl";
  // Between hosts, also simulated ones, a plan refuses NCCL if it is named. Without a name, NCCL is chosen there.
  if (!nccl || !options.ranks_per_host) options.device_transport = nccl ? FSDP_TRANSPORT_NCCL : FSDP_TRANSPORT_STAGING;
  return options;
}

bool has_gpu_for_each(uint32_t ranks) {
  if (!on_gpu() || ranks < 2) return false;
  int count = 0;
  check_cuda(find<int(int *)>("cudaGetDeviceCount")(&count), "cudaGetDeviceCount");
  return static_cast<uint32_t>(count) >= ranks;
}

void use_gpu(uint32_t rank) { check_cuda(find<int(int)>("cudaSetDevice")(static_cast<int>(rank)), "cudaSetDevice"); }

fsdp_model_options place(fsdp_model_options options) {
  if (on_gpu() && options.unshard_mode == FSDP_UNSHARD_MAPPED) options.unshard_mode = FSDP_UNSHARD_COPIED;
  return options;
}

namespace {

struct OwnStream {
  fsdp_stream handle = nullptr;
  OwnStream() {
    constexpr unsigned non_blocking = 1;
    check_cuda(find<int(fsdp_stream *, unsigned)>("cudaStreamCreateWithFlags")(&handle, non_blocking),
               "cudaStreamCreateWithFlags");
  }
  ~OwnStream() { find<int(fsdp_stream)>("cudaStreamDestroy")(handle); }
};

}  // namespace

fsdp_stream stream() {
  if (!on_gpu()) return nullptr;
  thread_local const OwnStream own;
  return own.handle;
}

namespace {

// Inside the driver copies of pageable memory wait for each other, so ranks that are threads of one process could wait
// in a circle. So these copies use page-locked memory.
class Bounce {
 public:
  ~Bounce() {
    if (pinned_) find<int(void *)>("cudaFreeHost")(pinned_);
  }
  void to_device(void *to, const void *from, uint64_t bytes) {
    std::memcpy(pinned(), from, bytes);
    run(to, pinned_, bytes);
  }
  void to_host(void *to, const void *from, uint64_t bytes) {
    run(pinned(), from, bytes);
    std::memcpy(to, pinned_, bytes);
  }
  static constexpr uint64_t room = uint64_t{1} << 20;

 private:
  void *pinned() {
    constexpr unsigned portable = 1;
    if (!pinned_)
      check_cuda(find<int(void **, size_t, unsigned)>("cudaHostAlloc")(&pinned_, room, portable), "cudaHostAlloc");
    return pinned_;
  }
  static void run(void *to, const void *from, uint64_t bytes) {
    static auto *const copy_any = find<int(void *, const void *, size_t, int, fsdp_stream)>("cudaMemcpyAsync");
    static auto *const synchronize = find<int(fsdp_stream)>("cudaStreamSynchronize");
    check_cuda(copy_any(to, from, bytes, any_direction, stream()), "cudaMemcpyAsync");
    check_cuda(synchronize(stream()), "cudaStreamSynchronize");
  }
  void *pinned_ = nullptr;
};

thread_local Bounce bounce;

// Calls piece(first, count) for each part that fits into the bounce buffer.
template <class Piece>
void in_pieces(uint64_t bytes, const Piece &piece) {
  for (uint64_t at = 0; at < bytes; at += Bounce::room) piece(at, std::min(bytes - at, Bounce::room));
}

void copy_in(void *to, const void *from, uint64_t bytes) {
  if (!on_gpu()) {
    std::memcpy(to, from, bytes);
    return;
  }
  in_pieces(bytes, [&](uint64_t at, uint64_t count) {
    bounce.to_device(static_cast<std::byte *>(to) + at, static_cast<const std::byte *>(from) + at, count);
  });
}

}  // namespace

void copy_out(void *to, const void *from, uint64_t bytes) {
  if (!on_gpu()) {
    std::memcpy(to, from, bytes);
    return;
  }
  in_pieces(bytes, [&](uint64_t at, uint64_t count) {
    bounce.to_host(static_cast<std::byte *>(to) + at, static_cast<const std::byte *>(from) + at, count);
  });
}

std::vector<float> load_elements(const void *data, fsdp_dtype dtype, uint64_t count) {
  std::vector<std::byte> raw(count * fsdp_get_dtype_size(dtype));
  copy_out(raw.data(), data, raw.size());
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = load_element(raw.data(), dtype, i);
  return values;
}

void store_elements(void *data, fsdp_dtype dtype, const std::vector<float> &values) {
  std::vector<std::byte> raw(values.size() * fsdp_get_dtype_size(dtype));
  for (uint64_t i = 0; i < values.size(); ++i) store_element(raw.data(), dtype, i, values[i]);
  copy_in(data, raw.data(), raw.size());
}

namespace {

// cudaFree waits for all work of the GPU, also of other ranks, which may wait for this one: memory is kept for the next
// that needs as much, until the thread ends.
class KeptMemory {
 public:
  ~KeptMemory() {
    for (const auto &[bytes, data] : free_) find<int(void *)>("cudaFree")(data);
  }
  void *take(uint64_t bytes) {
    if (const auto kept = free_.find(bytes); kept != free_.end()) return free_.extract(kept).mapped();
    void *data = nullptr;
    check_cuda(find<int(void **, size_t)>("cudaMalloc")(&data, bytes), "cudaMalloc");
    return data;
  }
  void give_back(uint64_t bytes, void *data) { free_.emplace(bytes, data); }

 private:
  std::multimap<uint64_t, void *> free_;
};

thread_local KeptMemory kept_memory;

}  // namespace

Placed::Placed(const std::vector<float> &values) : data_(values.data()), bytes_(values.size() * sizeof(float)) {
  if (!on_gpu() || values.empty()) return;
  owned_ = kept_memory.take(bytes_);
  copy_in(owned_, values.data(), bytes_);
  data_ = owned_;
}

Placed::~Placed() {
  if (!owned_) return;
  // The stream may still read it.
  find<int(fsdp_stream)>("cudaStreamSynchronize")(stream());
  kept_memory.give_back(bytes_, owned_);
}

}  // namespace harness
