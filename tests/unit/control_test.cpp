// SPDX-License-Identifier: Apache-2.0
// Tests the memory that ranks of a host share from the start. It is small per rank of a large job, and holds the few
// texts of ranks that wait.
#include "membership/liveness/control.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "membership/liveness/watch.h"
#include "membership/tree/message.h"
#include "membership/tree/states.h"
#include "transport/names.h"

namespace fsdp::membership {
namespace {

constexpr RanksHere eight_of_others{8, false}, eight_with_first{8, true};

TEST(ControlMemory, IsSmallInALargeJob) {
  EXPECT_LE(Control::size_bytes(max_ranks, eight_of_others), 1'677'721u / 2) << "half of the 1.6 MiB that are promised";
  EXPECT_LE(Control::size_bytes(max_ranks, eight_with_first), 2'411'724u) << "on one host of all";
  const auto each = [](RanksHere ranks) {
    return static_cast<double>(Control::size_bytes(max_ranks, ranks) - Control::size_bytes(max_ranks / 2, ranks)) /
           (max_ranks / 2);
  };
  EXPECT_NEAR(each(eight_of_others), 34, 0.5);
  EXPECT_NEAR(each(eight_with_first), 34 + 104, 0.5);
}

// Makes the control memory of one host, to which rank 0 belongs if `first` is true.
class HostsMemory : public testing::Test {
 protected:
  static constexpr uint32_t size = 600;
  explicit HostsMemory(bool first = false) : file(Control::create(size, {3, first})), control(file, size) {}
  // Runs the body in a process that dies at its end, or in the middle of it.
  void run_and_kill(const std::function<void(Control &)> &body) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::dup2(::open("/dev/null", O_WRONLY), 2);
      Control its(file, size);
      body(its);
      ::raise(SIGKILL);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
  }
  // Reads a text with a reader that dies.
  static std::string_view deadly() {
    void *const page = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return {static_cast<const char *>(page), 100};
  }
  Fd file;
  Control control;
};

TEST_F(HostsMemory, KeepsANameOncePerHost) {
  EXPECT_EQ(control.host(0), "unknown");
  for (uint32_t r = 0; r < 300; ++r) control.set_host(r, r % 2 ? "a" : "b");
  for (uint32_t r = 0; r < 300; ++r) EXPECT_EQ(control.host(r), r % 2 ? "a" : "b");
  for (uint32_t r = 0; r < 10; ++r) control.set_host(r, std::to_string(r));
  for (uint32_t r = 0; r < 6; ++r) EXPECT_EQ(control.host(r), std::to_string(r));
  EXPECT_EQ(control.host(299), "a");
  control.introduce(299);
  EXPECT_EQ(control.host(299), "unknown") << "there are eight names";
  EXPECT_EQ(control.process(299), ::getpid());
}

// ---- the texts of callers that wait for each other ----

class Awaiting final : public Awaited {
 public:
  explicit Awaiting(std::string what) : what_(std::move(what)) {}
  bool come() override { return false; }
  void sleep(uint32_t) override {}
  bool misses(uint32_t) const override { return false; }
  std::string text() const override { return what_; }

