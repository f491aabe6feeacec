// SPDX-License-Identifier: Apache-2.0
// The functions of TcpTransport that channels call, with the mutex held.
#include "transport/message/tcp/transport.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

#include "base/error.h"
#include "base/settings.h"
#include "transport/message/channel/net.h"
#include "transport/net.h"

namespace fsdp::transport::tcp {

namespace {

Endpoint numeric(const std::string &address) {
  std::string problem;
  const auto found = Endpoint::numeric(address, 0, problem);
  if (found.empty()) fail(FSDP_INVALID_ARGUMENT, "the interface '{}': {}", address, problem);
  return found.front();
}

// Checks that another host can connect to this address.
Endpoint checked(const Endpoint &place) {
  in6_addr six{};
  uint32_t four = 1;
  if (place.family() == AF_INET6) six = reinterpret_cast<const sockaddr_in6 *>(place.get())->sin6_addr;
  if (place.family() == AF_INET) four = ntohl(reinterpret_cast<const sockaddr_in *>(place.get())->sin_addr.s_addr);
  const bool none = place.family() == AF_INET6 ? IN6_IS_ADDR_UNSPECIFIED(&six) || IN6_IS_ADDR_MULTICAST(&six)
                                               : four == INADDR_ANY || IN_MULTICAST(four);
  if (none)
    fail(FSDP_INVALID_ARGUMENT, "FSDP_NET_INTERFACE is '{}': that is the address of no interface", place.address());
  return place;
}

// A link-local address does not help a peer that does not know the link.
bool is_usable(const sockaddr *address) noexcept {
  if (!address || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) return false;
  return address->sa_family == AF_INET ||
         !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6 *>(address)->sin6_addr);
}

}  // namespace

Endpoint find_interface(const std::string &address) {
  const char *wanted = setting("FSDP_NET_INTERFACE");
  const Endpoint usual = numeric(address);
  if (!wanted || !*wanted) return usual;
  std::string problem;
  if (const auto found = Endpoint::numeric(wanted, 0, problem); !found.empty()) return checked(found.front());
  ifaddrs *list = nullptr;
  if (::getifaddrs(&list) != 0) fail_errno(errno, "the interfaces of this host");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, ::freeifaddrs);
  const ifaddrs *best = nullptr;
  std::set<std::string> names;
  for (const ifaddrs *entry = list; entry; entry = entry->ifa_next) {
    if (!(entry->ifa_flags & IFF_UP) || !is_usable(entry->ifa_addr)) continue;
    names.insert(entry->ifa_name);
    if (std::string(wanted) == entry->ifa_name &&
        (!best || (best->ifa_addr->sa_family != usual.family() && entry->ifa_addr->sa_family == usual.family())))
      best = entry;
  }
  if (!best)
    fail(FSDP_INVALID_ARGUMENT,
         "FSDP_NET_INTERFACE is '{}': this host has no such interface with an address (it has {})", wanted,
         fmt::join(names, ", "));
  return Endpoint(best->ifa_addr);
}

}  // namespace fsdp::transport::tcp

