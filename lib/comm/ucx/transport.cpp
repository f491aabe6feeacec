// SPDX-License-Identifier: Apache-2.0
#include "comm/ucx/transport.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace fsdp::comm::ucx {
namespace {

using Clock = std::chrono::steady_clock;
constexpr unsigned message_id = 1;
// A peer is at most one call ahead in each of a few communicators that do not exist here yet.
constexpr uint32_t most_held = 256;
constexpr size_t most_held_early = 65536;  // of all, before this rank has joined: some of each rank of the largest job
constexpr int look_ms = 100;  // in case that UCX misses an event
constexpr int last_words_ms = 1000;

// Is there a device that moves memory by itself? InfiniBand, RoCE and their like are all shown here.
bool has_rdma() {
  std::error_code none;
  return !std::filesystem::is_empty("/sys/class/infiniband", none) && !none;
}

}  // namespace

void Transport::check(ucs_status_t status, const char *what) const {
  if (status == UCS_OK) return;
  throw Error(FSDP_SYSTEM, format_text("rank {}: UCX: {}: {}", rank_, what, api_.ucs_status_string(status)),
              static_cast<int32_t>(rank_), FSDP_ORIGIN_UCX, status);
}

Transport::Transport(uint32_t rank) : api_(load_api()), rank_(rank) {
  try {
    start_worker();
  } catch (...) {
    stop();
    throw;
  }
}

void Transport::start_worker() {
  ucp_config_t *config = nullptr;
  check(api_.ucp_config_read(nullptr, nullptr, &config), "reading the UCX_* options");
  // UCX 1.13 ends the process (assertion in uct_iface.h) if a connection breaks while a large message is sent over TCP
  // without asking. Asking costs round trips.
  if (!std::getenv("UCX_RNDV_THRESH") && !has_rdma()) api_.ucp_config_modify(config, "RNDV_THRESH", "16384");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  const ucs_status_t status = api_.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  api_.ucp_config_release(config);
  check(status, "ucp_init (is there a transport among UCX_TLS and a device among UCX_NET_DEVICES?)");
  ucp_context_attr_t memory{};
  memory.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  check(api_.ucp_context_query(context_, &memory), "ucp_context_query");
  if (!(memory.memory_types & (uint64_t{1} << UCS_MEMORY_TYPE_HOST)))
    fail(FSDP_UNSUPPORTED, "UCX {} with these transports does not send host memory", api_.version);
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(api_.ucp_worker_create(context_, &worker, &worker_), "ucp_worker_create");
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = message_id;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = on_message;
  handler.arg = this;
  check(api_.ucp_worker_set_am_recv_handler(worker_, &handler), "ucp_worker_set_am_recv_handler");
  check(api_.ucp_worker_get_efd(worker_, &event_fd_), "ucp_worker_get_efd");
  ucp_worker_attr_t limits{};
  limits.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  check(api_.ucp_worker_query(worker_, &limits), "ucp_worker_query");
  if (limits.max_am_header < sizeof(Header))
    fail(FSDP_UNSUPPORTED, "UCX {} with these transports has message headers of {} bytes; {} are needed", api_.version,
         limits.max_am_header, sizeof(Header));
  ucp_address_t *address = nullptr;
  size_t length = 0;
  check(api_.ucp_worker_get_address(worker_, &address, &length), "ucp_worker_get_address");
  const auto *bytes = reinterpret_cast<const std::byte *>(address);
  address_.assign(bytes, bytes + length);
  api_.ucp_worker_release_address(worker_, address);
  sigset_t all, before;  // the caller's signals are handled on the caller's threads
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error &error) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    fail(FSDP_SYSTEM, "rank {}: the thread for UCX: {}", rank_, error.what());
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(thread_.native_handle(), "fsdp-ucx");
}

Transport::~Transport() { stop(); }

// What was sent leaves this host, if it does so soon; nothing waits longer than that.
void Transport::stop() noexcept {
  if (thread_.joinable()) {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake();
    thread_.join();
  }
  if (worker_) {
    ucp_request_param_t param{};
    bool all_well = true;
    for (const Peer &peer : peers_) all_well = all_well && peer.failure.empty();
    if (all_well && !peers_.empty()) await_request(api_.ucp_worker_flush_nbx(worker_, &param), last_words_ms);
    for (uint32_t r = 0; r < peers_.size(); ++r) cut(r);
    api_.ucp_worker_destroy(worker_);
  }
  if (context_) api_.ucp_cleanup(context_);
}

void Transport::await_request(ucs_status_ptr_t request, int ms) noexcept {
  if (!UCS_PTR_IS_PTR(request)) return;
  const auto end = Clock::now() + std::chrono::milliseconds(ms);
  while (api_.ucp_request_check_status(request) == UCS_INPROGRESS && Clock::now() < end)
    if (!api_.ucp_worker_progress(worker_)) {
      pollfd events{event_fd_, POLLIN, 0};
      if (api_.ucp_worker_arm(worker_) == UCS_OK) ::poll(&events, 1, 10);
    }
  api_.ucp_request_free(request);
}

