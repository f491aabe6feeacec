// SPDX-License-Identifier: Apache-2.0
#include "trace/nvtx.h"

#ifdef FSDP_NVTX

#include <nvtx3/nvToolsExt.h>

#include <cstdio>

namespace fsdp::trace {
namespace {

// Returns NULL if no tool listens.
nvtxDomainHandle_t domain() noexcept {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("libfsdp");
  return handle;
}

}  // namespace

void push_range(const char *name, const char *object) noexcept {
  if (!domain()) return;
  char text[320];
  if (object) std::snprintf(text, sizeof text, "%s %s", name, object);
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = object ? text : name;
  nvtxDomainRangePushEx(domain(), &attributes);
}

void pop_range() noexcept {
  if (domain()) nvtxDomainRangePop(domain());
}

bool has_ranges() noexcept { return true; }

}  // namespace fsdp::trace

#else

namespace fsdp::trace {

void push_range(const char *, const char *) noexcept {}
void pop_range() noexcept {}
bool has_ranges() noexcept { return false; }

}  // namespace fsdp::trace

#endif
