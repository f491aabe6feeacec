// SPDX-License-Identifier: Apache-2.0
// What the opaque handles stand for. The pointers that callers have are numbers of the handle table: nothing here reads
// memory through them.
#pragma once

#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "abi/handle_table.h"
#include "checkpoint/job/open.h"
#include "engine/model/capture.h"
#include "engine/context/context.h"
#include "engine/model/model.h"
#include "engine/model/saving.h"

namespace fsdp::abi {

// A model and the handles of its groups, which end with its own.
class HandledModel : public engine::Model {
 public:
  using Model::Model;
  // Before anything of it ends: another thread may be looking at the context's models.
  ~HandledModel() override { leave_context(); }
  std::mutex mutex;
  std::vector<fsdp_group *> groups;
  bool ended = false;  // the handle is destroyed: no group is added
};

struct HandledMesh {
  std::shared_ptr<engine::Context> context;
  layout::Mesh mesh;
};

struct HandledCapture {
  std::shared_ptr<engine::Capture> capture;
  std::weak_ptr<engine::Model> model;
};

// One that is saved, or one that was opened.
struct HandledCheckpoint {
  std::shared_ptr<engine::Context> context;
  std::shared_ptr<engine::Saving> saving;
  checkpoint::OpenedCheckpoint opened;
};

// A group is its model and a number.
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

// Of the process, since a handle comes without a context. Never destructed: handles may be destroyed while the program
// ends.
union ProcessHandles {
  constexpr ProcessHandles() : table() {}
  ~ProcessHandles() {}
  HandleTable table;
};
extern constinit ProcessHandles process_handles;
inline HandleTable &handle_table() noexcept { return process_handles.table; }

inline uint64_t number_of(const void *handle) noexcept { return reinterpret_cast<uintptr_t>(handle); }

// Why the table does not know the handle.
[[noreturn]] void refuse_handle(const void *handle, const char *call, const char *expected);

// What the handle stands for, which lives as long as the caller of this keeps it; NULL if it is no such handle.
template <class Handle>
std::shared_ptr<ObjectOf<Handle>> find(Handle *handle) noexcept {
  return std::static_pointer_cast<ObjectOf<Handle>>(
      handle_table().find(number_of(handle), TraitsOf<Handle>::kind).object);
}

// ... as long as this lives, and its handle may be destroyed meanwhile.
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

// For the length of a call; INVALID_HANDLE if it is no such handle.
template <class Handle>
Pinned<ObjectOf<Handle>> pin(Handle *handle, const char *call) {
  Pinned<ObjectOf<Handle>> pinned(handle_table().pin(number_of(handle), TraitsOf<Handle>::kind));
  if (!pinned) [[unlikely]]
    refuse_handle(handle, call, TraitsOf<Handle>::name);
  return pinned;
}

// INVALID_HANDLE where the handle of the context that this was made from is destroyed.
inline void check_context(const engine::Context &, const char *) {}
inline void check_context(const HandledModel &model, const char *call) { model.context().check_handle(call); }
inline void check_context(const HandledMesh &mesh, const char *call) { mesh.context->check_handle(call); }
inline void check_context(const HandledCheckpoint &held, const char *call) { held.context->check_handle(call); }
inline void check_context(const HandledCapture &held, const char *call) {
  if (const auto model = held.model.lock()) model->context().check_handle(call);
}

// The same; INVALID_HANDLE if it is none.
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

// The first destroy of a handle takes what it held; others, and what is no such handle, do nothing.
template <class Handle>
std::shared_ptr<ObjectOf<Handle>> remove(Handle *handle) noexcept {
  return std::static_pointer_cast<ObjectOf<Handle>>(handle_table().remove(number_of(handle), TraitsOf<Handle>::kind));
}

// In a forked child: threads and shared memory stayed with the parent, so there is nothing to give back.
template <class Handle>
void forget(Handle *handle) noexcept {
  handle_table().forget(number_of(handle), TraitsOf<Handle>::kind);
}

// A handle that the caller does not have yet; removed again unless it is given out.
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

// A mesh argument: NULL where the caller means none.
inline std::shared_ptr<const layout::Mesh> mesh_of(const fsdp_mesh *handle, const engine::Context &context,
                                                   const char *call) {
  if (!handle) return nullptr;
  auto mesh = acquire(handle, call);
  if (mesh->context.get() != &context) fail(FSDP_INVALID_HANDLE, "{}: the mesh belongs to another context", call);
  const layout::Mesh *own = &mesh->mesh;
  return {std::move(mesh), own};
}

}  // namespace fsdp::abi