namespace fsdp::transport::tcp {
namespace {

using messages::Kind;
using messages::Receiver;

constexpr int backlog = 1024;
// Data up to this length is written by the sending thread itself, because waking the background thread would take
// longer.
constexpr uint64_t short_data = uint64_t{20} << 10;
// Time after the heartbeat limit, because that limit judges silent ranks.
constexpr uint32_t beyond_heartbeats_ms = 10'000;
constexpr auto first_pause = std::chrono::milliseconds(20);
constexpr auto last_greetings_time = std::chrono::milliseconds(500);  // time for peers that have not connected yet
constexpr auto last_words_time = std::chrono::milliseconds(1000);
// More than any rank sends to a peer that does not read, because a stopped peer is found long before.
constexpr size_t max_queued = 65536;

Fd listen_for_messages(const Endpoint &place) {
  Fd listener = listen_at(place, backlog);
  const char *const wanted = setting("FSDP_NET_INTERFACE");
  if (!listener && errno == EADDRNOTAVAIL && wanted && *wanted)
    fail(FSDP_INVALID_ARGUMENT, "FSDP_NET_INTERFACE is '{}': no interface of this host has that address", wanted);
  if (!listener) fail_errno(errno, format_text("listening for messages at {}", place.address()));
  return listener;
}

// The address in the form in which others use it.
std::string address_text(std::string_view address) {
  try {
    return parse_address(std::string(address)).text();
  } catch (const Error &) {
    return "nowhere";
  }
}

Fd check(int fd, const char *what) {
  if (fd < 0) fail_errno(errno, what);
  return Fd(fd);
}

}  // namespace

TcpTransport::TcpTransport(uint32_t rank, const std::string &address, NetProtection protection)
    : Transport(rank),
      protection_(protection),
      tls_(protection.encryption ? std::optional(load_tls_library()) : std::nullopt),
      listener_(listen_for_messages(find_interface(address))),
      events_(check(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1 for messages")),
      wake_(check(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd for messages")),
      sleep_(check(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1 for messages")),
      timer_(check(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "timerfd for messages")) {
  start_thread();
}

// Sent messages may still leave this host, but only for a short time.
TcpTransport::~TcpTransport() {
  {
    const auto guard = lock();
    stopping_ = true;
    stop_since_ = Clock::now();
    wake();
  }
  pthread_join(thread_, nullptr);
}

std::vector<std::byte> TcpTransport::address() const {
  const std::string text = Endpoint::local(listener_).text();
  const auto *begin = reinterpret_cast<const std::byte *>(text.data());
  return {begin, begin + text.size()};
}

void TcpTransport::join(NetJob job, std::shared_ptr<Seat> seat) {
  const auto guard = lock();
  if (!peers_.empty()) fail(FSDP_INTERNAL, "a Net joins once");
  const size_t size = job.addresses.size();
  dirty_.reserve(2 * size);  // peers that become dirty during a round come after those that the round handles
  receivers_.set_world_size(size);
  names_ = {std::move(job.secret), std::move(job.name), rank_, static_cast<uint32_t>(size), protection_, nullptr, {}};
  if (tls_) {
    names_.tls = &*tls_;
    names_.key = derive_key(names_.secret, {reinterpret_cast<const uint8_t *>(job.nonce.data()), job.nonce.size()},
                            "libfsdp messages, TLS: " + names_.name);
  }
  user_timeout_ms_ = job.heartbeat_timeout_ms + beyond_heartbeats_ms;
  refusals_.set_log(std::move(job.log));  // the thread refuses no connection before peers are known
  peers_.set_addresses(std::move(job.addresses));
  seat_ = std::move(seat);
  wake();
}

void TcpTransport::expect(std::span<const uint32_t> ranks) {
  const Descriptors has = count_descriptors();
  const auto guard = lock();
  DescriptorNeed need;
  const auto awaited = [](const Peer &peer) { return !peer.open && peer.loss.text.empty(); };
  peers_.all_of([&](const Peer &peer) { return need.messages += peer.expected && awaited(peer), true; });
  for (const uint32_t r : ranks) need.messages += r != rank_ && !peers_[r].expected && awaited(peers_[r]);
  if (const std::string shortage = find_shortage(has, need); !shortage.empty())
    throw Error(FSDP_SYSTEM, format_text("rank {}: {}", rank_, shortage), static_cast<int32_t>(rank_), FSDP_ORIGIN_OS,
                EMFILE);
  for (const uint32_t r : ranks) peers_[r].expected = true;
}

bool TcpTransport::connected(uint32_t world_rank) const noexcept {
  const Peer *peer = peers_.find(world_rank);
  return peer && peer->open;
}

const messages::PeerLoss &TcpTransport::loss_of(uint32_t world_rank) const noexcept {
  static const messages::PeerLoss none;
  const Peer *peer = peers_.find(world_rank);
  return peer ? peer->loss : none;
}

void TcpTransport::wake() noexcept {
  if (!asleep_.exchange(false)) return;
  const uint64_t one = 1;
  while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void TcpTransport::mark(uint32_t r) {
  if (!std::exchange(peers_[r].dirty, true)) dirty_.push_back(r);
  wake();
}

void TcpTransport::greet(uint32_t to) {
  if (to >= peers_.size() || to <= rank_ || peers_[to].greeting) return;
  Peer &peer = peers_[to];
  const std::string_view address = peers_.address(to);
  if (!address.empty()) peer.place = parse_address(std::string(address));  // if this throws, nothing has begun
  peer.greeting = true;
  peer.expiry = Clock::now() + std::chrono::milliseconds(seat_->watch.timeout_ms());
  peer.pause = first_pause;
  if (address.empty()) return fail_peer(to, "it has told no address", EDESTADDRREQ);
  mark(to);
}

// ---- sending ----

void TcpTransport::prepare(uint32_t to) { peers_[to].queued.reserve(peers_[to].queued.size() + 1); }

void TcpTransport::queue(uint32_t to, OutFrame &frame) {
  Peer &peer = peers_[to];
  const bool idle = peer.open && !peer.writing && peer.queued.empty();
  if (idle && !tls_ && frame.head.payload_bytes <= short_data) peer.link->send_now(frame);
  if (frame.done()) return give_up(frame, to);
  if (peer.queued.size() >= max_queued) {
    give_up(frame, to);
    return fail_peer(to, "it has not read for too long", ETIMEDOUT);
  }
  peer.queued.push_back(frame);
  if (peer.open) mark(to);
}

void TcpTransport::send_control(uint32_t to, const Header &header, const void *payload, uint64_t bytes) {
  Peer &peer = peers_[to];
  if (!peer.loss.text.empty() || peer.closing) return;
  prepare(to);  // before anything is counted or sent
  OutFrame frame = make_frame(header, peer.sequence++, bytes);
  if (bytes) std::memcpy(frame.control, payload, bytes);
  queue(to, frame);
}

void TcpTransport::send_data(uint32_t to, const Header &header, const void *data) {
  Peer &peer = peers_[to];
  OutFrame frame = make_frame(header, peer.sequence, header.bytes);
  static const std::byte none{};
  frame.data = data ? static_cast<const std::byte *>(data) : &none;
  if (!peer.loss.text.empty() || peer.closing) return give_up(frame, to);
  ++peer.sequence;
  queue(to, frame);
}

// Called when the frame was given up or sent.
void TcpTransport::give_up(const OutFrame &frame, uint32_t to) noexcept {
  if (!frame.data) return;
  if (Receiver *receiver = receivers_.find(frame.head.header.key)) receiver->sent(Kind::data, to);
}

void TcpTransport::answer_for_nobody() {
  if (!receivers_.has_questions()) return;
  for (const Header &question : receivers_.take_questions())
    if (question.from < peers_.size() && connected(question.from))
      send_control(question.from, messages::answer_without_channel(question, rank_), nullptr, 0);
}

// ---- connections ----

void TcpTransport::open(uint32_t r, Introduction &known) {
  Peer &peer = peers_[r];
  Fd socket = known.take_socket();
  const unsigned ms = user_timeout_ms_;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
  peer.link = std::make_unique<Link>(std::move(socket), LinkOptions{r, rank_, protection_.checksum}, known.take_tls());
  peer.open = true;
  peer.blocked = false;
  if (!watch(peer.link->socket().get(), r, EPOLLIN, EPOLL_CTL_ADD)) return fail_peer(r, std::strerror(errno), errno);
  fresh_.push_back(r);
  mark(r);
  changed_.notify_all();
}

void TcpTransport::fail_peer(uint32_t r, const std::string &text, int code) noexcept {
  Peer &peer = peers_[r];
  if (!peer.loss.text.empty()) return;
  peer.loss.order = ++losses_;
  peer.loss.origin = FSDP_ORIGIN_OS;
  peer.loss.code = code;
  try {
    peer.loss.text = format_text("TCP to {}: {}", address_text(peers_.address(r)), text);
  } catch (const std::bad_alloc &) {
    peer.loss.text = "TCP: lost";
  }
  peer.closing = true;
  mark(r);
  receivers_.each([r](Receiver &receiver) { receiver.peer_failed(r); });
  changed_.notify_all();
}

// A peer that does not exist on this rank has no messages under way, because every rank of a channel is expected and so
// has a peer.
void TcpTransport::cut(uint32_t r) noexcept {
  if (!peers_.find(r)) return;
  Peer &peer = peers_[r];
  if (peer.loss.text.empty()) {
    peer.loss.text = "closed here";
    peer.loss.order = ++losses_;  // later than peers that failed earlier
  }
  peer.closing = true;
  mark(r);
}

// If the calls of two ranks differ, both ranks give up. Each must still receive the call of the other.
void TcpTransport::say_last_words(Peer &peer) noexcept {
  try {
    if (!peer.queued.empty()) peer.link->take(peer.queued);
    peer.link->send_last_words();
  } catch (const std::exception &) {  // without memory the last words are lost
  }
}

// Called by the thread. Afterwards no message that was under way is read or written.
void TcpTransport::close(uint32_t r) {
  Peer &peer = peers_[r];
  peer.dialing.reset();
  if (peer.link) {
    watch(peer.link->socket().get(), r, 0, EPOLL_CTL_DEL);
    say_last_words(peer);
    for (const OutFrame &frame : peer.link->unsent()) give_up(frame, r);
    if (const Header *header = peer.link->incomplete())
      if (Receiver *receiver = receivers_.find(header->key)) receiver->lost(*header);
    peer.link.reset();
  }
  for (const OutFrame &frame : peer.queued) give_up(frame, r);
  peer.queued.clear();
  peer.writing = false;
  std::erase(writers_, r);
  receivers_.each([](Receiver &receiver) { receiver.move_on(); });
  changed_.notify_all();
}

// Called by the thread.
void TcpTransport::look_at(uint32_t r) {
  Peer &peer = peers_[r];
  peer.dirty = false;
  if (peer.closing) return close(r);
  if (peer.greeting && !peer.open && std::ranges::count(dialed_, r) == 0) {
    dialed_.push_back(r);
    ++dials_;
  }
  if (!peer.open || peer.queued.empty()) return;
  peer.link->take(peer.queued);
  if (!std::exchange(peer.writing, true)) writers_.push_back(r);
}

bool TcpTransport::may_stop() const noexcept {
  const auto since = Clock::now() - stop_since_;
  if (since >= last_words_time) return true;
  return peers_.all_of([&](const Peer &peer) {
    if (!peer.loss.text.empty()) return true;
    // A rank that waits for this rank learns of its end when their connection ends.
    if (!peer.open) return (!peer.greeting && peer.queued.empty()) || since >= last_greetings_time;
    return peer.queued.empty() && !peer.writing && peer.link->acknowledged();
  });
}

void TcpTransport::fail_context(const Error &error) noexcept {
  const auto guard = lock();
  if (seat_) seat_->watch.fail(error);
  changed_.notify_all();
}

}  // namespace fsdp::transport::tcp

namespace fsdp::transport {

std::unique_ptr<Net> create_tcp_net(uint32_t rank, const std::string &address, NetProtection protection) {
  const uint64_t chunk_bytes = read_net_chunk_bytes();
  return messages::create_net(std::make_unique<tcp::TcpTransport>(rank, address, protection), chunk_bytes);
}

}  // namespace fsdp::transport
