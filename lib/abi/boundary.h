// SPDX-License-Identifier: Apache-2.0
// Converts exceptions to statuses; no other file does. Each extern "C" function passes its body to one of these
// functions.
#pragma once

#include <pthread.h>

#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "abi/handles.h"
#include "base/error.h"

namespace fsdp::abi {

// The last error of calls on the calling thread, stored under a key of POSIX threads and not in a thread_local object.
// If memory runs out, a key reports that, but registering the destructor of a thread_local object ends the process.
struct ThreadError {
  std::optional<Error> error;
  bool failed_context = false;
};

class ThreadErrors {
 public:
  ThreadErrors() noexcept : made_(pthread_key_create(&key_, end) == 0) {}
  ~ThreadErrors() {
    if (!made_) return;
    end(find());
    pthread_key_delete(key_);
    made_ = false;  // later exit handlers find no error, and not another library's value under the same key
  }
  ThreadErrors(const ThreadErrors &) = delete;
  ThreadErrors &operator=(const ThreadErrors &) = delete;

  // Returns NULL if this thread has had no error, or if there was no memory for it.
  ThreadError *find() const noexcept { return made_ ? static_cast<ThreadError *>(pthread_getspecific(key_)) : nullptr; }
  // Returns this thread's error, and makes it if it does not exist. Throws std::bad_alloc.
  ThreadError &get() const {
    if (ThreadError *found = find()) return *found;
    auto fresh = std::make_unique<ThreadError>();
    if (!made_ || pthread_setspecific(key_, fresh.get()) != 0) throw std::bad_alloc();
    return *fresh.release();
  }

 private:
  static void end(void *error) noexcept { delete static_cast<ThreadError *>(error); }

  pthread_key_t key_{};
  bool made_;
};

// Stores the error for fsdp_get_last_error. Fails the context permanently if it cannot be used after the error.
// `inside`: the error ended a call that has the context to itself (call_context). If false, it ended a call that may
// run at the same time as such a call (call_beside).
fsdp_status report(engine::Context *context, const Error &error, bool inside) noexcept;
const Error *thread_error() noexcept;

inline fsdp_status report_current(engine::Context *context, bool inside = true) noexcept {
  try {
    throw;
  } catch (const Error &error) {
    return report(context, error, inside);
  } catch (...) {
    return report(context, current_error(), inside);
  }
}

// Runs a call without a context, or a call that any thread may make.
template <class Body>
fsdp_status guard(Body &&body) noexcept {
  try {
    body();
    return FSDP_OK;
  } catch (...) {
    return report_current(nullptr);
  }
}

// Runs a call inside a context. The local reference keeps the context alive if another thread destroys its handle.
template <class Body>
fsdp_status call_context(fsdp_context *handle, const char *name, Body &&body) noexcept {
  std::shared_ptr<engine::Context> context;
  try {
    context = acquire(handle, name);
    engine::CallScope scope(*context, name);
    body(context);
    scope.done();
    return FSDP_OK;
  } catch (...) {
    return report_current(context.get());
  }
}

// Runs a call that any thread may make while another call is inside. The context also stores the error.
template <class Body>
fsdp_status call_beside(const fsdp_context *handle, const char *name, Body &&body) noexcept {
  std::shared_ptr<engine::Context> context;
  try {
    context = acquire(handle, name);
    context->check_process();
    body(*context);
    return FSDP_OK;
  } catch (...) {
    return report_current(context.get(), false);
  }
}

// Runs a call of the model, and tells the model's capture and replays if the call fails.
template <class Body>
void run_call(engine::Model &model, const char *name, Body &&body) {
  try {
    model.name_waits();
    body();
  } catch (Error &error) {
    model.note_failure(name, error);
    throw;
  } catch (...) {
    Error error = current_error();
    model.note_failure(name, error);
    throw;
  }
}

// Runs a call of a model. Calls that only read have a const handle.
template <class Handle, class Body>
fsdp_status in_model(Handle *handle, const char *name, Body &&body) noexcept {
  Pinned<HandledModel> model;
  try {
    model = pin(handle, name);
    engine::CallScope scope(model->context(), name);
    run_call(*model, name, [&] { body(*model); });
    scope.done();
    return FSDP_OK;
  } catch (...) {
    return report_current(model ? &model->context() : nullptr);
  }
}

// Runs a call of a group of a sealed model. The body gets the model, its runtime and the group.
template <class Body>
fsdp_status in_group(fsdp_group *handle, const char *name, Body &&body) noexcept {
  Pinned<HandledModel> model;
  try {
    model = pin(handle, name);
    engine::CallScope scope(model->context(), name);
    run_call(*model, name, [&] {
      engine::Runtime &runtime = model->runtime(name);
      engine::Group &group = runtime.groups[model.number()];
      model->context().flight().set_object(group.flight_name);
      body(*model, runtime, group);
    });
    scope.done();
    return FSDP_OK;
  } catch (...) {
    return report_current(model ? &model->context() : nullptr);
  }
}

template <class T>
T *check_pointer(T *pointer, const char *call, const char *argument) {
  if (!pointer) fail(FSDP_INVALID_ARGUMENT, "{}: {} is NULL", call, argument);
  return pointer;
}

}  // namespace fsdp::abi