 private:
  std::string what_;
};

class WaitingCallers : public HostsMemory {
 protected:
  std::vector<uint32_t> look(ShownWait &wait, uint32_t missed, const std::string &call = "a call") {
    return wait.look(missed, call, Awaiting("for rank " + std::to_string(missed)));
  }
  ShownWait wait_of(uint32_t rank) { return ShownWait(control.waits(), size, rank); }
  uint32_t texts() {
    uint32_t count = 0;
    control.waits().texts().for_each([&](uint32_t, uint32_t) { ++count; });
    return count;
  }
  // Writes a text as a rank in a cycle of waits does.
  void tell(uint32_t rank, uint32_t number = 1) { tell(control, rank, number, "text of " + std::to_string(rank)); }
  static void tell(Control &control, uint32_t rank, uint32_t number, std::string_view text) {
    control.waits()[rank].wait_and_looks = wait_and_looks(number, 1);
    control.waits().show_text(rank, number, text);
  }
  void fill() {
    for (uint32_t r = 100; r < 100 + WaitTexts::places; ++r) tell(r);
  }
};

TEST_F(WaitingCallers, TellTheirTextsOnlyInACircle) {
  ShownWait one = wait_of(1), two = wait_of(2), three = wait_of(3);
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(look(one, 2).empty());
    EXPECT_TRUE(look(three, 1).empty());
  }
  EXPECT_EQ(texts(), 0u);
  std::vector<uint32_t> cycle;
  for (int i = 0; i < 4 && cycle.empty(); ++i) {
    EXPECT_TRUE(look(three, 1).empty()) << "it waits for the cycle, and is not in it";
    (void)look(two, 1, "fsdp_b");
    cycle = look(one, 2, "fsdp_a");
  }
  EXPECT_EQ(cycle, (std::vector<uint32_t>{1, 2}));
  EXPECT_EQ(one.text(1), "fsdp_a (for rank 2)");
  EXPECT_EQ(one.text(2), "fsdp_b (for rank 1)");
  EXPECT_EQ(one.text(3), "another call");
  EXPECT_EQ(texts(), 2u);
}

// The texts come through a stream, and again in a second wait.
TEST_F(WaitingCallers, TellTheTextOfEachWait) {
  ShownWait one = wait_of(1), two = wait_of(2);
  for (const char *what : {"gather of 'a'", "gather of 'b'"}) {
    StreamWaits::StreamWait stream;
    stream.number = what[11];
    stream.awaited_rank = 2;
    stream.text = what;
    std::vector<uint32_t> cycle;
    for (int i = 0; i < 6; ++i) {
      ++stream.looks;
      cycle = one.look_through(stream, "fsdp_publish");
      (void)look(two, 1);
    }
    EXPECT_EQ(cycle, (std::vector<uint32_t>{1, 2}));
    EXPECT_EQ(two.text(1), "fsdp_publish (" + std::string(what) + ")");
    EXPECT_EQ(two.text(2), "a call (for rank 1)");
  }
}

TEST_F(WaitingCallers, LowestRanksTellTheirTextsIfPlacesRunOut) {
  fill();
  EXPECT_EQ(texts(), WaitTexts::places);
  tell(500);
  EXPECT_EQ(control.waits().text(500), "another call");
  tell(50);
  EXPECT_EQ(control.waits().text(50), "text of 50");
  EXPECT_EQ(control.waits().text(99 + WaitTexts::places), "another call") << "it was the highest";
  EXPECT_EQ(control.waits().text(98 + WaitTexts::places), "text of 354");
  EXPECT_EQ(texts(), WaitTexts::places);
}

TEST_F(WaitingCallers, GiveAPlaceBackWithTheirWait) {
  fill();
  control.waits()[120].wait_and_looks = wait_and_looks(1, 0);  // over
  control.waits()[130].wait_and_looks = wait_and_looks(2, 1);
  tell(500), tell(501), tell(502);
  EXPECT_EQ(control.waits().text(500), "text of 500");
  EXPECT_EQ(control.waits().text(501), "text of 501");
  EXPECT_EQ(control.waits().text(502), "another call");
  EXPECT_EQ(control.waits().text(130), "another call");
  {
    ShownWait wait = wait_of(100);
    (void)look(wait, 100);  // the rank is in its own cycle, and in another wait than before
    EXPECT_EQ(wait.text(100), "a call (for rank 100)");
  }
  tell(503);
  EXPECT_EQ(control.waits().text(503), "text of 503");
}

