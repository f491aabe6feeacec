// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/call.h"

namespace fsdp::transport::nccl {
namespace {

fsdp_status status_of(Result result) {
  switch (result) {
    case remote_error: return FSDP_PEER_FAILED;
    case timed_out: return FSDP_TIMEOUT;
    case invalid_argument:
    case invalid_usage: return FSDP_INTERNAL;
    default: return FSDP_SYSTEM;
  }
}

std::string text_or(const char *text, const char *otherwise) { return text && *text ? text : otherwise; }

}  // namespace

Error error_of(const Library &library, Comm *comm, Result result, const Call &call) {
  const std::string last = text_or(library.ncclGetLastError(comm), "no further text");
  return Error(status_of(result),
               format_text("{}: rank {}: {} returned {}, \"{}\"; NCCL {} says: {}", call.what, call.world_rank,
                           call.function, static_cast<int>(result),
                           text_or(library.ncclGetErrorString(result), "unknown"), version_text(library.version), last),
               -1, FSDP_ORIGIN_NCCL, result);
}

}  // namespace fsdp::transport::nccl
