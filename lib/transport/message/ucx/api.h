// SPDX-License-Identifier: Apache-2.0
// The functions of libucp that are used, found when the first Net is made: the library loads where UCX is missing.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/error.h"

namespace fsdp::transport::ucx {

#define FSDP_UCX_FUNCTIONS(X)                                                                                        \
  X(ucp_get_version)                                                                                                 \
  X(ucp_get_version_string)                                                                                          \
  X(ucp_config_read)                                                                                                 \
  X(ucp_config_modify)                                                                                               \
  X(ucp_config_release)                                                                                              \
  X(ucp_init_version)                                                                                                \
  X(ucp_cleanup)                                                                                                     \
  X(ucp_context_query)                                                                                               \
  X(ucp_worker_create)                                                                                               \
  X(ucp_worker_destroy)                                                                                              \
  X(ucp_worker_get_address)                                                                                          \
  X(ucp_worker_release_address)                                                                                      \
  X(ucp_worker_get_efd)                                                                                              \
  X(ucp_worker_arm)                                                                                                  \
  X(ucp_worker_signal)                                                                                               \
  X(ucp_worker_progress)                                                                                             \
  X(ucp_worker_query) X(ucp_worker_flush_nbx) X(ucp_worker_set_am_recv_handler) X(ucp_ep_create) X(ucp_ep_close_nbx) \
      X(ucp_am_send_nbx) X(ucp_am_recv_data_nbx) X(ucp_tag_send_nbx) X(ucp_tag_probe_nb) X(ucp_tag_msg_recv_nbx)     \
          X(ucp_request_check_status) X(ucp_request_free) X(ucp_context_print_info) X(ucs_status_string)

struct Api {
#define FSDP_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  FSDP_UCX_FUNCTIONS(FSDP_UCX_MEMBER)
#undef FSDP_UCX_MEMBER
  std::string version;
  uint32_t major = 0;
};

// Throws UNSUPPORTED naming what is missing. The library stays loaded: it does not bear being unloaded. It takes no
// signals unless UCX_HANDLE_ERRORS, UCX_ERROR_SIGNALS or UCX_DEBUG_SIGNO says so.
Api load_api();

}  // namespace fsdp::transport::ucx
