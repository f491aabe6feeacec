// SPDX-License-Identifier: Apache-2.0

#include "device/host/host_device.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "device/host/stream.h"

// The headers of some supported systems lack these constants; an older kernel answers EINVAL.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

namespace fsdp::device {
namespace {

[[noreturn]] void fail_memory(uint64_t bytes, const char *what, int code) {
  throw Error(FSDP_OUT_OF_MEMORY, format_text("{}: cannot allocate {} bytes: {}", what, bytes, strerrordesc_np(code)),
              -1, FSDP_ORIGIN_OS, code);
}

// The name appears in /proc/self/maps as [anon:fsdp ...]. The kernel accepts no brackets, quotes or backslashes, and at
// most 79 characters.
void name_pages(void *data, uint64_t bytes, const char *what) {
  char name[80];
  std::snprintf(name, sizeof name, "fsdp %s", what);
  for (char *c = name; *c; ++c)
    if (std::strchr("[]\\$`", *c) || *c < ' ' || *c > '~') *c = '_';
  prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, data, bytes, name);
}

int populate(std::byte *data, uint64_t bytes) {
  int result = 0;
  do result = madvise(data, bytes, MADV_POPULATE_WRITE);
  while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return 0;
  if (errno != EINVAL) return errno;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (uint64_t offset = 0; offset < bytes; offset += page)
    const_cast<volatile std::byte *>(data)[offset] = std::byte{};
  return 0;
}

}  // namespace

HostMemory::HostMemory(uint64_t bytes, const char *what) : bytes_(bytes) {
  if (bytes == 0) return;
  void *pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) fail_memory(bytes, what, errno);
  data_ = static_cast<std::byte *>(pages);
  madvise(pages, bytes, MADV_DONTFORK);
  madvise(pages, bytes, MADV_HUGEPAGE);  // direct I/O and kernels are faster; a kernel without them refuses
  name_pages(pages, bytes, what);
  if (const int code = populate(data_, bytes); code != 0) {
    munmap(pages, bytes);
    fail_memory(bytes, what, code);
  }
}

HostMemory::~HostMemory() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace fsdp::device

namespace fsdp::device {

HostDevice::HostDevice(const Options &options, const Waiter &waiter, Failure &failure)
    : options_(options),
      waiter_(waiter),
      failure_(failure),
      worker_waiter_(failure, nullptr, nullptr, waiter.timeout_ms()),
      caller_(waiter) {}

std::unique_ptr<Stream> HostDevice::create_stream(const std::string &name) {
  if (!options_.overlap) return std::make_unique<InlineStream>(options_, name, waiter_, failure_);
  std::lock_guard lock(mutex_);
  progress_.push_back(std::make_unique<Progress>(name));
  return std::make_unique<WorkerStream>(options_, name, *progress_.back(), waiter_, worker_waiter_, failure_);
}

std::unique_ptr<Event> HostDevice::create_event() { return std::make_unique<HostEvent>(); }

std::unique_ptr<Memory> HostDevice::allocate(uint64_t bytes, const char *what) {
  count_allocation(bytes, what);
  return std::make_unique<HostMemory>(bytes, what);
}

Stream &HostDevice::caller_stream(fsdp_stream stream) {
  if (stream) fail(FSDP_INVALID_ARGUMENT, "{}: the host device has no streams: pass NULL", waiter_.call());
  return caller_;
}

namespace {

// All streams of the host device run host work, so a lane is one of them.
class StreamLane final : public HostLane {
 public:
  explicit StreamLane(std::unique_ptr<Stream> stream) : stream_(std::move(stream)) {}
  Stream &stream() override { return *stream_; }
  void wait(const Event &event) override { stream_->wait(event); }
  void release(Stream &device_stream) override {
    stream_->record(released_);
    device_stream.wait(released_);
  }

 private:
  std::unique_ptr<Stream> stream_;
  HostEvent released_;
};

}  // namespace

std::unique_ptr<HostLane> HostDevice::create_host_lane(const std::string &name) {
  return std::make_unique<StreamLane>(create_stream(name));
}

void HostDevice::begin_capture(uint64_t) { fail(FSDP_INTERNAL, "the host device captures no graphs"); }

std::string HostDevice::description() const { return format_text("the host ({})", host_instruction_set()); }

void HostDevice::synchronize(const Event &event) { await_event(event, waiter_); }

void HostDevice::count_allocation(uint64_t bytes, const char *what) {
  const uint64_t count = allocations_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (count == options_.failed_allocation)
    fail(FSDP_OUT_OF_MEMORY, "{}: allocation {} of {} bytes fails because debug_failed_allocation says so", what, count,
         bytes);
}

}  // namespace fsdp::device
