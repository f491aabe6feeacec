// SPDX-License-Identifier: Apache-2.0
// The memory that an NCCL communicator knows. Without it NCCL copies through buffers of its own, so a failure here is
// no reason to end the job.
#include "transport/nccl/connection.h"

namespace fsdp::transport::nccl {
namespace {

constexpr uint32_t forget_ms = 1000;

}  // namespace

void Connection::call_register(Registered &added, uint64_t bytes, bool windows, uint32_t timeout_ms) {
  const std::string what = format_text("memory of NCCL communicator '{}'", plan_.name);
  const auto body = [library = library_.get(), to = &added, bytes, windows](Handle &, Comm *comm) {
    return windows ? library->ncclCommWindowRegister(comm, to->data, bytes, &to->window, window_symmetric)
                   : library->ncclCommRegister(comm, to->data, bytes, &to->handle);
  };
  perform(
      windows ? "ncclCommWindowRegister" : "ncclCommRegister", what, timeout_ms, [this] { waiter_.poll(); }, body);
}

Registration Connection::register_memory(void *data, uint64_t bytes, bool windows, uint32_t timeout_ms,
                                         std::string &why) {
  Registered &added = *memory_->emplace_back(std::make_unique<Registered>(Registered{data}));
  handle_->watch(false);
  try {
    call_register(added, bytes, windows, timeout_ms);
  } catch (const Error &error) {
    waiter_.failure().check();
    if (error.origin != FSDP_ORIGIN_NCCL) throw;
    why = error.message;
    if (is_spoilt() || (windows && !library_->since(Library::windows_fail_alone))) return Registration::spoilt;
  }
  if (added.window || added.handle) return Registration::done;
  if (why.empty()) why = "NCCL has no use for such memory here";
  return Registration::refused;
}

// An error that NCCL keeps, as it does where communicators do not block, is what every later call returns; and what is
// in progress cannot be taken back.
bool Connection::is_spoilt() noexcept {
  if (aside_ && !aside_->done()) return true;
  try {
    Result state = success;
    call("ncclCommGetAsyncError", "memory", [&](Comm *comm) { return state = state_of(comm, "memory", "memory"); });
    return state != success;
  } catch (const std::exception &) {
    return true;
  }
}

bool Connection::deregister(Registered &registered) noexcept {
  if (!registered.handle && !registered.window) return true;
  const std::string what = "memory that NCCL forgets";
  const char *function = registered.window ? "ncclCommWindowDeregister" : "ncclCommDeregister";
  const auto body = [library = library_.get(), window = registered.window, buffer = registered.handle](Handle &,
                                                                                                       Comm *comm) {
    return window ? library->ncclCommWindowDeregister(comm, window) : library->ncclCommDeregister(comm, buffer);
  };
  try {
    perform(
        function, what, forget_ms, [this] { waiter_.failure().check(); }, body);
    return true;
  } catch (const std::exception &) {
    return false;
  }
}

bool Connection::forget_memory(void *data) noexcept {
  bool forgotten = true;
  std::erase_if(*memory_, [&](const auto &registered) {
    if (registered->data != data) return false;
    forgotten = deregister(*registered) && forgotten;
    return true;
  });
  return forgotten;
}

}  // namespace fsdp::transport::nccl