void Transport::cut(uint32_t rank) noexcept {
  Peer &peer = peers_[rank];
  if (!peer.endpoint) return;
  if (peer.failure.empty()) {
    peer.failure = "closed here";
    peer.failure_order = ++failures_;  // behind those that failed before
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = api_.ucp_ep_close_nbx(peer.endpoint, &param);
  peer.endpoint = nullptr;
  await_request(request, last_words_ms);
}

std::unique_lock<std::mutex> Transport::lock() noexcept {
  wanting_.fetch_add(1, std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  wanting_.fetch_sub(1, std::memory_order_relaxed);
  return lock;
}

void Transport::join(std::vector<std::vector<std::byte>> addresses) {
  std::lock_guard lock(mutex_);
  if (!peers_.empty()) fail(FSDP_INTERNAL, "a Net joins once");
  peers_.resize(addresses.size());
  for (uint32_t r = 0; r < peers_.size(); ++r) {
    peers_[r].address = std::move(addresses[r]);
    peers_[r].index = r;
    peers_[r].transport = this;
  }
}

void Transport::run() noexcept {
  pollfd events{event_fd_, POLLIN, 0};
  for (;;) {
    ucs_status_t armed;
    {
      // A mutex alone would let this thread have it again and again while others wait.
      for (int i = 0; i < 100 && wanting_.load(std::memory_order_relaxed) > 0; ++i) ::sched_yield();
      std::lock_guard lock(mutex_);
      if (stopping_) return;
      armed = move() ? UCS_ERR_BUSY : api_.ucp_worker_arm(worker_);
    }
    if (armed == UCS_OK) ::poll(&events, 1, look_ms);
  }
}

// Not until nothing moves: others want the mutex too.
bool Transport::move() noexcept {
  bool moved = false;
  for (int i = 0; i < 64 && api_.ucp_worker_progress(worker_); ++i) moved = true;
  // Also if UCX counted nothing: what it completes on the way is not always counted.
  for (const auto &[key, receiver] : receivers_) receiver->move_on();
  return moved;
}

Receiver *Transport::find(uint64_t key) noexcept {
  const auto found = receivers_.find(key);
  return found == receivers_.end() ? nullptr : found->second;
}

void Transport::add(uint64_t key, Receiver &receiver) {
  if (!receivers_.emplace(key, &receiver).second || removed_.count(key))
    fail(FSDP_INTERNAL, "rank {}: two communicators with the key {:x}", rank_, key);
  std::erase_if(held_, [&](const Held &held) {
    if (held.header.key != key) return false;
    receiver.control(held.header, held.payload.data(), held.payload.size());
    if (held.header.from < peers_.size() && peers_[held.header.from].held > 0) --peers_[held.header.from].held;
    return true;
  });
}

void Transport::remove(uint64_t key) noexcept {
  receivers_.erase(key);
  removed_.insert(key);
  for (const auto &message : messages_)
    if (message->header.key == key) message->receiver = nullptr;
}

void Transport::hold(const Header &header, const void *payload, uint64_t bytes) {
  if (header.kind == Kind::data || header.kind == Kind::ask || removed_.count(header.key)) return;
  if (header.from < peers_.size() && ++peers_[header.from].held > most_held)
    return fail_peer(header.from, UCS_ERR_EXCEEDS_LIMIT, "messages for communicators that do not exist here");
  if (peers_.empty() && held_.size() >= most_held_early) return;
  const auto *begin = static_cast<const std::byte *>(payload);
  held_.push_back({header, {begin, begin + bytes}});
}

Transport::Message &Transport::take(const Header &header, Receiver &receiver) {
  if (free_.empty()) {
    messages_.push_back(std::make_unique<Message>());
    free_.reserve(messages_.size());
    free_.push_back(messages_.back().get());
  }
  Message &message = *free_.back();
  free_.pop_back();
  message.transport = this;
  message.header = header;
  message.receiver = &receiver;
  return message;
}

void Transport::fail_peer(uint32_t rank, ucs_status_t status, const char *what) noexcept {
  Peer &peer = peers_[rank];
  if (peer.failure.empty()) {
    peer.failure_order = ++failures_;
    try {
      peer.failure = format_text("UCX: {}: {}", what, api_.ucs_status_string(status));
    } catch (const std::bad_alloc &) {
      peer.failure = "UCX: lost";
    }
  }
  for (const auto &[key, receiver] : receivers_) receiver->peer_failed(rank);
  changed_.notify_all();
}

void Transport::on_failure(void *self, ucp_ep_h, ucs_status_t status) {
  auto &peer = *static_cast<Peer *>(self);
  peer.transport->fail_peer(peer.index, status, "the connection was lost");
}

bool Transport::connect(uint32_t to) noexcept {
  Peer &peer = peers_[to];
  if (!peer.failure.empty()) return false;
  if (peer.endpoint) return true;
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t *>(peer.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_failure;
  params.err_handler.arg = &peer;
  const ucs_status_t status =
      peer.address.empty() ? UCS_ERR_INVALID_ADDR : api_.ucp_ep_create(worker_, &params, &peer.endpoint);
  if (status == UCS_OK) return true;
  peer.endpoint = nullptr;
  fail_peer(to, status, "connecting");
  return false;
}

void Transport::on_sent(void *request, ucs_status_t, void *self) {
  auto &message = *static_cast<Message *>(self);
  Transport &transport = *message.transport;
  if (message.receiver) message.receiver->sent(message.header.kind, message.to);
  transport.give_back(message);
  transport.api_.ucp_request_free(request);
}

void Transport::send(uint32_t to, Message &message, const void *data, uint64_t bytes) noexcept {
  ucs_status_ptr_t request = UCS_STATUS_PTR(UCS_ERR_CANCELED);
  message.to = to;
  if (connect(to)) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.cb.send = on_sent;
    param.user_data = &message;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    if (message.header.kind != Kind::data) {  // whatever UCX_RNDV_THRESH says: nobody has a place for these
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
      param.flags = UCP_AM_SEND_FLAG_EAGER;
    }
    request =
        api_.ucp_am_send_nbx(peers_[to].endpoint, message_id, &message.header, sizeof(Header), data, bytes, &param);
    if (UCS_PTR_IS_ERR(request)) fail_peer(to, UCS_PTR_STATUS(request), "sending");
  }
  if (UCS_PTR_IS_PTR(request)) return;
  if (message.receiver) message.receiver->sent(message.header.kind, message.to);
  give_back(message);
}

void Transport::send_control(uint32_t to, Header header, const void *payload, uint64_t bytes,
                             Receiver &receiver) noexcept {
  Message &message = take(header, receiver);
  if (bytes) std::memcpy(message.payload, payload, bytes);
  send(to, message, message.payload, bytes);
}

void Transport::send_data(uint32_t to, Header header, const void *data, Receiver &receiver) noexcept {
  send(to, take(header, receiver), data, header.bytes);
}

ucs_status_t Transport::on_message(void *self, const void *header, size_t header_bytes, void *data, size_t bytes,
                                   const ucp_am_recv_param_t *param) {
  Header copy;
  if (header_bytes != sizeof copy) return UCS_OK;
  std::memcpy(&copy, header, sizeof copy);
  auto &transport = *static_cast<Transport *>(self);
  if (copy.magic != header_magic) return UCS_OK;
  if (!transport.peers_.empty() && copy.from >= transport.peers_.size()) return UCS_OK;
  try {
    return transport.receive(copy, data, bytes, param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV);
  } catch (const std::bad_alloc &) {  // UCX is written in C
    if (!transport.peers_.empty()) transport.fail_peer(copy.from, UCS_ERR_NO_MEMORY, "receiving");
    return UCS_OK;
  }
}

void Transport::on_received(void *request, ucs_status_t status, size_t, void *self) {
  auto &message = *static_cast<Message *>(self);
  Transport &transport = *message.transport;
  if (message.receiver && status == UCS_OK) message.receiver->arrived(message.header);
  if (message.receiver && status != UCS_OK) message.receiver->lost(message.header);
  if (status != UCS_OK) transport.fail_peer(message.header.from, status, "receiving");
  transport.give_back(message);
  transport.api_.ucp_request_free(request);
}

ucs_status_t Transport::receive(const Header &header, void *data, uint64_t bytes, bool is_descriptor) {
  Receiver *receiver = find(header.key);
  if (header.kind != Kind::data || !receiver) {
    if (is_descriptor || bytes > payload_most) return UCS_OK;
    receiver ? receiver->control(header, data, bytes) : hold(header, data, bytes);
    return UCS_OK;
  }
  const Place place = receiver->place(header, bytes);
  if (!place.to) return UCS_OK;
  if (!is_descriptor) {
    if (bytes) std::memcpy(place.to, data, bytes);
    receiver->arrived(header);
    return UCS_OK;
  }
  Message &message = take(header, *receiver);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = on_received;
  param.user_data = &message;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  const ucs_status_ptr_t request = api_.ucp_am_recv_data_nbx(worker_, data, place.to, bytes, &param);
  if (UCS_PTR_IS_PTR(request)) return UCS_OK;
  if (UCS_PTR_IS_ERR(request)) {
    receiver->lost(header);
    fail_peer(header.from, UCS_PTR_STATUS(request), "receiving");
  } else {
    receiver->arrived(header);
  }
  give_back(message);
  return UCS_OK;
}

}  // namespace fsdp::comm::ucx
