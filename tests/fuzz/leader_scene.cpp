// SPDX-License-Identifier: Apache-2.0
#include "leader_scene.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "membership/tree/message.h"

namespace {

// Four words of FNV-1a, each with its own initial value.
void mix(uint64_t (&words)[4], const void *data, size_t bytes) {
  for (uint64_t i = 0; i < 4; ++i) words[i] = (words[i] ^ i) * 0x100000001b3;
  for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    uint64_t some = 0;
    std::memcpy(&some, static_cast<const char *>(data) + at, std::min(bytes - at, sizeof some));
    for (uint64_t &word : words) word = (word ^ some ^ word >> 29) * 0x100000001b3;
  }
}

}  // namespace

unsigned char *cheap_hmac(const EVP_MD *, const void *key, int key_bytes, const unsigned char *data, size_t bytes,
                          unsigned char *digest, unsigned int *digest_bytes) {
  uint64_t words[4] = {bytes, bytes, bytes, bytes};
  mix(words, key, static_cast<size_t>(key_bytes));
  mix(words, data, bytes);
  if (digest_bytes) *digest_bytes = sizeof words;
  return static_cast<unsigned char *>(std::memcpy(digest, words, sizeof words));
}

unsigned char *cheap_sha256(const unsigned char *data, size_t bytes, unsigned char *digest) {
  return cheap_hmac(nullptr, nullptr, 0, data, bytes, digest, nullptr);
}

namespace fsdp {

namespace {
constexpr uint64_t first_ms = 1'000'000;
uint64_t now_ms = first_ms;
}  // namespace

uint64_t steady_ms() noexcept { return now_ms; }

namespace membership::fuzz {
namespace {

constexpr uint32_t limit_ms = 8000, beat_ms = limit_ms / 20;
constexpr const char *nobody_listens = "127.0.0.1:1";

// Links of a host with live ranks that send each other nothing.
class QuietLinks final : public Links {
 public:
  explicit QuietLinks(uint32_t rank) : rank_(rank) {}
  bool send(uint32_t, Parcel, const Fd &) override { return true; }
  std::optional<Fd> take(Parcel) override { return {}; }
  void sleep(uint32_t) override {}
  void find_dead(const std::function<void(uint32_t)> &) override {}
  std::optional<std::vector<uint32_t>> neighbours() const override { return std::vector<uint32_t>{rank_ + 1}; }
  std::optional<Fd> meet(Parcel, std::span<const uint32_t>, const std::function<Fd()> &) override { return {}; }

