// SPDX-License-Identifier: Apache-2.0
// The objects behind the opaque handles. The pointers that callers have are really numbers of the handle table, and no
// memory is read through them.
#pragma once

#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "abi/handle_table.h"
#include "checkpoint/job/open.h"
#include "engine/context/context.h"
#include "engine/model/capture.h"
#include "engine/model/model.h"
#include "engine/model/saving.h"

namespace fsdp::abi {

// A model and the handles of its groups. These handles end with the model's own handle.
class HandledModel : public engine::Model {
 public:
  using Model::Model;
  // The model leaves its context before any part of the model ends, because another thread may be reading the context's
  // models.
  ~HandledModel() override { leave_context(); }
  std::mutex mutex;
  std::vector<fsdp_group *> groups;
  bool ended = false;  // the handle is destroyed: no group is added

  // The group handle that the caller got from fsdp_create_group.
  fsdp_group *group_handle(uint32_t index) {
    const std::lock_guard lock(mutex);
    return groups[index];
  }
};

struct HandledMesh {
  std::shared_ptr<engine::Context> context;
  layout::Mesh mesh;
};

struct HandledCapture {
  std::shared_ptr<engine::Capture> capture;
  std::weak_ptr<engine::Model> model;
};

// A checkpoint that is being saved, or one that was opened.
struct HandledCheckpoint {
  std::shared_ptr<engine::Context> context;
  std::shared_ptr<engine::Saving> saving;
  checkpoint::OpenedCheckpoint opened;
};

// A group is identified by its model and its index.
struct HandledGroup {
  std::shared_ptr<HandledModel> model;
  uint32_t index = 0;
};

template <class Handle>
struct HandleTraits;
template <>
struct HandleTraits<fsdp_context> {
  using Object = engine::Context;
  static constexpr HandleKind kind = HandleKind::context;
  static constexpr auto name = "context";
};
template <>
struct HandleTraits<fsdp_mesh> {
  using Object = HandledMesh;
  static constexpr HandleKind kind = HandleKind::mesh;
  static constexpr auto name = "mesh";
};
template <>
struct HandleTraits<fsdp_model> {
  using Object = HandledModel;
  static constexpr HandleKind kind = HandleKind::model;
  static constexpr auto name = "model";
};
template <>
struct HandleTraits<fsdp_group> {
  using Object = HandledModel;
  static constexpr HandleKind kind = HandleKind::group;
  static constexpr auto name = "group";
};
template <>
struct HandleTraits<fsdp_capture> {
  using Object = HandledCapture;
  static constexpr HandleKind kind = HandleKind::capture;
  static constexpr auto name = "capture";
};
template <>
struct HandleTraits<fsdp_checkpoint> {
  using Object = HandledCheckpoint;
  static constexpr HandleKind kind = HandleKind::checkpoint;
  static constexpr auto name = "checkpoint";
};
template <class Handle>
using TraitsOf = HandleTraits<std::remove_const_t<Handle>>;
template <class Handle>
using ObjectOf = typename TraitsOf<Handle>::Object;

// One table serves the whole process, because a call that gets only a handle does not know the context. The table is
// never destructed, because handles may be destroyed while the program ends.
union ProcessHandles {
  constexpr ProcessHandles() : table() {}
  ~ProcessHandles() {}
  HandleTable table;
};
extern constinit ProcessHandles process_handles;
inline HandleTable &handle_table() noexcept { return process_handles.table; }

inline uint64_t number_of(const void *handle) noexcept { return reinterpret_cast<uintptr_t>(handle); }

// Throws INVALID_HANDLE, which says why the table does not know the handle.
[[noreturn]] void refuse_handle(const void *handle, const char *call, const char *expected);

// The object of the handle; NULL if there is no such handle. The returned reference keeps the object alive.
template <class Handle>
std::shared_ptr<ObjectOf<Handle>> find(Handle *handle) noexcept {
  return std::static_pointer_cast<ObjectOf<Handle>>(
      handle_table().find(number_of(handle), TraitsOf<Handle>::kind).object);
}

// The object of a handle. It exists at least as long as the Pinned, even if the handle is destroyed during the call.
template <class Object>
class Pinned {
 public:
  Pinned() = default;
  explicit Pinned(HandleTable::Pin pin) noexcept : pin_(std::move(pin)) {}
  explicit operator bool() const noexcept { return pin_.object(); }
  Object &operator*() const noexcept { return *static_cast<Object *>(pin_.object()); }
  Object *operator->() const noexcept { return static_cast<Object *>(pin_.object()); }
  uint32_t number() const noexcept { return pin_.number(); }

