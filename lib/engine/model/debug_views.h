// SPDX-License-Identifier: Apache-2.0
// Debug mode: lists the memory of a sealed model, for a handler that explains a fault. fsdp-run preloads such a
// handler; the library installs none. A handler can call almost nothing, but it can read a file: views-PID.txt in the
// context's directory. Every rank and model of a process adds lines to the file of that process.
//
//   BEGIN END KIND RANK MODEL GROUP     addresses in hex, END is behind the last byte; MODEL is as in the flight record
//
// KIND is "weights" (mapped, not accessible while they are not held), "whole-weights" (not accessible in the update
// window), "gathered" or "gradient". A gathered copy is poisoned, so an access to it does not fault. Memory of a model
// that has ended is "destroyed". If several lines have an address in their range, the last of them is valid.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

class DebugViews {
 public:
  // Writes nothing if the context has no directory for the file. If the file cannot be written, logs a warning.
  DebugViews(const Runtime &runtime, uint32_t model) noexcept;
  ~DebugViews();
  DebugViews(const DebugViews &) = delete;
  DebugViews &operator=(const DebugViews &) = delete;

 private:
  struct WatchedBytes {
    std::span<const std::byte> bytes;
    const char *kind;
    std::string group;
  };
  void find_ranges(const Runtime &runtime);
  void add(std::span<const std::byte> bytes, const char *kind, const std::string &group);
  void write(bool ended) noexcept;
  std::string list(bool ended) const;

  Context &context_;
  uint32_t model_;
  std::string path_;
  std::vector<WatchedBytes> ranges_;
};

}  // namespace fsdp::engine