 private:
  uint32_t rank_;
};

Fd open_door() {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const sockaddr any{AF_UNIX, {}};  // the kernel chooses a name
  require(::bind(socket.get(), &any, sizeof any.sa_family) == 0 && ::listen(socket.get(), 64) == 0);
  return socket;
}

Fd connect_to(const Fd &door) {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un at{};
  socklen_t length = sizeof at;
  require(::getsockname(door.get(), reinterpret_cast<sockaddr *>(&at), &length) == 0);
  require(::connect(socket.get(), reinterpret_cast<const sockaddr *>(&at), length) == 0);
  return socket;
}

// With thousands of connections a second, all ports would soon be in TIME_WAIT.
void end_at_once(const Fd &socket) {
  const linger at_once{1, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

NodePlan plan_of(uint32_t node) {
  NodePlan plan;
  plan.rank = node * ranks_of_node;
  plan.degree = 2;
  plan.secret = "the fuzzer's secret";
  plan.job = "fuzz";
  plan.heartbeat_timeout_ms = limit_ms;
  for (uint32_t n = 0; n < node_count; ++n) {
    plan.node_of.insert(plan.node_of.end(), ranks_of_node, n);
    plan.nodes.push_back({n * ranks_of_node, "h" + std::to_string(n), nobody_listens});
  }
  return plan;
}

}  // namespace

// -- the host --

Host &Host::of(uint32_t node) {
  static std::map<uint32_t, std::unique_ptr<Host>> hosts;
  auto &host = hosts[node];
  if (!host) host = std::make_unique<Host>(node);
  return *host;
}

Host::Host(uint32_t node) : Host(node, Control::create(world_size, {ranks_of_node, node == 0})) {}

Host::Host(uint32_t node, Fd file)
    : plan(plan_of(node)),
      file_(std::move(file)),
      door_(open_door()),
      memory_(file_, Control::size_bytes(world_size, {ranks_of_node, node == 0}), Access::read_write, "memory") {
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  datagrams_.reset(ends[0]), datagrams_from_.reset(ends[1]);
  static Failure failure;
  static const Waiter waiter(failure, nullptr, nullptr, 30'000);
  seat_ = std::make_unique<Seat>(plan.rank, world_size, file_, std::make_unique<QuietLinks>(plan.rank), waiter, failure,
                                 limit_ms);
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    control().set_membership(rank, Membership::member);
    control().set_process(rank, static_cast<int32_t>(1000 + rank));
  }
  first_ = memory();
  find_verdict();
}

// Finds the bytes that a verdict can change, by a verdict in which every byte is set.
void Host::find_verdict() {
  Accusation accusation;
  std::memset(static_cast<void *>(&accusation), 0xff, sizeof accusation);
  control().decide(accusation);
  const auto now = memory();
  const auto begin = std::ranges::mismatch(first_, now).in1;
  const auto end = std::mismatch(first_.rbegin(), first_.rend(), now.rbegin()).first.base();
  verdict_begin_ = static_cast<size_t>(begin - first_.begin());
  verdict_end_ = static_cast<size_t>(end - first_.begin());
  require(verdict_end_ > verdict_begin_ && verdict_end_ - verdict_begin_ < sizeof accusation + 64);
  reset();
}

void Host::reset() {
  std::ranges::copy(first_, memory_.data());
  char rest[64];
  while (::recv(datagrams_.get(), rest, sizeof rest, MSG_DONTWAIT) >= 0) continue;
  if (plan.node() != 3) return;
  std::string problem;  // at a port of its own: a connection of an earlier input may still come
  refuge_ = listen_at(Endpoint::numeric("127.0.0.1", 0, problem).at(0), 64);
  plan.nodes[0].address = Endpoint::local(refuge_).text();
}

void Host::send_datagram(std::span<const uint8_t> bytes) const {
  ::send(datagrams_from_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool Host::differs(const std::vector<std::byte> &before) const {
  return std::memcmp(before.data(), memory_.data(), verdict_begin_) != 0 ||
         std::memcmp(before.data() + verdict_end_, memory_.data() + verdict_end_, before.size() - verdict_end_) != 0;
}

// -- the scene --

Scene::Scene(const Shape &shape, bool parent_of_refugee_left, bool greets)
    : shape_(shape), host_(Host::of(shape.self)) {
  now_ms = first_ms;
  host_.reset();
  if (parent_of_refugee_left) control().set_membership(2 * ranks_of_node, Membership::left);
  NodeLinks links;
  FrameStream parent;
  if (shape.way == Way::tree) hostile_ = join(links, shape.hostile);
  if (shape.way == Way::refuge) parent = join(links, plan().parent());
  honest_ = join(links, shape.honest);
  leader_ = std::make_unique<NodeLeader>(host_.seat(), plan(), std::move(links), host_.listener());
  // The kernel's filter looks behind the header of UDP; the leader checks the whole datagram again.
  const int nothing = 0;
  ::setsockopt(host_.listener().datagrams.get(), SOL_SOCKET, SO_DETACH_FILTER, &nothing, sizeof nothing);
  if (shape.way == Way::refugee) seek_shelter(greets);
  if (shape.way != Way::refuge) return;
  parent.queue(static_cast<uint32_t>(tree::LinkKind::goodbye), tree::bytes_of(tree::Goodbye{}));
  parent.flush();
  give_shelter(greets);
}

Scene::~Scene() {
  if (over_tcp() && hostile_) end_at_once(hostile_.socket());
  hostile_ = FrameStream();
}

// Makes a connection in its state after the handshake.
FrameStream Scene::join(NodeLinks &links, uint32_t node) {
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  StreamKeys mine, theirs;
  mine.out.fill(1), mine.in.fill(2), theirs.out.fill(2), theirs.in.fill(1);
  links.emplace(node, FrameStream(Fd(ends[0]), tree::longest, theirs));
  return FrameStream(Fd(ends[1]), tree::longest, mine);
}

void Scene::seek_shelter(bool greets) { prove(connect_to(host_.door()), Role::guest, greets); }

void Scene::give_shelter(bool greets) {
  Fd socket;
  round(1);
  for (int i = 0; i < 1000 && !(socket = accept_from(host_.refuge())); ++i) {
    pollfd entry{host_.refuge().get(), POLLIN, 0};
    ::poll(&entry, 1, i < 10 ? 0 : 1);
    round(0);
  }
  require(static_cast<bool>(socket));
  prove(std::move(socket), Role::host, greets);
}

void Scene::prove(Fd socket, Role role, bool greets) {
  Handshake handshake(role, plan().secret, link_label(plan()));
  for (int i = 0; i < 1000 && handshake.advance(socket) == IoState::waiting; ++i) {
    pollfd entry{socket.get(), POLLIN, 0};
    if (over_tcp()) ::poll(&entry, 1, i < 10 ? 0 : 1);
    round(0);
  }
  require(handshake.state() == IoState::done);
  hostile_ = FrameStream(std::move(socket), tree::longest, handshake.keys());
  if (!greets) return;
  NodePlan own = plan();
  own.rank = shape_.hostile * ranks_of_node;
  greet(hostile_, own, tree::Bond::refuge);
  hostile_.flush();
  deliver();
  round(1);
}

// Gives up after a while: once one end has hung up, some bytes are never acknowledged.
void Scene::deliver() {
  if (!over_tcp() || !hostile_.open()) return;
  int bytes = 1;
  for (int i = 0; i < 1000 && ::ioctl(hostile_.socket().get(), SIOCOUTQ, &bytes) == 0 && bytes > 0; ++i)
    ::sched_yield();
}

void Scene::drain(bool ends) {
  for (int i = 0; i < 10; ++i) {
    while (hostile_.receive()) continue;
    if (!ends || !over_tcp() || !hostile_.open()) return;
    pollfd entry{hostile_.socket().get(), POLLIN, 0};
    ::poll(&entry, 1, 1000);
  }
}

// A refuge sends messages about nodes that have lost their way to the root.
bool Scene::has_detour(uint32_t node) const {
  for (; node != 0; node = plan().parent_of(node))
    if (host_.control().membership(plan().nodes[plan().parent_of(node)].leader) >= Membership::left) return true;
  return false;
}

bool Scene::tells_of(uint32_t rank) const {
  const uint32_t of = plan().node_of[rank];
  const bool above = shape_.way == Way::refuge || (plan().has_parent() && plan().parent() == shape_.hostile);
  if (above) return !plan().is_above(plan().node(), of);
  return plan().is_above(shape_.hostile, of) || (NodePlan::is_refuge(shape_.hostile) && has_detour(of));
}

void Scene::say_honest_beat() {
  if (now_ms - own_beat_ms_ < beat_ms) return;
  own_beat_ms_ = now_ms;
  const tree::Beat beat{now_ms};
  honest_.queue(static_cast<uint32_t>(beat.kind), tree::bytes_of(beat));
  honest_.flush();
}

void Scene::round(uint64_t ms) {
  now_ms += ms;
  say_honest_beat();
  leader_->run(-1, 0);
  hear_honest();
  check_verdict();
}

// The form of lib/membership/tree/datagrams: a mark, the sender's node, the kind, a number, the proof.
void Scene::send_true_datagram(uint32_t from, uint32_t kind, uint64_t number) const {
  uint8_t node[4], said[20], bytes[56] = {};
  const uint32_t self = plan().node();
  std::memcpy(node, &self, sizeof node);
  const Digest mark = authenticate(plan().secret, "libfsdp datagram " + plan().job, {node});
  std::memcpy(said, mark.data(), 8);
  std::memcpy(said + 8, &from, sizeof from);
  std::memcpy(said + 12, &number, sizeof number);
  const std::string label = (kind == 1 ? "libfsdp beat " : "libfsdp core dump ") + plan().job;
  const Digest proof = authenticate(plan().secret, label, {said});
  std::memcpy(bytes, said, 12);
  std::memcpy(bytes + 12, &kind, sizeof kind);
  std::memcpy(bytes + 16, &number, sizeof number);
  std::memcpy(bytes + 24, proof.data(), proof.size());
  send_datagram(bytes);
}

// -- the honest neighbour --

void Scene::hear_honest() {
  while (const auto frame = honest_.receive()) check_heard(*frame);
  require(honest_.open() || !expects_beats_);
}

// A leader passes on nothing that it would not believe itself.
void Scene::check_heard(const Frame &frame) {
  if (tree::as<tree::Beat>(frame)) return void(++beats_);
  if (const auto report = tree::as<Report>(frame)) return require(is_verdict(report->accusation));
  if (const auto verdict = tree::as<Verdict>(frame)) return require(is_verdict(verdict->accusation));
  if (const auto post = tree::as<tree::Post>(frame))
    return require(post->rank < world_size && (post->to < world_size || post->to == tree::Post::everybody));
  if (const auto text = tree::as<tree::WaitText>(frame)) return require(text->rank < world_size);
  const auto states = tree::read_states(frame);
  require(states.has_value());
  for (const tree::RankState &state : *states) require(honest_may_hear_of(state));
}

bool Scene::honest_may_hear_of(const tree::RankState &state) const {
  if (state.rank >= world_size || state.membership > static_cast<uint32_t>(Membership::gone)) return false;
  const uint32_t of = plan().node_of[state.rank];
  // A refuge's message goes to all children. The child that sent it, or that it is about, does not believe it.
  if (plan().is_child(shape_.honest)) return !plan().is_above(shape_.honest, of) || has_detour(of);
  return plan().is_above(plan().node(), of) || tells_of(state.rank);  // the parent checks whether that fits
}

bool is_verdict(const Accusation &accusation) {
  RankSet all;
  for (uint32_t rank = 0; rank < world_size; ++rank) all.add(rank);
  return accusation.kind >= FailureKind::died && accusation.kind <= FailureKind::destroyed && accusation.rank >= -1 &&
         accusation.rank < static_cast<int32_t>(world_size) && all.contains(accusation.ranks);
}

// Checks the reports of this host's ranks. Once there is a verdict, it stays the same.
void Scene::check_verdict() {
  if (!control().accused()) return;
  const Accusation verdict = control().verdict();
  if (verdict_) return require(std::memcmp(&*verdict_, &verdict, sizeof verdict) == 0);
  verdict_ = verdict;
  require(is_verdict(verdict));
  const Error error = error_of(verdict, plan().rank);
  require(error.status == FSDP_PEER_FAILED || error.status == FSDP_MISMATCH || error.status == FSDP_TIMEOUT ||
          error.status == FSDP_ABORTED);
  require(!error.message.empty() && error.message.size() < sizeof Accusation::text);
  require(error.ranks.empty() || error.ranks.back() < world_size);
}

}  // namespace membership::fuzz
}  // namespace fsdp
