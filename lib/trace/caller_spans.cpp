// SPDX-License-Identifier: Apache-2.0
#include "trace/caller_spans.h"

#include "base/error.h"
#include "trace/nvtx.h"

namespace fsdp::trace {

const char *CallerSpans::find(std::string_view name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? nullptr : found->second;
}

const char *CallerSpans::add(std::string_view name) {
  if (names_.size() == most_names)
    fail(FSDP_INVALID_ARGUMENT,
         "fsdp_begin_span: '{}' would be name {}, a context keeps at most {}; put numbers elsewhere than "
         "into names",
         name, most_names + 1, most_names);
  const char *kept = timeline_.keep(name);
  names_.emplace(kept, kept);
  return kept;
}

void CallerSpans::begin(const char *name) {
  if (depth_ == most_open)
    fail(FSDP_INVALID_STATE, "fsdp_begin_span: {} spans are open, '{}' would be one more; call fsdp_end_span for each",
         depth_, name);
  push_range(name, nullptr);
  open_[depth_++] = {name, now_ns()};
}

void CallerSpans::end() {
  if (depth_ == 0) fail(FSDP_INVALID_STATE, "fsdp_end_span: no span is open; fsdp_begin_span opens one");
  const Open &open = open_[--depth_];
  timeline_.record({open.name, nullptr, open.begin_ns, now_ns(), 0, 0, caller_lane, EventKind::user});
  pop_range();
}

}  // namespace fsdp::trace
