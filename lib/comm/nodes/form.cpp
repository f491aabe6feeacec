// SPDX-License-Identifier: Apache-2.0
#include "comm/nodes/form.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <thread>

#include "comm/bootstrap/accept_pause.h"
#include "comm/bootstrap/packet.h"
#include "comm/bootstrap/proof.h"
#include "comm/nodes/datagrams.h"
#include "comm/nodes/message.h"

namespace fsdp::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t most_strangers = 64;
constexpr auto stranger_time = std::chrono::seconds(2);
constexpr auto try_time = std::chrono::seconds(3);  // of one connection: a lost packet of it is sent again ever later
constexpr auto pause = std::chrono::milliseconds(50);
constexpr int look_ms = 10;

class Forming {
 public:
  Forming(const MeshPlan &plan, const Fd &listener, const Waiter &waiter)
      : plan_(plan),
        listener_(listener),
        waiter_(waiter),
        limit_{Clock::now() + std::chrono::milliseconds(plan.forming_ms), waiter},
        label_("libfsdp node link " + plan.job),
        links_(plan.nodes.size()) {}

  std::vector<FrameStream> run() {
    for (uint32_t node = 0; node < plan_.node(); ++node) dial(node);
    while (missing() < plan_.nodes.size()) accept();
    return std::move(links_);
  }

 private:
  struct Stranger {
    Fd socket;
    Handshake handshake;
    Clock::time_point deadline;
    FrameStream stream;  // once proven
  };

  nodes::Hello hello() const {
    return {nodes::version, plan_.node(), static_cast<uint32_t>(plan_.nodes.size()),
            static_cast<uint32_t>(plan_.node_of.size()), nodes::native_order};
  }

  [[noreturn]] void lose(uint32_t node, const std::string &why) const {
    fail_rank(FSDP_PEER_FAILED, static_cast<int32_t>(plan_.nodes[node].leader),
              "{} did not connect while the job formed: {}", plan_.leader_text(node), why);
  }

  // A connection that ended before it was answered is made again: the other end does not keep one on which nothing
  // comes for a while, and the network may have been away for that long.
  void dial(uint32_t node) {
    std::string problem, tried;
    while (!connect(node, tried)) {
      if (problem.empty() || !limit_.over()) problem = tried;  // at the limit it only says that time is over
      if (limit_.over()) lose(node, problem);
      waiter_.poll();
      std::this_thread::sleep_for(pause);
    }
  }

  bool connect(uint32_t node, std::string &problem) {
    const Limit once{std::min(limit_.deadline, Clock::now() + try_time), waiter_};
    Fd socket = connect_to(parse_address(plan_.nodes[node].address), once, problem);
    if (!socket && errno == ECONNREFUSED) lose(node, problem);  // it no longer listens
    if (!socket) return false;
    bool ended = false;
    StreamKeys keys;
    problem = prove(socket, Role::guest, plan_.secret, label_, limit_, &keys, &ended);
    if (!problem.empty() && !ended) lose(node, problem);
    if (!problem.empty()) return false;
    FrameStream stream(std::move(socket), nodes::longest, keys);
    const nodes::Hello mine = hello();
    const bool sent = stream.send(static_cast<uint32_t>(mine.kind), nodes::bytes_of(mine), limit_);
    const auto answer = sent ? stream.receive(limit_) : std::nullopt;
    const auto theirs = answer ? read_hello(*answer) : std::nullopt;
    if (theirs && theirs->node == node) {
      links_[node] = std::move(stream);
      return true;
    }
    if (answer) lose(node, "it answered as a node of another job, or of another version of this library");
    problem = stream.open() ? "it has not answered" : stream.problem();
    return false;
  }

  std::optional<nodes::Hello> read_hello(const Frame &frame) const {
    const auto said = nodes::as<nodes::Hello>(frame);
    const nodes::Hello mine = hello();
    const bool known = said && said->version == mine.version && said->node_count == mine.node_count &&
                       said->world_size == mine.world_size && said->byte_order == mine.byte_order;
    return known ? said : std::nullopt;
  }

  uint32_t missing() const {
    for (uint32_t node = plan_.node() + 1; node < links_.size(); ++node)
      if (!links_[node]) return node;
    return static_cast<uint32_t>(links_.size());
  }

  void accept() {
    if (limit_.over()) lose(missing(), late_text());
    waiter_.poll();
    await_words();
    while (strangers_.size() < most_strangers && pause_.over()) {
      Fd socket = accept_from(listener_);
      if (!socket) {
        pause_.note(errno);
        break;
      }
      pause_.clear();
      strangers_.push_back(
          {std::move(socket), Handshake(Role::host, plan_.secret, label_), Clock::now() + stranger_time, {}});
    }
    for (Stranger &stranger : strangers_) hear(stranger);
    std::erase_if(strangers_, [](const Stranger &s) {
      return Clock::now() >= s.deadline || (!s.socket && !s.stream.open()) || (!s.socket && !s.stream);
    });
  }

  std::string late_text() const {
    const std::string problem = pause_.problem();
    return format_text("not within {} ms{}{}", plan_.forming_ms,
                       problem.empty() ? "" : "; connections could not be taken: ", problem);
  }

  // Of anybody: a handshake has several steps, and nodes come one after the other.
  void await_words() const {
    std::vector<pollfd> polls;
    if (strangers_.size() < most_strangers && pause_.over()) polls.push_back({listener_.get(), POLLIN, 0});
    for (const Stranger &s : strangers_) polls.push_back({(s.socket ? s.socket : s.stream.socket()).get(), POLLIN, 0});
    ::poll(polls.data(), polls.size(), look_ms);
  }

  void hear(Stranger &stranger) {
    if (stranger.socket) {
      const auto state = stranger.handshake.advance(stranger.socket);
      if (state == Handshake::State::failed) stranger.socket.reset();
      if (state != Handshake::State::proven) return;
      stranger.stream = FrameStream(std::move(stranger.socket), nodes::longest, stranger.handshake.keys());
    }
    const auto frame = stranger.stream.receive();
    if (!frame) return;
    const auto said = read_hello(*frame);
    // One that connects again has given the earlier connection up.
    if (said && said->node > plan_.node() && said->node < links_.size()) {
      const nodes::Hello mine = hello();
      stranger.stream.queue(static_cast<uint32_t>(mine.kind), nodes::bytes_of(mine));
      stranger.stream.flush();  // what does not go now goes later, before all else
      if (stranger.stream.open()) links_[said->node] = std::move(stranger.stream);
    }
    stranger.stream = FrameStream();
  }

  const MeshPlan &plan_;
  const Fd &listener_;
  const Waiter &waiter_;
  Limit limit_;
  std::string label_;
  std::vector<FrameStream> links_;
  std::vector<Stranger> strangers_;
  AcceptPause pause_;
};

}  // namespace

std::vector<FrameStream> form_mesh(const MeshPlan &plan, const Fd &listener, const Waiter &waiter) {
  return Forming(plan, listener, waiter).run();
}

}  // namespace fsdp::comm
