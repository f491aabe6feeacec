// SPDX-License-Identifier: Apache-2.0
// UCX's context and worker of one rank, with the settings that this library needs where the user has none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/message/ucx/api.h"

namespace fsdp::transport::ucx {

inline constexpr int last_words_ms = 1000;  // for what tells peers of the end to leave this host

class Worker {
 public:
  // chunk_bytes: of the largest message. Messages of that id go to `handler` with `self`. Throws UNSUPPORTED, with no
  // port open, if UCX may use TCP and the user has not said FSDP_UCX_TCP=trusted, or may not use it anyway (guarded).
  Worker(uint32_t rank, uint64_t chunk_bytes, bool guarded, unsigned message_id, ucp_am_recv_callback_t handler,
         void *self);
  ~Worker() { end(); }
  Worker(const Worker &) = delete;
  Worker &operator=(const Worker &) = delete;
  // Endpoints are closed by then. Without effect the second time.
  void end() noexcept;

  const Api &api() const noexcept { return api_; }
  ucp_worker_h handle() const noexcept { return worker_; }
  const std::vector<std::byte> &address() const noexcept { return address_; }
  const std::string &warnings() const noexcept { return warnings_; }
  // False: something has happened already. Else sleep() waits until something does, at most ms.
  bool arm() noexcept { return api_.ucp_worker_arm(worker_) == UCS_OK; }
  void sleep(int ms) const noexcept;
  void wake() noexcept { api_.ucp_worker_signal(worker_); }
  bool progress() noexcept { return api_.ucp_worker_progress(worker_) != 0; }
  // Until the request is done, at most ms; then gives it back.
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
  // The user's word; only hardware that guards memory; we have left TCP out.
  bool trusts_tcp_, guarded_, without_tcp_ = false;
};

}  // namespace fsdp::transport::ucx