// No rank waits for a rank that died while it wrote its text. The unfinished text is not shown, and its place becomes
// free for another rank.
TEST_F(WaitingCallers, LeaveTheirPlacesWhenTheyDie) {
  fill();
  control.waits()[120].wait_and_looks = 0;
  run_and_kill([](Control &its) { tell(its, 598, 1, deadly()); });
  ASSERT_NE(control.waits()[598].wait_and_looks, 0u);
  EXPECT_EQ(control.waits().text(598), "another call");
  EXPECT_EQ(texts(), WaitTexts::places - 1);
  tell(400);
  EXPECT_EQ(control.waits().text(400), "another call") << "that place may be written still";
  control.waits()[598].wait_and_looks = 0;
  tell(401);
  EXPECT_EQ(control.waits().text(401), "text of 401");

  control.waits()[401].wait_and_looks = 0;
  run_and_kill([](Control &its) { tell(its, 402, 1, "text of 402"); });
  EXPECT_EQ(control.waits().text(402), "text of 402") << "it was whole";
  control.waits()[402].wait_and_looks = wait_and_looks(2, 1);
  tell(403);
  EXPECT_EQ(control.waits().text(403), "text of 403");
}

// ... while other ranks read, and others need the same places, because the first places become free again and again.
TEST_F(WaitingCallers, NeverTellTheTextOfAnother) {
  constexpr uint32_t busy = 8;
  const auto text_of = [](uint32_t rank, uint32_t number) {
    return std::string(200, static_cast<char>('a' + (rank + number) % 26));
  };
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 2; ++t)
    threads.emplace_back([&, t] {
      for (uint32_t number = 1; !stop; ++number)
        for (uint32_t r = t; r < busy; r += 2) tell(control, r, number, text_of(r, number));
    });
  uint32_t seen = 0;
  std::string other;
  constexpr uint32_t enough = 20'000;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (uint32_t r = 0; other.empty() && seen < enough && std::chrono::steady_clock::now() < end; r = (r + 1) % busy) {
    const auto number = wait_number(control.waits()[r].wait_and_looks);
    WaitTexts::Copy text;
    if (!control.waits().texts().load(r, number, text)) continue;
    ++seen;
    if (text.view() != text_of(r, number)) other = text.copy();
  }
  stop = true;
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(other, "");
  EXPECT_EQ(seen, enough);
}

// ---- between hosts ----

class MirroredWaits : public WaitingCallers {
 protected:
  MirroredWaits() {
    for (uint32_t r = 0; r < size; ++r) plan.node_of.push_back(r / 300);
    NodePlan second = plan;
    second.rank = 300;
    there_plan = second;
    here = std::make_unique<RemoteStates>(control, plan);
    there = std::make_unique<RemoteStates>(other, there_plan);
  }
  std::vector<uint32_t> told(uint64_t ms) {
    std::vector<uint32_t> ranks;
    here->look(ms, [&](const tree::RankState &state) { EXPECT_TRUE(there->apply(state)); });
    here->look_at_texts(ms, [&](const tree::WaitText &text) {
      ranks.push_back(text.rank);
      EXPECT_TRUE(there->apply(text));
      EXPECT_FALSE(here->apply(text)) << "of a rank of this host";
    });
    return ranks;
  }
  NodePlan plan, there_plan;
  const Fd other_file = Control::create(size, {3, false});
  Control other{other_file, size};
  std::unique_ptr<RemoteStates> here, there;
};

