// SPDX-License-Identifier: Apache-2.0
// UcxTransport's connections: made, tried again, lost.
#include <algorithm>

#include "transport/message/ucx/transport.h"

namespace fsdp::transport::ucx {
namespace {

// Between two attempts to connect: UCX reports each.
constexpr auto first_pause = std::chrono::milliseconds(50), longest_pause = std::chrono::milliseconds(1000);

}  // namespace

void UcxTransport::fail_peer(uint32_t rank, ucs_status_t status, const char *what) noexcept {
  Peer &peer = peers_[rank];
  if (peer.loss.text.empty()) {
    peer.loss.order = ++losses_;
    peer.loss.origin = FSDP_ORIGIN_UCX;
    peer.loss.code = status;
    try {
      peer.loss.text = format_text("UCX: {}: {}", what, api_.ucs_status_string(status));
    } catch (const std::bad_alloc &) {
      peer.loss.text = "UCX: lost";
    }
  }
  for (Message *message : peer.waiting) give_back(*message);
  peer.waiting.clear();
  receivers_.each([rank](Receiver &receiver) { receiver.peer_failed(rank); });
  changed_.notify_all();
}

// Who has been told hello and has not answered may not have started, or its host has too much to do.
void UcxTransport::lose(Peer &peer, ucs_status_t status, const char *what) noexcept {
  changed_at_ = Clock::now();
  if (peer.open || peer.index < rank_ || peer.heard || Clock::now() >= peer.expiry || !peer.loss.text.empty())
    return fail_peer(peer.index, status, what);
  peer.refused = true;
}

void UcxTransport::on_failure(void *self, ucp_ep_h, ucs_status_t status) {
  auto &peer = *static_cast<Peer *>(self);
  peer.transport->lose(peer, status, "the connection was lost");
}

bool UcxTransport::connect(uint32_t to) {
  Peer &peer = peers_[to];
  if (!peer.loss.text.empty()) return false;
  if (peer.endpoint) return true;
  changed_at_ = Clock::now();
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t *>(peer.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_failure;
  params.err_handler.arg = &peer;
  const ucs_status_t status =
      peer.address.empty() ? UCS_ERR_INVALID_ADDR : api_.ucp_ep_create(worker_.handle(), &params, &peer.endpoint);
  if (status == UCS_OK) return true;
  peer.endpoint = nullptr;
  if (status == UCS_ERR_INVALID_ADDR)
    fail_peer(to, status, "its address");
  else
    lose(peer, status, "connecting");
  return false;
}

void UcxTransport::close(Peer &peer) noexcept {
  if (!peer.endpoint) return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = api_.ucp_ep_close_nbx(peer.endpoint, &param);
  peer.endpoint = nullptr;
  worker_.await(request, last_words_ms);
}

void UcxTransport::cut(uint32_t rank) noexcept {
  Peer &peer = peers_[rank];
  if (!peer.endpoint) return;
  if (peer.loss.text.empty()) {
    peer.loss.text = "closed here";
    peer.loss.order = ++losses_;  // behind those that failed before
  }
  close(peer);
}

void UcxTransport::greet(uint32_t to) {
  if (to >= peers_.size() || to <= rank_) return;
  Peer &peer = peers_[to];
  if (peer.tried != Clock::time_point()) return;
  peer.expiry = Clock::now() + std::chrono::milliseconds(seat_->watch.timeout_ms());
  peer.pause = first_pause;
  unopened_.reserve(2 * peers_.size());
  unopened_.push_back(to);
  send_hello(peer);
}

// Of UCX's kinds of message one that it sends without a handshake of its own; see Transport.
void UcxTransport::send_hello(Peer &peer) {
  peer.tried = Clock::now();
  if (!connect(peer.index)) return;
  ucp_request_param_t param{};
  const ucs_status_ptr_t request = api_.ucp_tag_send_nbx(peer.endpoint, nullptr, 0, hello_tag(rank_), &param);
  if (UCS_PTR_IS_PTR(request)) api_.ucp_request_free(request);
  if (UCS_PTR_IS_ERR(request)) lose(peer, UCS_PTR_STATUS(request), "connecting");
  worker_.wake();
}

// Also what is none is taken: UCX would keep it.
void UcxTransport::read_hellos() {
  ucp_tag_recv_info_t info;
  while (const ucp_tag_message_h message = api_.ucp_tag_probe_nb(worker_.handle(), 0, 0, 1, &info)) {
    ucp_request_param_t param{};
    const ucs_status_ptr_t request = api_.ucp_tag_msg_recv_nbx(worker_.handle(), nullptr, 0, message, &param);
    if (UCS_PTR_IS_PTR(request)) api_.ucp_request_free(request);
    const auto from = static_cast<uint32_t>(info.sender_tag);
    if (info.sender_tag == hello_tag(from)) take_hello(from);
  }
}

void UcxTransport::take_hello(uint32_t from) {
  if (peers_.empty()) {
    if (early_.size() < most_early) early_.insert(from);
    return;
  }
  if (from >= peers_.size() || from == rank_) return;
  Peer &peer = peers_[from];
  if (from > rank_ ? peer.heard || peer.tried == Clock::time_point() : peer.greeted) return;
  peer.heard = true;
  from > rank_ ? send_greeting(peer) : send_hello(peer);
}

void UcxTransport::send_greeting(Peer &peer) {
  Header header{};
  header.magic = header_magic;
  header.kind = Kind::greeting;
  header.from = rank_;
  Message &message = take(header, nullptr);
  send(peer.index, message, nullptr, 0);
  worker_.wake();
}

// In the middle of UCX's progress: no time to send.
void UcxTransport::take_greeting(uint32_t from) {
  if (from >= peers_.size()) return;
  Peer &peer = peers_[from];
  if (from == rank_ || peer.greeted) return;
  if (from < rank_) unopened_.push_back(from);
  peer.greeted = true;
}

// What has waited goes first.
void UcxTransport::open(Peer &peer) {
  peer.open = true;
  changed_at_ = Clock::now();
  std::vector<Message *> waiting;
  waiting.swap(peer.waiting);
  for (Message *message : waiting) send(peer.index, *message, message->payload, message->payload_bytes);
  changed_.notify_all();
}

void UcxTransport::see_to_connections() {
  if (unopened_.empty()) return;
  const auto now = Clock::now();
  for (const uint32_t rank : std::vector<uint32_t>(unopened_)) {
    Peer &peer = peers_[rank];
    if (peer.greeted && !peer.open) {
      if (rank < rank_) send_greeting(peer);
      open(peer);
    } else if (peer.refused && now - peer.tried >= peer.pause) {
      peer.pause = std::min(2 * peer.pause, longest_pause);
      peer.refused = false;
      close(peer);
      send_hello(peer);
    }
  }
  std::erase_if(unopened_, [this](uint32_t rank) { return peers_[rank].open || !peers_[rank].loss.text.empty(); });
}

}  // namespace fsdp::transport::ucx
