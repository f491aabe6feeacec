// SPDX-License-Identifier: Apache-2.0

#include "membership/tree/dial.h"

#include <poll.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/failure.h"
#include "membership/wire/endpoint.h"

namespace fsdp::membership {

namespace {

constexpr int backlog = 512;

Fd bind_datagrams(const Endpoint &at) {
  Fd socket(::socket(at.family(), SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket && ::bind(socket.get(), at.get(), at.length()) != 0) socket.reset();
  return socket;
}

}  // namespace

LeaderListener open_leader_listener(const std::string &interface_address) {
  std::string problem;
  const auto found = Endpoint::numeric(interface_address, 0, problem);
  if (found.empty()) fail(FSDP_INVALID_ARGUMENT, "the interface '{}': {}", interface_address, problem);
  for (int tries = 0; tries < 16; ++tries) {  // another program may use the same port for UDP
    LeaderListener listener;
    listener.stream = listen_at(found.front(), backlog);
    if (!listener.stream) fail_errno(errno, format_text("listening for other nodes at {}", interface_address));
    const Endpoint at = Endpoint::local(listener.stream);
    listener.datagrams = bind_datagrams(at);
    listener.address = at.text();
    if (listener.datagrams) return listener;
  }
  fail(FSDP_SYSTEM, "listening for other nodes at {}: no port is free for TCP and UDP", interface_address);
}

namespace {

constexpr auto dial_time = std::chrono::seconds(3);  // for one try; TCP repeats lost packets ever more slowly

}  // namespace

Dial::Dial(const NodePlan &plan, uint32_t to, tree::Bond bond)
    : plan_(plan), to_(to), bond_(bond), end_(parse_address(plan.nodes[to].address)), since_(Clock::now()) {
  int code = 0;
  socket_ = begin_connecting(end_, code);
  if (code != 0 && code != EINPROGRESS) fail(State::ended, format_text("{}: {}", end_.text(), std::strerror(code)));
}

void Dial::fail(State state, std::string problem) {
  state_ = state;
  problem_ = std::move(problem);
  socket_.reset();
  handshake_.reset();
  stream_ = FrameStream();
}

Dial::State Dial::advance() {
  if (state_ == State::trying && connecting_) connect();
  if (state_ == State::trying && handshake_) prove();
  if (state_ == State::trying && stream_) hear_answer();
  return state_;
}

void Dial::connect() {
  const int code = connecting_result(socket_, end_);
  if (code == EINPROGRESS) {
    if (Clock::now() - since_ >= dial_time) fail(State::ended, format_text("{} does not answer", end_.text()));
    return;
  }
  connecting_ = false;
  deserted_ = code == ECONNREFUSED;
  if (code != 0)
    return fail(deserted_ ? State::refused : State::ended, format_text("{}: {}", end_.text(), std::strerror(code)));
  handshake_.emplace(Role::guest, plan_.secret, link_label(plan_));
}

void Dial::prove() {
  const auto state = handshake_->advance(socket_);
  if (state == IoState::failed)
    return fail(handshake_->ended() ? State::ended : State::refused, std::string(handshake_->problem()));
  if (state != IoState::done) return;
  stream_ = FrameStream(std::move(socket_), tree::longest, handshake_->keys());
  handshake_.reset();
  greet(stream_, plan_, bond_);
}

void Dial::hear_answer() {
  stream_.flush();
  const auto frame = stream_.receive();
  if (!frame) {
    if (!stream_.open()) fail(State::ended, std::string(stream_.problem()));
    return;
  }
  const auto theirs = read_hello(plan_, *frame);
  if (!theirs || theirs->node != to_)
    return fail(State::refused, "it answered as a node of another job, or of another version of this library");
  state_ = State::answered;
}

pollfd Dial::poll() const {
  const int socket = stream_ ? stream_.socket().get() : socket_.get();
  const bool sends = connecting_ || (handshake_ && handshake_->wants_to_send()) || (stream_ && stream_.sending());
  return {socket, static_cast<short>((connecting_ ? 0 : POLLIN) | (sends ? POLLOUT : 0)), 0};
}

Newcomers::Newcomers(const NodePlan &plan, const Fd &listener) : plan_(plan), acceptor_(plan.secret, link_label(plan)) {
  acceptor_.listen(listener);
}

void Newcomers::add_polls(std::vector<pollfd> &polls) const {
  acceptor_.add_polls(polls);
  for (const Silent &one : silent_) polls.push_back({one.stream.socket().get(), POLLIN, 0});
}

std::vector<Newcomers::Newcomer> Newcomers::look(bool takes) {
  for (Acceptor::AuthenticatedSocket &arrival : acceptor_.look(takes))
    silent_.push_back(
        {FrameStream(std::move(arrival.socket), tree::longest, arrival.keys), Clock::now() + Acceptor::message_time});
  std::vector<Newcomer> newcomers;
  const auto now = Clock::now();
  std::erase_if(silent_, [&](Silent &one) {
    const auto frame = one.stream.receive();
    if (!frame) return !one.stream.open() || now >= one.deadline;
    if (const auto said = read_hello(plan_, *frame)) newcomers.push_back({*said, std::move(one.stream)});
    return true;
  });
  return newcomers;
}

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto pause = std::chrono::milliseconds(50);

class Forming {
 public:
  Forming(const NodePlan &plan, const Fd &listener, const Waiter &waiter, NodeLinks &links)
      : plan_(plan),
        waiter_(waiter),
        limit_{Clock::now() + std::chrono::milliseconds(plan.forming_ms), waiter},
        look_ms_(slice_ms_of(static_cast<uint32_t>(plan.node_of.size()))),
        newcomers_(plan, listener),
        links_(links) {}

