// SPDX-License-Identifier: Apache-2.0
// The caller's own spans, nested as it begins and ends them. One thread at a time, as every call of a context.
#pragma once

#include <array>
#include <string_view>
#include <unordered_map>

#include "trace/timeline.h"

namespace fsdp::trace {

class CallerSpans {
 public:
  static constexpr size_t most_names = 256;
  static constexpr size_t most_open = 64;

  explicit CallerSpans(Timeline &timeline) : timeline_(timeline) { names_.reserve(most_names); }

  // The name's copy; NULL if it is new.
  const char *find(std::string_view name) const;
  const char *add(std::string_view name);
  void begin(const char *name);  // one of these
  void end();

 private:
  struct Open {
    const char *name;
    uint64_t begin_ns;
  };

  Timeline &timeline_;
  std::unordered_map<std::string_view, const char *> names_;
  std::array<Open, most_open> open_;
  size_t depth_ = 0;
};

}  // namespace fsdp::trace
