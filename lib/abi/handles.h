// SPDX-License-Identifier: Apache-2.0
// What the opaque handles are. A handle is alive while its magic word says so. The destroy calls overwrite it and bury
// the handle, so that its use is refused as long as it has not been dug up by 1024 others of its kind.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/context.h"
#include "engine/model.h"

struct fsdp_context {
  static constexpr uint32_t alive = 0xF5D0C047;
  uint32_t magic = alive;
  std::shared_ptr<fsdp::engine::Context> impl;
};

struct fsdp_mesh {
  static constexpr uint32_t alive = 0xF5D03E58;
  uint32_t magic = alive;
  std::shared_ptr<fsdp::engine::Context> context;
  uint32_t replicate_size = 1;
  uint32_t shard_size = 1;
};

struct fsdp_group {
  static constexpr uint32_t alive = 0xF5D06409;
  uint32_t magic = alive;
  std::shared_ptr<fsdp::engine::Model> model;
  uint32_t index = 0;
};

struct fsdp_model {
  static constexpr uint32_t alive = 0xF5D0304D;
  uint32_t magic = alive;
  std::shared_ptr<fsdp::engine::Context> context;
  std::shared_ptr<fsdp::engine::Model> impl;
  std::vector<std::unique_ptr<fsdp_group>> groups;
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
    case destroyed: return "a destroyed handle";
    default: return "no handle of libfsdp";
  }
}

template <class Handle>
Handle &check_handle(Handle *handle, const char *call, const char *expected) {
  if (!handle) fail(FSDP_INVALID_HANDLE, "{}: the {} is NULL", call, expected);
  if (handle->magic != Handle::alive) [[unlikely]]
    fail(FSDP_INVALID_HANDLE, "{}: the handle given as {} is {}", call, expected, handle_kind(handle->magic));
  return *handle;
}

inline fsdp_context &check(fsdp_context *handle, const char *call) { return check_handle(handle, call, "context"); }
inline const fsdp_context &check(const fsdp_context *handle, const char *call) { return check_handle(handle, call, "context"); }
inline const fsdp_mesh &check(const fsdp_mesh *handle, const char *call) { return check_handle(handle, call, "mesh"); }
inline fsdp_model &check(fsdp_model *handle, const char *call) { return check_handle(handle, call, "model"); }
inline fsdp_group &check(fsdp_group *handle, const char *call) { return check_handle(handle, call, "group"); }
inline const fsdp_group &check(const fsdp_group *handle, const char *call) { return check_handle(handle, call, "group"); }

}  // namespace fsdp::abi
