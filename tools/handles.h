// SPDX-License-Identifier: Apache-2.0
// The C ABI's handles and errors as C++ types, as far as the tools need them.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "fsdp.h"

namespace tools {

// Throws with the library's own message.
inline void check(fsdp_status status, const fsdp_context *context = nullptr) {
  if (status == FSDP_OK) return;
  fsdp_error error = FSDP_ERROR_INIT;
  if (fsdp_get_last_error(context, &error) != FSDP_OK || error.status == FSDP_OK)
    throw std::runtime_error(fsdp_get_status_name(status));
  throw std::runtime_error(std::string(fsdp_get_status_name(status)) + ": " + error.message);
}

template <auto Destroy>
struct Destroyer {
  template <class T>
  void operator()(T *handle) const {
    Destroy(handle);
  }
};

using Context = std::unique_ptr<fsdp_context, Destroyer<&fsdp_destroy_context>>;
using Mesh = std::unique_ptr<fsdp_mesh, Destroyer<&fsdp_destroy_mesh>>;
using Model = std::unique_ptr<fsdp_model, Destroyer<&fsdp_destroy_model>>;

// The text of a call that fills a caller's buffer: call(buffer, &size_bytes).
inline std::string read_text(const std::function<fsdp_status(char *, uint64_t *)> &call) {
  uint64_t size_bytes = 0;
  check(call(nullptr, &size_bytes));
  std::string text(size_bytes, '\0');
  check(call(text.data(), &size_bytes));
  text.resize(size_bytes == 0 ? 0 : size_bytes - 1);  // without the final NUL
  return text;
}

}  // namespace tools
