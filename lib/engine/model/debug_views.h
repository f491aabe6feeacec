// SPDX-License-Identifier: Apache-2.0
// Debug mode: what of a sealed model lies where, for a handler that explains a fault (fsdp-run preloads one; the
// library installs none). A file that a handler can read where it can call next to nothing: views-PID.txt in the
// context's directory. Every rank and model of the process adds lines to it, so that addresses of other processes are
// in other files.
//
//   BEGIN END KIND RANK MODEL GROUP     addresses in hex, END behind the last byte; the model's number is the flight
//   record's
//
// KIND is "weights" (mapped, gone while they are not held), "whole-weights" (gone in the update window), "gathered" or
// "gradient". A gathered copy is poisoned and does not fault by itself. What was there until the model ended is
// "destroyed". The last line whose range holds an address is the one that counts.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

class DebugViews {
 public:
  // Nothing is written where the context has no directory for it. A file that cannot be written is a warning in the
  // log.
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