 private:
  HandleTable::Pin pin_;
};

// Pins the handle's object for the duration of a call. Throws INVALID_HANDLE if there is no such handle.
template <class Handle>
Pinned<ObjectOf<Handle>> pin(Handle *handle, const char *call) {
  Pinned<ObjectOf<Handle>> pinned(handle_table().pin(number_of(handle), TraitsOf<Handle>::kind));
  if (!pinned) [[unlikely]]
    refuse_handle(handle, call, TraitsOf<Handle>::name);
  return pinned;
}

// Throws INVALID_HANDLE if the object's context handle was destroyed.
inline void check_context(const engine::Context &, const char *) {}
inline void check_context(const HandledModel &model, const char *call) { model.context().check_handle(call); }
inline void check_context(const HandledMesh &mesh, const char *call) { mesh.context->check_handle(call); }
inline void check_context(const HandledCheckpoint &held, const char *call) { held.context->check_handle(call); }
inline void check_context(const HandledCapture &held, const char *call) {
  if (const auto model = held.model.lock()) model->context().check_handle(call);
}

// Like find(), but throws INVALID_HANDLE if there is no such handle, or if its context's handle was destroyed.
template <class Handle>
std::shared_ptr<ObjectOf<Handle>> acquire(Handle *handle, const char *call) {
  auto object = find(handle);
  if (!object) [[unlikely]]
    refuse_handle(handle, call, TraitsOf<Handle>::name);
  check_context(*object, call);
  return object;
}

inline HandledGroup acquire_group(const fsdp_group *handle, const char *call) {
  auto found = handle_table().find(number_of(handle), HandleKind::group);
  if (!found.object) [[unlikely]]
    refuse_handle(handle, call, "group");
  HandledGroup group{std::static_pointer_cast<HandledModel>(std::move(found.object)), found.number};
  check_context(*group.model, call);
  return group;
}

// The first call for a handle removes the handle and returns its object. Later calls, and calls with other values, do
// nothing.
template <class Handle>
std::shared_ptr<ObjectOf<Handle>> remove(Handle *handle) noexcept {
  return std::static_pointer_cast<ObjectOf<Handle>>(handle_table().remove(number_of(handle), TraitsOf<Handle>::kind));
}

// For a forked child: threads and shared memory stayed with the parent, so there is nothing to free.
template <class Handle>
void forget(Handle *handle) noexcept {
  handle_table().forget(number_of(handle), TraitsOf<Handle>::kind);
}

// A handle that the caller does not have yet. It is removed again unless the caller gets it.
template <class Handle>
class NewHandle {
 public:
  explicit NewHandle(std::shared_ptr<ObjectOf<Handle>> object, uint32_t number = 0)
      : number_(handle_table().add(TraitsOf<Handle>::kind, std::move(object), number)) {}
  NewHandle(NewHandle &&other) noexcept : number_(std::exchange(other.number_, 0)) {}
  NewHandle &operator=(NewHandle &&) = delete;
  ~NewHandle() {
    if (number_) handle_table().remove(number_, TraitsOf<Handle>::kind);
  }
  Handle *give_out() noexcept { return reinterpret_cast<Handle *>(std::exchange(number_, 0)); }

 private:
  uint64_t number_;
};

// Reads a mesh argument. Returns NULL if the caller passed none.
inline std::shared_ptr<const layout::Mesh> mesh_of(const fsdp_mesh *handle, const engine::Context &context,
                                                   const char *call) {
  if (!handle) return nullptr;
  auto mesh = acquire(handle, call);
  if (mesh->context.get() != &context) fail(FSDP_INVALID_HANDLE, "{}: the mesh belongs to another context", call);
  const layout::Mesh *own = &mesh->mesh;
  return {std::move(mesh), own};
}

}  // namespace fsdp::abi