  void run() {
    if (plan_.has_parent()) dial(plan_.parent());
    for (const uint32_t child : plan_.children())
      while (!links_.contains(child)) accept(child);
  }

 private:
  [[noreturn]] void lose(uint32_t node, const std::string &why) const {
    fail_rank(FSDP_PEER_FAILED, static_cast<int32_t>(plan_.nodes[node].leader),
              "{} did not connect while the job formed: {}", plan_.leader_text(node), why);
  }

  // Dials again if the connection ended before the answer: the other end drops a connection that stays silent for a
  // while, and the network may have failed for that long.
  void dial(uint32_t node) {
    std::string problem;
    for (;;) {
      Dial one(plan_, node, tree::Bond::tree);
      while (one.advance() == Dial::State::trying && !limit_.over()) {
        waiter_.poll();
        pollfd poll = one.poll();
        ::poll(&poll, 1, look_ms_);
      }
      if (one.state() == Dial::State::answered) {
        links_.insert_or_assign(node, one.take());
        return;
      }
      // A dial that is still trying at the limit has no problem to report; an earlier problem tells more.
      if (problem.empty() || one.state() != Dial::State::trying) problem = one.problem();
      if (one.state() == Dial::State::refused || limit_.over()) lose(node, problem);
      waiter_.poll();
      std::this_thread::sleep_for(pause);
    }
  }

  void accept(uint32_t missing) {
    if (limit_.over()) lose(missing, late_text());
    waiter_.poll();
    std::vector<pollfd> polls;
    newcomers_.add_polls(polls);
    ::poll(polls.data(), polls.size(), look_ms_);
    for (Newcomers::Newcomer &newcomer : newcomers_.look()) let_in(newcomer);
  }

  // A leader that connects again has given up its earlier connection, so the new one replaces it.
  void let_in(Newcomers::Newcomer &newcomer) {
    const uint32_t node = newcomer.hello.node;
    if (!plan_.is_child(node) || newcomer.hello.bond != tree::Bond::tree) return;
    greet(newcomer.stream, plan_, tree::Bond::tree);
    newcomer.stream.flush();  // the rest is sent later, before anything else
    if (newcomer.stream.open()) links_.insert_or_assign(node, std::move(newcomer.stream));
  }

  std::string late_text() const {
    const std::string problem = newcomers_.problem();
    return format_text("not within {} ms{}{}", plan_.forming_ms,
                       problem.empty() ? "" : "; connections could not be taken: ", problem);
  }

  const NodePlan &plan_;
  const Waiter &waiter_;
  Limit limit_;
  const int look_ms_;
  Newcomers newcomers_;
  NodeLinks &links_;
};

}  // namespace

void form_tree(const NodePlan &plan, const Fd &listener, const Waiter &waiter, NodeLinks &links) {
  Forming(plan, listener, waiter, links).run();
}

}  // namespace fsdp::membership
