// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <chrono>
#include <thread>

#include "harness.h"

namespace harness {

void check(fsdp_status status, const char *call) {
  if (status == FSDP_OK) return;
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(nullptr, &error);
  throw Failure(status, call, error.message, error.rank);
}

std::string last_message() {
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(nullptr, &error);
  return error.message;
}

void require(bool holds, const char *condition) {
  if (holds) return;
  const std::string message = last_message();
  throw std::runtime_error("not true: " + std::string(condition) +
                           (message.empty() ? "" : "; the last error: " + message));
}

void require_error(fsdp_status status, fsdp_status expected, const std::vector<std::string> &words) {
  fsdp_error error = FSDP_ERROR_INIT;
  if (status) fsdp_get_last_error(nullptr, &error);
  const std::string message = error.message;
  bool right = status == expected && error.status == status;
  for (const std::string &word : words) right = right && message.find(word) != std::string::npos;
  if (!right)
    throw std::runtime_error("expected " + std::string(fsdp_get_status_name(expected)) + ", got " +
                             fsdp_get_status_name(status) + ": " + message);
}

bool is_thread_sanitized() {
  static const bool sanitized = ::dlsym(RTLD_DEFAULT, "__tsan_init");
  return sanitized;
}

bool is_sanitized() {
  static const bool sanitized = ::dlsym(RTLD_DEFAULT, "__asan_init") || is_thread_sanitized();
  return sanitized;
}

SanitizerFrame::SanitizerFrame() {
  static const auto enter = reinterpret_cast<void (*)(void *)>(::dlsym(RTLD_DEFAULT, "__tsan_func_entry"));
  if (enter) enter(__builtin_return_address(0));
}

SanitizerFrame::~SanitizerFrame() {
  static const auto leave = reinterpret_cast<void (*)()>(::dlsym(RTLD_DEFAULT, "__tsan_func_exit"));
  if (leave) leave();
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

}  // namespace harness
