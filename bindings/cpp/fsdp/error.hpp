// SPDX-License-Identifier: Apache-2.0
// Errors, and what every call of these bindings goes through. Included by fsdp.hpp.
#ifndef FSDP_ERROR_HPP
#define FSDP_ERROR_HPP

#include <fsdp.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace fsdp {

enum class Status : fsdp_status {
  ok = FSDP_OK,
  invalid_argument = FSDP_INVALID_ARGUMENT,
  invalid_handle = FSDP_INVALID_HANDLE,
  invalid_state = FSDP_INVALID_STATE,
  unsupported = FSDP_UNSUPPORTED,
  out_of_memory = FSDP_OUT_OF_MEMORY,
  busy = FSDP_BUSY,
  mismatch = FSDP_MISMATCH,
  peer_failed = FSDP_PEER_FAILED,
  timeout = FSDP_TIMEOUT,
  aborted = FSDP_ABORTED,
  interrupted = FSDP_INTERRUPTED,
  system = FSDP_SYSTEM,
  internal = FSDP_INTERNAL
};
enum class Origin : fsdp_origin {
  fsdp = FSDP_ORIGIN_FSDP,
  os = FSDP_ORIGIN_OS,
  cuda = FSDP_ORIGIN_CUDA,
  nccl = FSDP_ORIGIN_NCCL,
  ucx = FSDP_ORIGIN_UCX
};

/** What a call that fails throws: status, rank to blame, message. */
class Error : public std::runtime_error {
 public:
  explicit Error(const fsdp_error &detail)
      : std::runtime_error(std::string(fsdp_get_status_name(detail.status)) + ": " + detail.message), detail_(detail) {}

  const fsdp_error &detail() const noexcept { return detail_; }
  Status status() const noexcept { return static_cast<Status>(detail_.status); }
  Origin origin() const noexcept { return static_cast<Origin>(detail_.origin); }
  /** The rank to blame, -1 if none. */
  int rank() const noexcept { return detail_.rank; }
  /** The context has failed for good, and can only be destroyed. */
  bool context_failed() const noexcept { return detail_.context_failed != 0; }
  std::string message() const { return detail_.message; }

 private:
  fsdp_error detail_;
};

namespace detail {

template <typename Struct>
Struct sized() {
  Struct made{};
  made.struct_size = sizeof(Struct);
  return made;
}

// The exception that a hook of the caller has thrown. Hooks run on the calling thread, so check() finds it there
// afterwards.
inline thread_local bool hook_has_thrown = false;
inline std::exception_ptr &thrown_by_hook() {
  thread_local std::exception_ptr thrown;
  return thrown;
}
inline void keep_exception() noexcept {
  if (!hook_has_thrown) thrown_by_hook() = std::current_exception();
  hook_has_thrown = true;
}
[[noreturn]] inline void rethrow_of_hook() {
  hook_has_thrown = false;
  std::rethrow_exception(std::exchange(thrown_by_hook(), nullptr));
}

[[noreturn]] inline void fail(fsdp_status status) {
  auto error = sized<fsdp_error>();
  if (fsdp_get_last_error(nullptr, &error) != FSDP_OK || error.status != status) error.status = status;
  throw Error(error);
}
/** An error that these bindings find before they call the library. */
[[noreturn]] inline void refuse(fsdp_status status, const std::string &message) {
  auto error = sized<fsdp_error>();
  error.status = status;
  error.origin = FSDP_ORIGIN_FSDP;
  error.rank = -1;
  message.copy(error.message, sizeof error.message - 1);
  throw Error(error);
}
/** Refuses an empty array, which is a mistake: without data a gradient would count as zeros. */
inline void refuse_no_data(const void *data) {
  if (!data)
    refuse(FSDP_INVALID_ARGUMENT, "this gradient has no elements; put_no_grad, or FullGrad(), says that there is none");
}
inline void check(fsdp_status status) {
  if (hook_has_thrown) rethrow_of_hook();
  if (status != FSDP_OK) fail(status);
}

/** Text from a call with a buffer: asks for its size, then for the text, which may have grown in between. */
template <typename Call>
std::string read_text(Call call) {
  std::uint64_t size_bytes = 0;
  check(call(nullptr, &size_bytes));
  for (;;) {
    std::string text(static_cast<std::size_t>(size_bytes), '\0');
    const std::uint64_t room = size_bytes;
    const fsdp_status status = call(text.data(), &size_bytes);
    if (status != FSDP_OK && size_bytes > room) continue;
    check(status);
    text.resize(std::char_traits<char>::length(text.c_str()));
    return text;
  }
}

/** A handle of the library, which is destroyed with this object. */
template <typename Raw, void (*destroy)(Raw *)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(Raw *raw) noexcept : raw_(raw) {}
  Handle(Handle &&other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Handle &operator=(Handle &&other) noexcept {
    std::swap(raw_, other.raw_);
    other.reset();
    return *this;
  }
  ~Handle() { reset(); }

  Raw *get() const noexcept { return raw_; }
  void reset() noexcept {
    if (raw_) destroy(std::exchange(raw_, nullptr));
  }

 private:
  Raw *raw_ = nullptr;
};

}  // namespace detail

}  // namespace fsdp

#endif
