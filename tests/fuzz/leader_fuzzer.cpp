// SPDX-License-Identifier: Apache-2.0
// Runs libFuzzer on the messages between leaders of hosts. The leader under test is the library's. Each input stands
// for another leader that knows the secret but is broken or hostile. It sends messages of known and unknown kinds,
// bytes that are no frames, and datagrams. The leader under test stores nothing from refused messages, and blames only
// ranks of the job. If a connection carries bytes that are no message, it ends the connection with a text and goes on.
// Its other neighbour receives its heartbeats, and no invalid message.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "leader_scene.h"
#include "membership/tree/message.h"

namespace {

using namespace fsdp::membership;
using namespace fsdp::membership::fuzz;

// Counts over all inputs. They show it if a leader refuses everything.
struct Seen {
  uint64_t inputs, hellos, states, posts, texts, verdicts, reports, beats, ends, scenes[std::size(shapes)];
} seen;

// Judges only long runs: a single input that is played again shows too little.
void look_back() {
  const auto *counts = reinterpret_cast<const uint64_t *>(&seen);
  for (size_t i = 1; seen.inputs > 10'000 && i < sizeof seen / sizeof *counts; ++i)
    if (!counts[i]) {
      std::fprintf(stderr, "leader_fuzzer: of %llu inputs none was counted by number %zu of Seen\n",
                   static_cast<unsigned long long>(seen.inputs), i);
      std::_Exit(1);
    }
}

// The bytes of an input, with zeros behind its end.
class Input {
 public:
  Input(const uint8_t *data, size_t size) : rest_(data, size) {}
  bool empty() const { return rest_.empty(); }
  template <class T = uint8_t>
  T number() {
    T value{};
    const auto some = bytes(sizeof value);
    std::memcpy(&value, some.data(), some.size());
    return value;
  }
  std::span<const uint8_t> bytes(size_t count) {
    const auto some = rest_.first(std::min(count, rest_.size()));
    rest_ = rest_.subspan(some.size());
    return some;
  }

 private:
  std::span<const uint8_t> rest_;
};

constexpr size_t size_of(uint32_t kind) {
  if (kind == Report::kind) return sizeof(Report);
  if (kind == Verdict::kind) return sizeof(Verdict);
  switch (static_cast<tree::LinkKind>(kind)) {
    case tree::LinkKind::hello: return sizeof(tree::LinkHello);
    case tree::LinkKind::beat: return sizeof(tree::Beat);
    case tree::LinkKind::states: return sizeof(tree::RankState);
    case tree::LinkKind::goodbye: return sizeof(tree::Goodbye);
    case tree::LinkKind::post: return sizeof(tree::Post);
    case tree::LinkKind::wait_text: return sizeof(tree::WaitText);
  }
  return 0;
}

// Reads a frame as its kind, its size (0: the right size; otherwise the number less one), a byte that fills it, and
// runs of bytes. A mutation at the end of an accusation then needs no 3 KB of input.
Frame read_frame(Input &input) {
  const uint32_t said = input.number();
  const uint32_t kind = said < 8 ? static_cast<uint32_t>(tree::LinkKind::hello) + said : said;
  const size_t wanted = input.number<uint16_t>() % 20'000, right = size_of(kind);
  Frame frame{kind, std::vector<std::byte>(wanted ? wanted - 1 : right, static_cast<std::byte>(input.number()))};
  for (int runs = input.number() % 8; runs > 0; --runs) {
    const size_t at = input.number<uint16_t>() % (frame.body.size() + 1);
    const auto run = input.bytes(input.number());
    const size_t count = std::min(run.size(), frame.body.size() - at);
    std::copy_n(std::as_bytes(run).begin(), count, frame.body.begin() + static_cast<ptrdiff_t>(at));
  }
  return frame;
}

// Returns what a leader may write about a rank on another host.
struct RankView {
  uint32_t membership, awaited_rank;
  int32_t process;
  uint64_t wait_and_looks;
  uint32_t post_turn;
  bool operator==(const RankView &) const = default;
};
RankView view_of(const Control &control, uint32_t rank) {
  const WaitEntry &wait = control.waits()[rank];
  const PostEntry *post = control.posts().find(rank);
  return {static_cast<uint32_t>(control.membership(rank)), wait.awaited_rank, control.process(rank),
          wait.wait_and_looks, post ? post->turn() : 0};
}

// The last link, over TCP, takes five times as long as the others.
size_t shape_of(size_t number) { return number == 15 ? 4 : number / 4; }

class Play {
 public:
  Play(const uint8_t *data, size_t size)
      : input_(data, size),
        number_(shape_of(input_.number() % 16)),
        flags_(input_.number()),
        scene_(shapes[number_], flags_ & 1, !(flags_ & 2)),
        trusted_(shapes[number_].way == Way::tree || !(flags_ & 2)) {
    ++seen.scenes[number_];
  }

  void run() {
    for (int steps = 0; steps < 60 && !input_.empty(); ++steps) step();
    end();
  }

 private:
  void step() {
    switch (input_.number() % 16) {
      default: return say(read_frame(input_));
      case 10: return say_bytes();
      case 11: return let_time_pass(input_.number() * uint64_t{8});
      case 12: return say_datagram();
      case 13: return say_true_datagram();
      case 14: return suspect();
      case 15: return hang_up();
    }
  }

  // -- a message --
  void say(const Frame &frame) {
    check_hello(frame);
    const bool hears = trusted_ && scene_.hostile().open();
    scene_.hostile().queue(frame.kind, frame.body);
    (void)scene_.hostile().flush();
    scene_.deliver();
    if (!trusted_) return await_answer();
    const auto before = scene_.host().memory();
    const auto views = view_all();
    const bool accused = scene_.control().accused();
    scene_.round(0);
    check_writing(frame, before, views);
    const bool known = hears && !unsure_, ends = known && frame.body.size() <= tree::longest && !is_message(frame);
    scene_.drain(ends);
    if (known) check_end(frame, ends);
    note(frame, views, accused);
    may_blame_ |= frame.kind == Verdict::kind || frame.kind == Report::kind;
  }
  // Reads the leader's first frame on a connection that it has to admit, or by which it has asked to be admitted.
  void await_answer() {
    for (int i = 0; i < 3; ++i) scene_.round(1);
    scene_.drain(false);
    trusted_ = true;
    unsure_ = true;
  }
  void check_hello(const Frame &frame) {
    const auto hello = read_hello(scene_.plan(), frame);
    if (!hello) return;
    require(hello->node < node_count && hello->version == tree::version && hello->world_size == world_size &&
            static_cast<uint32_t>(hello->bond) <= 1);
    ++seen.hellos;
  }
  // Returns whether this frame may change the leader's knowledge of the rank.
  bool may_write(const Frame &frame, uint32_t rank) const {
    if (scene_.plan().node_of[rank] == scene_.plan().node()) return false;
    if (frame.kind == static_cast<uint32_t>(tree::LinkKind::states)) return scene_.tells_of(rank) && names(frame, rank);
    const bool one = frame.kind == static_cast<uint32_t>(tree::LinkKind::post) ||
                     frame.kind == static_cast<uint32_t>(tree::LinkKind::wait_text);
    return one && frame.body.size() == size_of(frame.kind) && number_at(frame, 0) == rank;
  }
  static uint32_t number_at(const Frame &frame, size_t at) {
    uint32_t number = 0;
    std::memcpy(&number, frame.body.data() + at, sizeof number);
    return number;
  }
  static bool names(const Frame &frame, uint32_t rank) {
    if (frame.body.size() % sizeof(tree::RankState) != 0) return false;
    for (size_t at = 0; at < frame.body.size(); at += sizeof(tree::RankState))
      if (number_at(frame, at) == rank) return true;
    return false;
  }
  void check_writing(const Frame &frame, const std::vector<std::byte> &before, const std::vector<RankView> &views) {
    bool any = false;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      const RankView now = view_of(scene_.control(), rank);
      const bool may = may_write(frame, rank);
      any |= may;
      require(may || now == views[rank]);
      require(now.membership >= views[rank].membership && now.membership <= static_cast<uint32_t>(Membership::gone));
    }
    require(any || !scene_.host().differs(before));
  }
  std::vector<RankView> view_all() {
    std::vector<RankView> views;
    for (uint32_t rank = 0; rank < world_size; ++rank) views.push_back(view_of(scene_.control(), rank));
    return views;
  }
  static bool is_message(const Frame &frame) {
    const auto kind = static_cast<tree::LinkKind>(frame.kind);
    if (kind == tree::LinkKind::states) return !frame.body.empty() && frame.body.size() % sizeof(tree::RankState) == 0;
    const size_t right = size_of(frame.kind);
    if (kind == tree::LinkKind::hello || right == 0 || frame.body.size() != right) return false;
    if (frame.kind != Report::kind && frame.kind != Verdict::kind) return true;
    Accusation accusation;
    std::memcpy(static_cast<void *>(&accusation), frame.body.data(), sizeof accusation);
    return is_verdict(accusation);
  }
  // A frame that is too long is refused: the link is to blame and stays open, but a connection of no neighbour ends.
  void check_end(const Frame &frame, bool ends) {
    const bool too_long = frame.body.size() > tree::longest;
    require(!ends || !scene_.hostile().open());
    seen.ends += ends;
    unsure_ |= too_long;
    if (may_blame_ || !promised_.empty()) return;
    if (ends) promised_ = "sent what is no message of this version of the library";
    const uint32_t leader = scene_.plan().nodes[shapes[number_].hostile].leader;
    const bool stays = scene_.control().membership(leader) <= Membership::member;  // a leader that has left may hang up
    if (too_long && shapes[number_].way == Way::tree && stays) promised_ = "cannot hear";
  }
  void note(const Frame &frame, const std::vector<RankView> &views, bool accused) {
    const auto changed = [&](auto member) {
      for (uint32_t rank = 0; rank < world_size; ++rank)
        if (view_of(scene_.control(), rank).*member != views[rank].*member) return true;
      return false;
    };
    seen.states += changed(&RankView::membership) || changed(&RankView::wait_and_looks);
    seen.posts += changed(&RankView::post_turn);
    seen.verdicts += frame.kind == Verdict::kind && !accused && scene_.control().accused();
    seen.reports += frame.kind == Report::kind && is_message(frame);
    scene_.control().waits().texts().for_each([&](uint32_t rank, uint32_t) {
      require(rank < world_size && scene_.plan().node_of[rank] != scene_.plan().node());
      ++seen.texts;
    });
  }

  // -- anything else --
  void say_bytes() {
    const auto bytes = input_.bytes(input_.number());
    if (bytes.empty()) return;
    ::send(scene_.hostile().socket().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    scene_.deliver();
    unsure_ = may_blame_ = true;
    scene_.round(0);
    scene_.drain(false);
  }
  void say_datagram() {
    scene_.send_datagram(input_.bytes(input_.number() % 80));
    scene_.round(0);
  }
  void say_true_datagram() {
    const uint32_t from = input_.number<uint16_t>(), kind = input_.number();
    const auto number = input_.number<uint32_t>();
    scene_.send_true_datagram(from == UINT16_MAX ? UINT32_MAX : from, kind, number);
    may_blame_ |= kind != 1;
    unsure_ |= kind != 1;
    if (kind == 2 && from == shapes[number_].honest) scene_.give_honest_up();
    const auto before = scene_.host().memory();
    scene_.round(0);
    require(!scene_.host().differs(before));
  }
  // Neighbours that send nothing during this time may be blamed for their silence.
  void let_time_pass(uint64_t ms) {
    may_blame_ |= ms > 0;
    scene_.round(ms);
  }
  // A rank of this host has itself found a failure.
  void suspect() {
    may_blame_ = true;
    const uint32_t rank = input_.number() % world_size;
    scene_.control().accuse(accuse_rank(FailureKind::failed, rank, "a rank of this host suspects it"));
    scene_.round(0);
  }
  void hang_up() {
    if (scene_.connected()) ::shutdown(scene_.hostile().socket().get(), SHUT_RDWR);
    may_blame_ = unsure_ = true;
    scene_.round(0);
  }

  // -- the end --
  void end() {
    for (int i = 0; i < 4 && !promised_.empty(); ++i) scene_.round(500);
    require(promised_.empty() ||
            (scene_.verdict() && scene_.verdict()->text.copy().find(promised_) != std::string::npos));
    const uint64_t beats = scene_.beats_heard();
    scene_.round(500);
    require(!scene_.expects_beats() || scene_.beats_heard() > beats);
    seen.beats += scene_.beats_heard() > beats;
  }

  Input input_;
  size_t number_;
  uint8_t flags_;
  Scene scene_;
  bool trusted_;            // the leader trusts it and listens
  bool unsure_ = false;     // whether the leader receives more of it
  bool may_blame_ = false;  // a rank has been blamed for another reason
  std::string promised_;    // in the verdict
};

}  // namespace

// Otherwise the allocator would take half of the time.
extern "C" const char *__asan_default_options() { return "quarantine_size_mb=4:malloc_context_size=4"; }

extern "C" int LLVMFuzzerInitialize(int *, char ***) { return std::atexit(look_back); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  ++seen.inputs;
  Play(data, size).run();
  return 0;
}
