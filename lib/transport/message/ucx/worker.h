// SPDX-License-Identifier: Apache-2.0
// UCX's context and worker of one rank, with the settings that this library needs; settings of the user take
// precedence.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace fsdp::transport::ucx {

// The functions of libucp that are used. They are looked up when the first Net is made, so that this library also loads
// on systems without UCX.

#define FSDP_UCX_FUNCTIONS(X)                                                                                         \
  X(ucp_get_version)                                                                                                  \
  X(ucp_get_version_string)                                                                                           \
  X(ucp_config_read)                                                                                                  \
  X(ucp_config_modify)                                                                                                \
  X(ucp_config_release)                                                                                               \
  X(ucp_init_version)                                                                                                 \
  X(ucp_cleanup)                                                                                                      \
  X(ucp_context_query)                                                                                                \
  X(ucp_worker_create)                                                                                                \
  X(ucp_worker_destroy)                                                                                               \
  X(ucp_worker_get_address)                                                                                           \
  X(ucp_worker_release_address)                                                                                       \
  X(ucp_worker_get_efd)                                                                                               \
  X(ucp_worker_arm)                                                                                                   \
  X(ucp_worker_signal)                                                                                                \
  X(ucp_worker_progress)                                                                                              \
  X(ucp_worker_query)                                                                                                 \
  X(ucp_worker_flush_nbx)                                                                                             \
  X(ucp_worker_set_am_recv_handler) X(ucp_ep_create) X(ucp_ep_close_nbx) X(ucp_am_send_nbx) X(ucp_am_recv_data_nbx)   \
      X(ucp_tag_send_nbx) X(ucp_tag_probe_nb) X(ucp_tag_msg_recv_nbx) X(ucp_request_check_status) X(ucp_request_free) \
          X(ucp_context_print_info) X(ucs_status_string)

struct Api {
#define FSDP_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  FSDP_UCX_FUNCTIONS(FSDP_UCX_MEMBER)
#undef FSDP_UCX_MEMBER
  std::string version;
  uint32_t major = 0;
};

// Throws UNSUPPORTED, which names the missing part. UCX stays loaded, because it cannot be unloaded safely. It handles
// no signals unless UCX_HANDLE_ERRORS, UCX_ERROR_SIGNALS or UCX_DEBUG_SIGNO asks for that.
Api load_api();

// transports_of() returns the transports that UCX may use, such as "tcp/eth0", from the text of ucp_context_print_info;
// empty if the text has another form. The functions below tell which of them the user must declare as trusted.
std::vector<std::string> transports_of(std::string_view text);
// Is one of them TCP? Also true if the list is empty, because the transports are then unknown.
bool may_use_tcp(const std::vector<std::string> &transports);
// Does one of them reach other hosts?
bool leaves_host(const std::vector<std::string> &transports);

// Is FSDP_UCX_TCP "trusted"? Throws INVALID_ARGUMENT if the variable has another value.
bool trusts_tcp();
inline constexpr int last_words_ms = 1000;  // the time in which messages about the end may leave this host

class Worker {
 public:
  // `chunk_bytes` is the size of the largest message. Messages with `message_id` go to `handler` with `self`. Throws
  // UNSUPPORTED, without opening a port, if UCX may use TCP although the user has not set FSDP_UCX_TCP=trusted, or if
  // `guarded` forbids TCP.
  Worker(uint32_t rank, uint64_t chunk_bytes, bool guarded, unsigned message_id, ucp_am_recv_callback_t handler,
         void *self);
  ~Worker() { end(); }
  Worker(const Worker &) = delete;
  Worker &operator=(const Worker &) = delete;
  // All endpoints must be closed before this call. A second call has no effect.
  void end() noexcept;

  const Api &api() const noexcept { return api_; }
  ucp_worker_h handle() const noexcept { return worker_; }
  const std::vector<std::byte> &address() const noexcept { return address_; }
  const std::string &warnings() const noexcept { return warnings_; }
  // Returns false if an event has already happened. Otherwise sleep() waits for the next event, for at most `ms`.
  bool arm() noexcept { return api_.ucp_worker_arm(worker_) == UCS_OK; }
  void sleep(int ms) const noexcept;
  void wake() noexcept { api_.ucp_worker_signal(worker_); }
  bool progress() noexcept { return api_.ucp_worker_progress(worker_) != 0; }
  // Waits until the request is done, for at most `ms`, and then frees it.
  void await(ucs_status_ptr_t request, int ms) noexcept;

 private:
  void create_context(uint64_t chunk_bytes);
  void configure(ucp_config_t *config, uint64_t chunk_bytes);
  void check_trust() const;
  void warn(const std::string &text);
  void set(ucp_config_t *config, const char *of, const char *name, const char *value);
  void create_worker(unsigned message_id, ucp_am_recv_callback_t handler, void *self);
  void read_address();
  void check(ucs_status_t status, const char *what) const;

  Api api_;
  uint32_t rank_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::vector<std::byte> address_;
  std::string warnings_;
  // trusts_tcp_: the user trusts TCP. guarded_: only hardware that guards memory is used. without_tcp_: this library
  // has excluded TCP.
  bool trusts_tcp_, guarded_, without_tcp_ = false;
};

}  // namespace fsdp::transport::ucx