TEST_F(MirroredWaits, TextsAreSentOnceAndRepeatedNowAndThen) {
  tell(7);
  tell(400);  // belongs to the other host
  EXPECT_EQ(told(100'000), std::vector<uint32_t>{7});
  EXPECT_EQ(other.waits().text(7), "text of 7");
  EXPECT_EQ(other.waits().text(400), "another call");
  EXPECT_TRUE(told(100'500).empty());
  EXPECT_EQ(told(104'000), std::vector<uint32_t>{7}) << "what was said may have been lost";
  uint32_t there_now = 0;
  other.waits().texts().for_each([&](uint32_t, uint32_t) { ++there_now; });
  EXPECT_EQ(there_now, 1u);
  control.waits()[7].wait_and_looks = wait_and_looks(1, 0);
  EXPECT_TRUE(told(110'000).empty()) << "it does not wait any more";
  tell(7, 2);
  EXPECT_EQ(told(115'000), std::vector<uint32_t>{7}) << "another wait";
}

TEST_F(MirroredWaits, ATextFollowsTheStateOfItsWait) {
  control.waits()[7].wait_and_looks = wait_and_looks(1, 1);
  (void)told(100'000);
  tell(7, 2);
  EXPECT_TRUE(told(100'100).empty()) << "others have not heard of that wait";
  EXPECT_EQ(told(104'000), std::vector<uint32_t>{7});
}

TEST_F(MirroredWaits, TheTextOfAnotherWaitIsToldAtOnce) {
  plan.node_of = {0, 0, 1, 1};  // with so few ranks, many texts are shown
  RemoteStates few(control, plan);
  for (const uint32_t number : {1, 2}) {
    tell(1, number);
    few.look(100'000 + 200 * number, [](const tree::RankState &) {});
    uint32_t texts = 0;
    few.look_at_texts(100'000 + 200 * number, [&](const tree::WaitText &) { ++texts; });
    EXPECT_EQ(texts, 1u) << number;
  }
}

TEST_F(MirroredWaits, EachHostTellsOfItsRanks) {
  tell(7);
  (void)told(100'000);
  other.waits()[300].wait_and_looks = wait_and_looks(1, 1);
  there->look(100'000, [](const tree::RankState &) {});
  there->look_at_texts(100'000, [](const tree::WaitText &text) { FAIL() << text.rank; });
}

// A place is free unless a rank waits as its text says. Then the next rank would take the place, and a shown text would
// be lost. So a text that comes before the rank's state, or after its wait, takes no place.
TEST_F(MirroredWaits, ATextOfAnUnknownWaitTakesNoPlace) {
  const auto texts_there = [&] {
    uint32_t count = 0;
    other.waits().texts().for_each([&](uint32_t, uint32_t) { ++count; });
    return count;
  };
  tree::WaitText text{7, 2, std::string_view("early")};
  EXPECT_FALSE(there->apply(text)) << "it has not been heard of";
  tree::RankState state{7, 0, static_cast<uint32_t>(Membership::member), 300, wait_and_looks(1, 1)};
  EXPECT_TRUE(there->apply(state));
  EXPECT_FALSE(there->apply(text)) << "it is another wait that was heard of";
  EXPECT_EQ(texts_there(), 0u);
  state.wait_and_looks = wait_and_looks(2, 1);
  EXPECT_TRUE(there->apply(state));
  EXPECT_TRUE(there->apply(text));
  EXPECT_EQ(other.waits().text(7), "early");
}

// No other rank may take its place meanwhile.
TEST_F(MirroredWaits, ACallerThatWaitsOnKeepsItsPlace) {
  tell(7);
  (void)told(100'000);
  std::atomic<bool> stop{false};
  uint64_t free = 0;
  std::thread looker([&] {
    while (!stop) free += !other.waits().is_current(7, 1);
  });
  tree::RankState state{7, 0, static_cast<uint32_t>(Membership::member), 300, wait_and_looks(1, 1)};
  for (int i = 0; i < 3'000'000; ++i) ++state.wait_and_looks, (void)there->apply(state);
  stop = true;
  looker.join();
  EXPECT_EQ(free, 0u);
  EXPECT_EQ(other.waits().text(7), "text of 7");
}

TEST(NodeStates, AreWholeOnes) {
  tree::StateMap states;
  for (uint32_t r = 0; r < max_ranks; ++r) states[r] = {r, 1, 1, r % 7, r % 2 ? uint64_t{1} << 32 | r : 0};
  std::vector<tree::RankState> read;
  for (const bool waits : {false, true})
    for (const SharedFrame &written : tree::write_states(states, waits, 4096)) {
      const std::span<const std::byte> bytes = std::as_bytes(std::span(written->bytes));
      EXPECT_LE(bytes.size(), 4096 + FrameHead::size_bytes);
      Frame frame{static_cast<uint32_t>(tree::LinkKind::states), {}};
      frame.body.assign(bytes.begin() + FrameHead::size_bytes, bytes.end());
      const auto some = tree::read_states(frame);
      ASSERT_TRUE(some);
      read.insert(read.end(), some->begin(), some->end());
      frame.body.pop_back();
      EXPECT_FALSE(tree::read_states(frame));
    }
  ASSERT_EQ(read.size(), states.size());
  for (const tree::RankState &state : read) {
    EXPECT_EQ(state.wait_and_looks, states[state.rank].wait_and_looks);
    EXPECT_EQ(state.awaited_rank, state.rank % 7);
  }
}

// ---- posts ----

class PostingRanks : public HostsMemory {
 protected:
  explicit PostingRanks(bool first = false) : HostsMemory(first) {}
  void post(uint32_t rank, uint64_t word, std::string_view text = {}) { post(control, rank, word, text); }
  static void post(Control &control, uint32_t rank, uint64_t word, std::string_view text) {
    control.posts().store(rank, std::as_bytes(std::span(&word, 1)), text, std::nullopt);
  }
  // Returns "word text", or "" if there is nothing.
  std::string read(uint32_t rank) {
    uint64_t word = 0;
    std::array<char, post_text_bytes> text;
    text.fill('x');
    if (!control.posts().load(rank, std::as_writable_bytes(std::span(&word, 1)), text)) return "";
    return std::to_string(word) + " " + text.data();
  }
};

class PostingRanksWithTheFirst : public PostingRanks {
 protected:
  PostingRanksWithTheFirst() : PostingRanks(true) {}
};

TEST_F(PostingRanks, HaveRoomForThoseOfTheHostAndTheFirst) {
  for (const uint32_t rank : {7u, 0u, 8u, 9u}) post(rank, 10 + rank, "why");
  for (const uint32_t rank : {7u, 0u, 8u, 9u}) EXPECT_EQ(read(rank), std::to_string(10 + rank) + " why");
  post(10, 1);
  EXPECT_EQ(read(10), "") << "no rank of this host reads it";
  post(8, 2);
  EXPECT_EQ(read(8), "2 ");
}

TEST_F(PostingRanksWithTheFirst, HaveRoomForAll) {
  for (uint32_t r = 0; r < size; ++r) post(r, r);
  for (uint32_t r = 0; r < size; ++r) ASSERT_EQ(read(r), std::to_string(r) + " ");
}

// All ranks fail at once. The words of the lowest rank are reported.
TEST_F(PostingRanksWithTheFirst, TellTheTextsOfTheLowest) {
  for (uint32_t r = size; r-- > 0;) post(r, r, "why of " + std::to_string(r));
  for (uint32_t r = 0; r < PostTexts::places; ++r)
    EXPECT_EQ(read(r), std::to_string(r) + " why of " + std::to_string(r));
  EXPECT_EQ(read(PostTexts::places), std::to_string(PostTexts::places) + " ") << "the word is there";
  for (uint32_t r = 0; r < PostTexts::places; ++r) post(r, 1);
  for (uint32_t r = 400; r < 400 + PostTexts::places; ++r) post(r, r, "why");
  EXPECT_EQ(read(400 + PostTexts::places - 1), std::to_string(400 + PostTexts::places - 1) + " why")
      << "the places of what is not shown any more";
}

// The rank may live and go on writing, so it keeps its place.
TEST_F(PostingRanksWithTheFirst, KeepAPlaceThatTheyWrite) {
  run_and_kill([](Control &its) { post(its, 5, 1, deadly()); });
  for (uint32_t r = 100; r < 99 + PostTexts::places; ++r) post(r, r, "why");
  post(200, 1, "why");
  EXPECT_EQ(read(200), "1 ");
  EXPECT_EQ(read(100), "100 why");
}

TEST_F(PostingRanks, LeaveNoHalfWrittenPostWhenTheyDie) {
  post(7, 1, "before");
  run_and_kill([](Control &its) { post(its, 7, 2, deadly()); });
  EXPECT_EQ(read(7), "") << "its writer has died over it";
  post(7, 3, "after");
  EXPECT_EQ(read(7), "3 after");
}

}  // namespace
}  // namespace fsdp::membership
