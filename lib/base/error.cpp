// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

#include "base/failure.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <new>
#include <system_error>

namespace fsdp {
namespace {

// This is a key and not a thread_local variable: in a library that is loaded late, glibc allocates a thread_local
// variable when a thread first uses it, and ends the process if no memory is left.
class ThreadNumbers {
 public:
  ThreadNumbers() noexcept : made_(pthread_key_create(&key_, nullptr) == 0) {}
  ~ThreadNumbers() {
    if (made_) pthread_key_delete(key_);
    made_ = false;  // see abi/boundary.h
  }
  ThreadNumbers(const ThreadNumbers &) = delete;
  ThreadNumbers &operator=(const ThreadNumbers &) = delete;

  uint64_t get() noexcept {
    if (const void *known = made_ ? pthread_getspecific(key_) : nullptr) return reinterpret_cast<uint64_t>(known);
    const uint64_t number = last_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (made_ && pthread_setspecific(key_, reinterpret_cast<void *>(number)) == 0) return number;
    // Used if there is no key, or no memory for its value: the kernel's number of the thread, with the top bit set to
    // distinguish it from other numbers. After this thread's end another thread may get the same number.
    return uint64_t{1} << 63 | static_cast<uint64_t>(::gettid());
  }

 private:
  pthread_key_t key_{};
  bool made_;
  std::atomic<uint64_t> last_{0};
};

ThreadNumbers thread_numbers;

}  // namespace

uint64_t thread_number() noexcept { return thread_numbers.get(); }

std::string vformat_text(fmt::string_view format, fmt::format_args args) { return fmt::vformat(format, args); }

// The text for bad_alloc is so short that it needs no memory from the heap.
Error current_error() {
  try {
    throw;
  } catch (const Error &error) {
    return error;
  } catch (const std::bad_alloc &) {
    return {FSDP_OUT_OF_MEMORY, "no memory left"};
  } catch (const std::exception &error) {
    return {FSDP_INTERNAL, error.what()};
  } catch (...) {
    return {FSDP_INTERNAL, "an unknown exception"};
  }
}

void fail_errno(int code, const std::string &what) {
  const auto status = code == ENOMEM ? FSDP_OUT_OF_MEMORY : FSDP_SYSTEM;
  throw Error(status, format_text("{}: {}", what, std::generic_category().message(code)), -1, FSDP_ORIGIN_OS, code);
}

}  // namespace fsdp
