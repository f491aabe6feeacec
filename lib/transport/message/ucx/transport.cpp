// SPDX-License-Identifier: Apache-2.0

#include "transport/message/ucx/transport.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "base/library_thread.h"
#include "transport/message/channel/net.h"

namespace fsdp::transport::ucx {
namespace {

constexpr unsigned message_id = 1;
// The thread stays awake for this time, because the next message often arrives soon, and a wake-up would take longer.
// It does not spin while connections begin and end: if a rank ends during that time, UCX 1.13 ends the peers'
// processes, and more often the more they poll.
constexpr auto awake_time = std::chrono::microseconds(20);
constexpr auto connecting_time = std::chrono::seconds(1);
constexpr int look_ms = 100;  // in case UCX misses an event
constexpr int connecting_look_ms = 10;
constexpr auto last_greetings_time = std::chrono::milliseconds(500);  // time for peers that have not connected yet

}  // namespace

UcxTransport::UcxTransport(uint32_t rank, uint64_t chunk_bytes, bool guarded)
    : Transport(rank), worker_(rank, chunk_bytes, guarded, message_id, on_message, this), api_(worker_.api()) {
  start_thread();
}

void UcxTransport::start_thread() {
  const auto body = [](void *self) -> void * {
    static_cast<UcxTransport *>(self)->run();
    return nullptr;
  };
  thread_ = LibraryThread{"fsdp-ucx", format_text("UCX of rank {}", rank_), 0}.start(body, this);
}

UcxTransport::~UcxTransport() { stop(); }

// Sent messages may still leave this host, but only for a short time.
void UcxTransport::stop() noexcept {
  {
    std::unique_lock lock(mutex_);
    const auto none_waits = [this] {
      return std::ranges::all_of(peers_, [](const UcxPeer &peer) { return peer.waiting.empty(); });
    };
    changed_.wait_for(lock, last_greetings_time, none_waits);
    stopping_ = true;
  }
  wake();
  pthread_join(thread_, nullptr);
  bool all_well = true;
  for (const UcxPeer &peer : peers_) all_well = all_well && peer.loss.text.empty() && !peer.refused;
  ucp_request_param_t param{};
  if (all_well && !peers_.empty()) worker_.await(api_.ucp_worker_flush_nbx(worker_.handle(), &param), last_words_ms);
  for (uint32_t r = 0; r < peers_.size(); ++r) cut(r);
  worker_.end();  // it may still call back, so this object must still exist
}

void UcxTransport::join(NetJob job, std::shared_ptr<Seat> seat) {
  std::lock_guard lock(mutex_);
  if (!peers_.empty()) fail(FSDP_INTERNAL, "a Net joins once");
  seat_ = std::move(seat);
  peers_.resize(job.addresses.size());
  receivers_.set_world_size(peers_.size());
  for (uint32_t r = 0; r < peers_.size(); ++r) {
    const auto address = job.addresses[r];
    peers_[r].address.assign(address.begin(), address.end());
    peers_[r].index = r;
    peers_[r].transport = this;
  }
  for (const uint32_t from : early_) take_hello(from);
  wake();
}

void UcxTransport::run() noexcept {
  auto moved_at = Clock::now();
  for (;;) {
    bool moved = false, sleeps = false;
    int ms = look_ms;
    {
      let_others_go_first();
      std::lock_guard lock(mutex_);
      if (stopping_) return;
      try {
        moved = move();
        if (moved) moved_at = Clock::now();
        const auto now = Clock::now();
        const bool awake = now - moved_at <= awake_time && now - changed_at_ > connecting_time;
        sleeps = !moved && !awake && worker_.arm();
      } catch (const std::bad_alloc &) {
        fail_context();
        sleeps = true;
      }
      if (!unopened_.empty()) ms = connecting_look_ms;
    }
    if (sleeps)
      worker_.sleep(ms);
    else if (!moved)
      ::sched_yield();
  }
}

// The number of iterations is limited, because other threads want the mutex, too.
bool UcxTransport::move() {
  bool moved = false;
  for (int i = 0; i < 64 && worker_.progress(); ++i) moved = true;
  read_hellos();
  see_to_connections();
  answer_kept_questions();
  // Called even if UCX counted no progress, because UCX does not count everything that it completes.
  receivers_.each([](Receiver &receiver) { receiver.move_on(); });
  return moved;
}

// Called if there was no memory for a message for which peers wait.
void UcxTransport::fail_context() noexcept {
  if (seat_) seat_->watch.fail(Error(FSDP_OUT_OF_MEMORY, "messages", static_cast<int32_t>(rank_)));
  changed_.notify_all();
}

void UcxTransport::remove(uint64_t key) noexcept {
  Transport::remove(key);
  for (const auto &message : messages_)
    if (message->header.key == key) message->receiver = nullptr;
}

// Called later, because nothing may be sent inside a callback of UCX. If a question cannot be answered, the peer
// repeats it.
void UcxTransport::answer_kept_questions() {
  for (const Header &question : receivers_.take_questions())
    if (question.from < peers_.size() && peers_[question.from].open)
      send(question.from, take(messages::answer_without_channel(question, rank_), nullptr), nullptr, 0);
}

void UcxTransport::prepare() {
  if (!free_.empty()) return;
  messages_.reserve(messages_.size() + 1);
  free_.reserve(messages_.size() + 1);
  messages_.push_back(std::make_unique<Message>());
  free_.push_back(messages_.back().get());
}

UcxTransport::Message &UcxTransport::take(const Header &header, Receiver *receiver) {
  prepare();
  Message &message = *free_.back();
  free_.pop_back();
  message.transport = this;
  message.header = header;
  message.receiver = receiver;
  return message;
}

void UcxTransport::on_sent(void *request, ucs_status_t, void *self) {
  auto &message = *static_cast<Message *>(self);
  UcxTransport &transport = *message.transport;
  if (message.receiver) message.receiver->sent(message.header.kind, message.to);
  transport.give_back(message);
  transport.api_.ucp_request_free(request);
}

// Until the peer is open, `data` must be the message's own payload, so that the message can wait.
void UcxTransport::send(uint32_t to, Message &message, const void *data, uint64_t bytes) {
  ucs_status_ptr_t request = UCS_STATUS_PTR(UCS_ERR_CANCELED);
  message.to = to;
  if (connect(to)) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.cb.send = on_sent;
    param.user_data = &message;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    if (message.header.kind != Kind::data) {  // sent eagerly with any UCX_RNDV_THRESH: it has no place
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

void UcxTransport::send_control(uint32_t to, const Header &header, const void *payload, uint64_t bytes) {
  UcxPeer &peer = peers_[to];
  peer.waiting.reserve(peer.waiting.size() + !peer.open);
  Message &message = take(header, receivers_.find(header.key));
  if (bytes) std::memcpy(message.payload, payload, bytes);
  message.payload_bytes = bytes;
  message.to = to;
  if (peer.open || !peer.loss.text.empty())
    send(to, message, message.payload, bytes);
  else
    peer.waiting.push_back(&message);
}

void UcxTransport::send_data(uint32_t to, const Header &header, const void *data) {
  send(to, take(header, receivers_.find(header.key)), data, header.bytes);
}

ucs_status_t UcxTransport::on_message(void *self, const void *header, size_t header_bytes, void *data, size_t bytes,
                                      const ucp_am_recv_param_t *param) {
  Header copy;
  if (header_bytes != sizeof copy) return UCS_OK;
  std::memcpy(&copy, header, sizeof copy);
  auto &transport = *static_cast<UcxTransport *>(self);
  if (copy.magic != header_magic) return UCS_OK;
  if (!transport.peers_.empty() && copy.from >= transport.peers_.size()) return UCS_OK;
  try {
    return transport.receive(copy, data, bytes, param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV);
  } catch (const std::bad_alloc &) {  // no exception may reach UCX, which is written in C
    transport.fail_context();
    return UCS_OK;
  }
}

void UcxTransport::on_received(void *request, ucs_status_t status, size_t, void *self) {
  auto &message = *static_cast<Message *>(self);
  UcxTransport &transport = *message.transport;
  if (message.receiver && status == UCS_OK) message.receiver->arrived(message.header);
  if (message.receiver && status != UCS_OK) message.receiver->lost(message.header);
  if (status != UCS_OK) transport.fail_peer(message.header.from, status, "receiving");
  transport.give_back(message);
  transport.api_.ucp_request_free(request);
}

ucs_status_t UcxTransport::receive(const Header &header, void *data, uint64_t bytes, bool is_descriptor) {
  if (header.kind == Kind::greeting) {
    take_greeting(header.from);
    return UCS_OK;
  }
  Receiver *receiver = receivers_.find(header.key);
  if (header.kind != Kind::data || !receiver) {
    if (is_descriptor || bytes > longest_control) return UCS_OK;
    if (receiver)
      receiver->control(header, data, bytes);
    else if (!receivers_.keep(header, data, bytes))
      fail_peer(header.from, UCS_ERR_EXCEEDS_LIMIT, "messages for communicators that do not exist here");
    return UCS_OK;
  }
  prepare();
  const Place place = receiver->place(header, bytes);
  if (!place.to) return UCS_OK;
  if (!is_descriptor) {
    if (bytes) std::memcpy(place.to, data, bytes);
    receiver->arrived(header);
    return UCS_OK;
  }
  Message &message = take(header, receiver);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = on_received;
  param.user_data = &message;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  const ucs_status_ptr_t request = api_.ucp_am_recv_data_nbx(worker_.handle(), data, place.to, bytes, &param);
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

}  // namespace fsdp::transport::ucx

namespace fsdp::transport {

std::unique_ptr<Net> create_ucx_net(uint32_t rank, bool guarded) {
  const uint64_t chunk_bytes = read_net_chunk_bytes();
  return messages::create_net(std::make_unique<ucx::UcxTransport>(rank, chunk_bytes, guarded), chunk_bytes);
}

#define FSDP_TEXT_OF(x) #x
#define FSDP_TEXT(x) FSDP_TEXT_OF(x)
const char *net_description() noexcept {
  return "yes (needs " FSDP_TEXT(UCP_API_MAJOR) "." FSDP_TEXT(UCP_API_MINOR) " or later at run time)";
}

}  // namespace fsdp::transport

namespace fsdp::transport::ucx {

// UcxTransport's connections: how they are made, tried again and lost.

namespace {

// The pause between two attempts to connect, because UCX reports each attempt.
constexpr auto first_pause = std::chrono::milliseconds(50), longest_pause = std::chrono::milliseconds(1000);

}  // namespace

void UcxTransport::fail_peer(uint32_t rank, ucs_status_t status, const char *what) noexcept {
  UcxPeer &peer = peers_[rank];
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

// A peer that has not answered a hello may not have started, or its host may be too busy.
void UcxTransport::lose(UcxPeer &peer, ucs_status_t status, const char *what) noexcept {
  changed_at_ = Clock::now();
  if (peer.open || peer.index < rank_ || peer.heard || Clock::now() >= peer.expiry || !peer.loss.text.empty())
    return fail_peer(peer.index, status, what);
  peer.refused = true;
}

void UcxTransport::on_failure(void *self, ucp_ep_h, ucs_status_t status) {
  auto &peer = *static_cast<UcxPeer *>(self);
  peer.transport->lose(peer, status, "the connection was lost");
}

bool UcxTransport::connect(uint32_t to) {
  UcxPeer &peer = peers_[to];
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

void UcxTransport::close(UcxPeer &peer) noexcept {
  if (!peer.endpoint) return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = api_.ucp_ep_close_nbx(peer.endpoint, &param);
  peer.endpoint = nullptr;
  worker_.await(request, last_words_ms);
}

void UcxTransport::cut(uint32_t rank) noexcept {
  UcxPeer &peer = peers_[rank];
  if (!peer.endpoint) return;
  if (peer.loss.text.empty()) {
    peer.loss.text = "closed here";
    peer.loss.order = ++losses_;  // later than peers that failed earlier
  }
  close(peer);
}

void UcxTransport::greet(uint32_t to) {
  if (to >= peers_.size() || to <= rank_) return;
  UcxPeer &peer = peers_[to];
  if (peer.tried != Clock::time_point()) return;
  peer.expiry = Clock::now() + std::chrono::milliseconds(seat_->watch.timeout_ms());
  peer.pause = first_pause;
  unopened_.reserve(2 * peers_.size());
  unopened_.push_back(to);
  send_hello(peer);
}

// A hello is a kind of message that UCX sends without a handshake; see UcxTransport.
void UcxTransport::send_hello(UcxPeer &peer) {
  peer.tried = Clock::now();
  if (!connect(peer.index)) return;
  ucp_request_param_t param{};
  const ucs_status_ptr_t request = api_.ucp_tag_send_nbx(peer.endpoint, nullptr, 0, hello_tag(rank_), &param);
  if (UCS_PTR_IS_PTR(request)) api_.ucp_request_free(request);
  if (UCS_PTR_IS_ERR(request)) lose(peer, UCS_PTR_STATUS(request), "connecting");
  worker_.wake();
}

// Messages that are no hellos are received, too, because UCX would otherwise keep them.
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
    if (early_.size() < max_early) early_.insert(from);
    return;
  }
  if (from >= peers_.size() || from == rank_) return;
  UcxPeer &peer = peers_[from];
  if (from > rank_ ? peer.heard || peer.tried == Clock::time_point() : peer.greeted) return;
  peer.heard = true;
  from > rank_ ? send_greeting(peer) : send_hello(peer);
}

void UcxTransport::send_greeting(UcxPeer &peer) {
  Header header{};
  header.magic = header_magic;
  header.kind = Kind::greeting;
  header.from = rank_;
  Message &message = take(header, nullptr);
  send(peer.index, message, nullptr, 0);
  worker_.wake();
}

// Called inside UCX's progress, where nothing may be sent.
void UcxTransport::take_greeting(uint32_t from) {
  if (from >= peers_.size()) return;
  UcxPeer &peer = peers_[from];
  if (from == rank_ || peer.greeted) return;
  if (from < rank_) unopened_.push_back(from);
  peer.greeted = true;
}

// Sends the messages that have waited first.
void UcxTransport::open(UcxPeer &peer) {
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
    UcxPeer &peer = peers_[rank];
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
