// SPDX-License-Identifier: Apache-2.0
// An event from its construction to its destruction. Without a timeline it costs two predicted branches.
#pragma once

#include "trace/nvtx.h"
#include "trace/timeline.h"

namespace fsdp::trace {

class Span {
 public:
  Span(Timeline *timeline, EventKind kind, const char *name, const char *object = nullptr, uint64_t version = 0,
       uint64_t bytes = 0)
      : timeline_(timeline) {
    if (timeline) [[unlikely]]
      begin(kind, name, object, version, bytes);
  }
  ~Span() {
    if (timeline_) [[unlikely]]
      end();
  }
  Span(const Span &) = delete;
  Span &operator=(const Span &) = delete;

 private:
  void begin(EventKind kind, const char *name, const char *object, uint64_t version, uint64_t bytes) noexcept;
  void end() noexcept;

  Timeline *timeline_;
  TimelineEvent event_;
};

}  // namespace fsdp::trace
