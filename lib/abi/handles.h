// SPDX-License-Identifier: Apache-2.0
// What the opaque handles are. A handle is alive while its magic word says so. The destroy calls overwrite it and bury
// the handle, so that its use is refused as long as it has not been dug up by 1024 others of its kind.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/capture.h"
#include "engine/context.h"
#include "engine/model.h"

namespace fsdp::abi {

// What a handle holds: calls copy it, and destroy takes it away, from any thread at any time. The lock is held for a copy.
template <class T>
class Held {
 public:
  std::shared_ptr<T> copy() const {
    const Lock lock(busy_);
    return held_;
  }
  std::shared_ptr<T> take() {
    const Lock lock(busy_);
    return std::move(held_);
  }
  void put(std::shared_ptr<T> held) {
    const Lock lock(busy_);
    held_ = std::move(held);
  }

 private:
  struct Lock {
    explicit Lock(std::atomic_flag &flag) : flag(flag) {
      while (flag.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    ~Lock() { flag.clear(std::memory_order_release); }
    std::atomic_flag &flag;
  };
  mutable std::atomic_flag busy_;
  std::shared_ptr<T> held_;
};

}  // namespace fsdp::abi

struct fsdp_context {
  static constexpr uint32_t alive = 0xF5D0C047;
  std::atomic<uint32_t> magic = alive;
  fsdp::abi::Held<fsdp::engine::Context> held;
};

struct fsdp_mesh {
  static constexpr uint32_t alive = 0xF5D03E58;
  std::atomic<uint32_t> magic = alive;
  fsdp::abi::Held<fsdp::engine::Context> held;
  fsdp::layout::Mesh mesh;
};

struct fsdp_group {
  static constexpr uint32_t alive = 0xF5D06409;
  std::atomic<uint32_t> magic = alive;
  fsdp::abi::Held<fsdp::engine::Model> held;
  uint32_t index = 0;
};

struct fsdp_model {
  static constexpr uint32_t alive = 0xF5D0304D;
  std::atomic<uint32_t> magic = alive;
  fsdp::abi::Held<fsdp::engine::Model> held;
  std::mutex mutex;  // groups
  std::vector<std::unique_ptr<fsdp_group>> groups;
};

struct fsdp_capture {
  static constexpr uint32_t alive = 0xF5D0CA97;
  std::atomic<uint32_t> magic = alive;
  fsdp::abi::Held<fsdp::engine::Capture> held;
  std::weak_ptr<fsdp::engine::Model> model;
};

namespace fsdp::abi {

constexpr uint32_t destroyed = 0xDEAD0000;

// Keeps the few bytes of a destroyed handle from being reused at once. What it held is given back before. The graves are
// never destructed: a handle may be destroyed while the program ends.
template <class Handle>
void bury(std::unique_ptr<Handle> handle) noexcept {
  constexpr size_t most = 1024;
  static std::mutex &mutex = *new std::mutex;
  static auto &graves = *new std::deque<std::unique_ptr<Handle>>;
  try {
    const std::lock_guard lock(mutex);
    graves.push_back(std::move(handle));
    if (graves.size() > most) graves.pop_front();
  } catch (...) {  // out of memory: it is freed now
  }
}

constexpr const char *handle_kind(uint32_t magic) {
  switch (magic) {
    case fsdp_context::alive: return "an fsdp_context";
    case fsdp_mesh::alive: return "an fsdp_mesh";
    case fsdp_model::alive: return "an fsdp_model";
    case fsdp_group::alive: return "an fsdp_group";
    case fsdp_capture::alive: return "an fsdp_capture";
    case destroyed: return "a destroyed handle";
    default: return "no handle of libfsdp";
  }
}

// The first destroy of a handle; others, and what is no such handle, do nothing.
template <class Handle>
bool begin_destroy(Handle *handle) {
  uint32_t expected = Handle::alive;
  return handle && handle->magic.compare_exchange_strong(expected, destroyed);
}

template <class Handle>
Handle &check_handle(Handle *handle, const char *call, const char *expected) {
  if (!handle) fail(FSDP_INVALID_HANDLE, "{}: the {} is NULL", call, expected);
  if (const uint32_t magic = handle->magic.load(std::memory_order_relaxed); magic != Handle::alive) [[unlikely]]
    fail(FSDP_INVALID_HANDLE, "{}: the handle given as {} is {}", call, expected, handle_kind(magic));
  return *handle;
}

inline fsdp_context &check(fsdp_context *handle, const char *call) { return check_handle(handle, call, "context"); }
inline const fsdp_context &check(const fsdp_context *handle, const char *call) { return check_handle(handle, call, "context"); }
inline const fsdp_mesh &check(const fsdp_mesh *handle, const char *call) { return check_handle(handle, call, "mesh"); }
inline fsdp_model &check(fsdp_model *handle, const char *call) { return check_handle(handle, call, "model"); }
inline fsdp_group &check(fsdp_group *handle, const char *call) { return check_handle(handle, call, "group"); }
inline const fsdp_group &check(const fsdp_group *handle, const char *call) { return check_handle(handle, call, "group"); }

inline fsdp_capture &check(fsdp_capture *handle, const char *call) { return check_handle(handle, call, "capture"); }

// What a checked handle holds; INVALID_HANDLE if it is destroyed meanwhile.
template <class Handle>
auto acquire(Handle *handle, const char *call) {
  auto held = check(handle, call).held.copy();
  if (!held) fail(FSDP_INVALID_HANDLE, "{}: the handle was destroyed by another thread", call);
  return held;
}

}  // namespace fsdp::abi
