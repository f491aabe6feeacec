// SPDX-License-Identifier: Apache-2.0
// Tests which ranks count as silent, and the coordinator's conclusions from several reports.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "membership/liveness/failure_detector.h"
#include "membership/liveness/watch.h"
#include "membership/tree/coordinator.h"
#include "membership/tree/links.h"
#include "transport/names.h"

namespace fsdp::membership {
namespace {

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

class SilentRanks : public testing::Test {
 protected:
  SilentRanks() : file(Control::create(3, {3, true})) {
    control = std::make_unique<Control>(file, 3);
    for (uint32_t r = 0; r < 3; ++r) control->set_membership(r, Membership::member);
    control->introduce(1);
  }
  static bool everybody(uint32_t) { return true; }
  Fd file;
  std::unique_ptr<Control> control;
};

TEST_F(SilentRanks, AreCountedInChecks) {
  Pulse pulse(*control, 0, 1000);
  control->beat(1, 7);
  for (int i = 0; i < 14; ++i) {
    pulse.look();
    EXPECT_TRUE(i >= 7 || pulse.silent(everybody).empty()) << i;
    pause_ms(100);
  }
  // Rank 2 never sent a heartbeat, because it has no monitor.
  EXPECT_EQ(pulse.silent(everybody), std::vector<uint32_t>{1});
  EXPECT_EQ(pulse.text({1}).rfind(format_text("rank 1 (pid {}, host ", ::getpid()), 0), 0U) << pulse.text({1});
  EXPECT_TRUE(pulse.silent([](uint32_t rank) { return rank != 1; }).empty());
  control->set_membership(1, Membership::left);
  EXPECT_TRUE(pulse.silent(everybody).empty()) << "it has left";
  control->set_membership(1, Membership::member);
  control->beat(1, 8);
  pause_ms(100);
  pulse.look();
  EXPECT_TRUE(pulse.silent(everybody).empty()) << "it beats again";
}

// The rank itself was stopped, or its machine was suspended.
TEST_F(SilentRanks, AreNotFoundByARankThatMadeNoCheck) {
  Pulse pulse(*control, 0, 1000);
  control->beat(1, 7);
  pulse.look();
  pause_ms(1500);
  pulse.look();
  EXPECT_TRUE(pulse.silent(everybody).empty());
}

class NoPeers final : public Links {
 public:
  bool send(uint32_t, Parcel, const Fd &) override { return false; }
  std::optional<Fd> take(Parcel) override { return std::nullopt; }
  void sleep(uint32_t) override {}
  void find_dead(const std::function<void(uint32_t)> &) override {}
  std::optional<Fd> meet(Parcel, std::span<const uint32_t>, const std::function<Fd()> &) override { return {}; }
};

// Makes a /proc that a test writes. The descriptor may be any one, because only its number is used.
class FakeProc : public testing::Test {
 protected:
  FakeProc() { std::filesystem::create_directories(root + "/self/fdinfo"); }
  ~FakeProc() override { std::filesystem::remove_all(root); }
  void write(const std::string &path, const std::string &text) {
    std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  void set_pid(const std::string &pid) {
    write("/self/fdinfo/" + std::to_string(process.get()), "pos:\t0\nflags:\t02000002\nPid:\t" + pid + "\nNSpid:\t1\n");
  }
  bool dumps() const { return is_dumping_core(process, root.c_str()); }

  const std::string root = testing::TempDir() + "fake-proc-" + std::to_string(::getpid());
  const Fd process{::dup(0)};
};

TEST_F(FakeProc, SaysWhichProcessDumpsCore) {
  EXPECT_FALSE(dumps()) << "no file";
  set_pid("77");
  EXPECT_FALSE(dumps()) << "no status";
  write("/77/status", "Name:\ta\nState:\tD (disk sleep)\nCoreDumping:\t1\nTHP_enabled:\t1\n");
  EXPECT_TRUE(dumps());
  write("/77/status", "Name:\ta\nCoreDumping:\t0\nThreads:\t1\n");
  EXPECT_FALSE(dumps());
  write("/77/status", "Name:\tCoreDumping:\t1\nThreads:\t1\n");
  EXPECT_FALSE(dumps()) << "a process that calls itself so, on a kernel before 4.15";
  std::string groups = "Groups:\t";
  for (int group = 100'000; group < 110'000; ++group) groups += std::to_string(group) + " ";
  write("/77/status", "Name:\ta\n" + groups + "\nCoreDumping:\t1\n");
  EXPECT_TRUE(dumps()) << "in many groups";
}

TEST_F(FakeProc, SaysNothingOfProcessesThatAreGoneOrElsewhere) {
  for (const char *pid : {"-1", "0"}) {
    write(std::string("/") + pid + "/status", "CoreDumping:\t1\n");
    set_pid(pid);
    EXPECT_FALSE(dumps()) << pid;
  }
}

TEST_F(FakeProc, TellsOfTheFirstProcessOfAContainer) {
  set_pid("1");
  write("/1/status", "Name:\ta\nCoreDumping:\t1\n");
  EXPECT_TRUE(dumps());
}

TEST(CoreDump, IsNoneOfALivingProcess) {
  const Fd self(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  ASSERT_TRUE(self);
  EXPECT_FALSE(is_dumping_core(self));
}

// Rank 1 has ended, and rank 2 dumps core.
class DyingPeers final : public Links {
 public:
  bool send(uint32_t, Parcel, const Fd &) override { return false; }
  std::optional<Fd> take(Parcel) override { return std::nullopt; }
  void sleep(uint32_t) override {}
  void find_dead(const std::function<void(uint32_t)> &found) override { found(1); }
  bool dumps_core(uint32_t rank) const noexcept override { return ++asked, rank == 2; }
  std::optional<Fd> meet(Parcel, std::span<const uint32_t>, const std::function<Fd()> &) override { return {}; }
  mutable int asked = 0;
};

TEST_F(SilentRanks, AreAskedForTheirCores) {
  Pulse pulse(*control, 0, 1000);
  DyingPeers links;
  control->introduce(2);
  for (const uint32_t rank : {1u, 2u}) control->beat(rank, 7);
  pulse.look();
  Deaths early;
  early.find(*control, links, pulse);
  EXPECT_EQ(early.ranks().list(), std::vector<uint32_t>{1});
  EXPECT_EQ(links.asked, 0) << "they have just been heard";
  pause_ms(150);
  pulse.look();
  Deaths dead;
  dead.find(*control, links, pulse);
  EXPECT_EQ(dead.ranks().list(), (std::vector<uint32_t>{1, 2}));
  const Accusation accusation = dead.accuse("a gather: ", *control);
  EXPECT_EQ(accusation.kind, FailureKind::died);
  EXPECT_EQ(accusation.where(), "a gather: ");
  EXPECT_EQ(accusation.what(),
            format_text("rank 1 died; rank 2 (pid {}, host {}) is dumping core", ::getpid(), control->host(2)));
  Deaths new_ones;
  new_ones.find(*control, links, pulse, dead.ranks());
  EXPECT_TRUE(new_ones.empty());
  control->set_membership(2, Membership::left);
  Deaths others;
  others.find(*control, links, pulse);
  EXPECT_EQ(others.ranks().list(), std::vector<uint32_t>{1}) << "it had left";
}

TEST_F(SilentRanks, ThatHaveLeftAreNotDead) {
  Pulse pulse(*control, 0, 1000);
  DyingPeers links;
  for (const Membership state : {Membership::left, Membership::gone}) {
    control->set_membership(1, state);
    Deaths dead;
    dead.find(*control, links, pulse);
    EXPECT_TRUE(dead.empty()) << static_cast<int>(state);
  }
}

// Rank 0 is the leader and does not answer: it may have died while it decided.
TEST_F(SilentRanks, ASuspicionThatTheLeaderDoesNotAnswerBecomesTheVerdict) {
  const auto begin = std::chrono::steady_clock::now();
  control->set_leader(0);
  control->accuse(FailureKind::timeout, 2, "rank 2 has not come");
  control->settle();
  EXPECT_TRUE(control->suspected());
  EXPECT_FALSE(control->accused()) << "the leader may ask other nodes";
  while (!control->accused() && std::chrono::steady_clock::now() - begin < std::chrono::seconds(60)) {
    pause_ms(10);
    control->settle();
  }
  ASSERT_TRUE(control->accused());
  const auto waited = std::chrono::ceil<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
  EXPECT_GE(waited, std::chrono::seconds(1));
  EXPECT_EQ(control->verdict().kind, FailureKind::timeout);
  EXPECT_EQ(control->verdict().rank, 2);
  EXPECT_EQ(control->verdict().what(), "rank 2 has not come");
}

// Rank 2's message arrives some time after rank 2 has left.
class LateMessage final : public Awaited {
 public:
  explicit LateMessage(int ms) : at_(std::chrono::steady_clock::now() + std::chrono::milliseconds(ms)) {}
  bool come() override { return std::chrono::steady_clock::now() >= at_; }
  void sleep(uint32_t ms) override { pause_ms(static_cast<int>(ms)); }
  bool misses(uint32_t rank) const override { return rank == 2; }
  std::string text() const override { return "a late message"; }

 private:
  std::chrono::steady_clock::time_point at_;
};

class Leaver : public SilentRanks {
 protected:
  // Returns the error of a wait for the message. OK means that the message came.
  fsdp_status await(int ms) {
    control->set_membership(2, Membership::left);
    LateMessage message(ms);
    try {
      Watch(*control, links, pulse, 0, waiter, failure).wait(message);
    } catch (const Error &error) {
      EXPECT_EQ(error.rank, 2);
      return error.status;
    }
    return FSDP_OK;
  }
  NoPeers links;
  Failure failure;
  Waiter waiter{failure, nullptr, nullptr, 30'000};
  Pulse pulse{*control, 0, 1000};
};

TEST_F(Leaver, OfThisNodeHasSaidAll) { EXPECT_EQ(await(1000), FSDP_PEER_FAILED); }

TEST_F(Leaver, OfAnotherNodeMayBeHeardLater) {
  control->set_remote(2);
  EXPECT_EQ(await(1000), FSDP_OK);
}

TEST_F(Leaver, OfAnotherNodeIsNotWaitedForLong) {
  control->set_remote(2);
  EXPECT_EQ(await(10'000), FSDP_PEER_FAILED);
}

// The watch belongs to a thread that only checks now and then, and does not wait in a call. A save has such a thread.
TEST_F(Leaver, IsAnErrorOnlyToRanksThatWaitForIt) {
  control->set_membership(2, Membership::left);
  Watch watch(*control, links, pulse, 0, waiter, failure);
  const uint32_t others[] = {1}, all[] = {1, 2};
  EXPECT_NO_THROW(watch.look_at(others, "a save", true));
  EXPECT_NO_THROW(watch.look_at(all, "a save", false));
  try {
    watch.look_at(all, "a save", true);
    ADD_FAILURE() << "it is waited for on";
  } catch (const Error &error) {
    EXPECT_EQ(error.status, FSDP_PEER_FAILED);
    EXPECT_EQ(error.rank, 2);
    EXPECT_NE(error.message.find("a save"), std::string::npos) << error.message;
  }
}

// The message comes between the last check and the end of the time.
class LastMoment final : public Awaited {
 public:
  bool come() override { return ++looks_ == 2; }
  void sleep(uint32_t ms) override {
    pause_ms(static_cast<int>(ms));
    looks_ = 0;
  }
  bool misses(uint32_t rank) const override { return rank == 2; }
  std::string text() const override { return "the last moment"; }

 private:
  // these checks belong to the wait before it sleeps
  int looks_ = -1'000'000;
};

TEST_F(Leaver, WhatComesAtTheLastMomentHasCome) {
  LastMoment moment;
  const Waiter hurried{failure, nullptr, nullptr, 300};
  EXPECT_TRUE(Watch(*control, links, pulse, 0, hurried, failure).wait(moment));
}

// A peer that gives up because of a verdict has published the verdict before.
class GivenUpByAPeer final : public Awaited {
 public:
  explicit GivenUpByAPeer(Control &control) : control_(control) {}
  bool come() override { return false; }
  bool given_up() override {
    control_.accuse(FailureKind::mismatch, 1, "rank 1 called something else");
    return true;
  }
  void sleep(uint32_t ms) override { pause_ms(static_cast<int>(ms)); }
  bool misses(uint32_t rank) const override { return rank == 2; }
  std::string text() const override { return "what is given up"; }

 private:
  Control &control_;
};

TEST_F(Leaver, WhatIsGivenUpBecauseOfAVerdictEndsWithTheVerdict) {
  GivenUpByAPeer awaited(*control);
  try {
    Watch(*control, links, pulse, 0, waiter, failure).wait(awaited);
    ADD_FAILURE() << "it was given up without a word";
  } catch (const Error &error) {
    EXPECT_EQ(error.status, FSDP_MISMATCH) << error.message;
    EXPECT_EQ(error.rank, 1);
  }
}

NodePlan three_nodes() {
  NodePlan plan;
  plan.node_of = {0, 0, 1, 2};
  plan.nodes = {{0, "a", ""}, {2, "b", ""}, {3, "c", ""}};
  return plan;
}

RankSet set_of(std::initializer_list<uint32_t> ranks) {
  RankSet set;
  for (const uint32_t rank : ranks) set.add(rank);
  return set;
}

TEST(Coordinator, MergesDeathsWithinTheGrace) {
  const NodePlan plan = three_nodes();
  Coordinator coordinator(plan);
  EXPECT_FALSE(coordinator.decide(0));
  coordinator.hear(accuse_dead("", set_of({3})), 1000);
  EXPECT_FALSE(coordinator.decide(1050));
  coordinator.hear(accuse_dead("gather of 'x': ", set_of({1})), 1050);
  coordinator.hear(accuse_rank(FailureKind::timeout, 0, "rank 0 has not come"), 1060);
  const auto verdict = coordinator.decide(1100);
  ASSERT_TRUE(verdict);
  const Error error = error_of(*verdict, 0);
  EXPECT_EQ(error.status, FSDP_PEER_FAILED);
  EXPECT_EQ(error.rank, 1);
  EXPECT_STREQ(error.what(), "gather of 'x': ranks 1, 3 died");
}

TEST(Coordinator, KeepsWhatIsSaidOfACoreDump) {
  const NodePlan plan = three_nodes();
  const char *dump = "rank 3 (pid 7, host c) is dumping core";
  const auto text = [&](std::initializer_list<Accusation> all) {
    Coordinator coordinator(plan);
    for (const Accusation &one : all) coordinator.hear(one, 1000);
    return std::string(error_of(coordinator.decide(1100).value(), 0).what());
  };
  const Accusation dumps = accuse_dead("", set_of({3}), dump), died = accuse_dead("gather of 'x': ", set_of({3}));
  EXPECT_EQ(text({dumps, died}), std::string("gather of 'x': ") + dump);
  EXPECT_EQ(text({died, dumps}), std::string("gather of 'x': ") + dump);
  EXPECT_EQ(text({dumps, dumps}), dump);
  const Accusation other = accuse_dead("", set_of({1}));
  EXPECT_EQ(text({dumps, other}), std::string(dump) + "; rank 1 died");
  EXPECT_EQ(text({other, dumps, died}), std::string("gather of 'x': rank 1 died; ") + dump);
}

TEST(Coordinator, MergesStoppedRanksBySets) {
  const NodePlan plan = three_nodes();
  Coordinator coordinator(plan);
  const auto stopped = [](std::vector<uint32_t> ranks, const char *text) {
    return accuse_ranks(FailureKind::stopped, ranks, text);
  };
  coordinator.hear(stopped({3}, "rank 3 is silent"), 1000);
  EXPECT_FALSE(coordinator.decide(1050));
  coordinator.hear(stopped({2}, "rank 2 is silent"), 1010);
  coordinator.hear(stopped({3}, "so it is"), 1020);
  const Error two = error_of(coordinator.decide(1200).value(), 0);
  EXPECT_EQ(two.rank, 2);
  EXPECT_EQ(two.ranks, (std::vector<uint32_t>{2, 3}));
  EXPECT_STREQ(two.what(), "rank 3 is silent; rank 2 is silent");
  coordinator.hear(stopped({1, 2, 3}, "ranks 1, 2, 3 are silent"), 1030);
  const Error all = error_of(coordinator.decide(1200).value(), 0);
  EXPECT_EQ(all.rank, 1);
  EXPECT_EQ(all.ranks, (std::vector<uint32_t>{1, 2, 3}));
  EXPECT_STREQ(all.what(), "ranks 1, 2, 3 are silent");
}

TEST(Coordinator, DecidesAtOnceWhatComesAlone) {
  const NodePlan plan = three_nodes();
  Coordinator coordinator(plan);
  coordinator.hear(accuse_rank(FailureKind::mismatch, 2, "they differ"), 1000);
  coordinator.hear(accuse_dead("", set_of({3})), 1000);
  ASSERT_TRUE(coordinator.decide(1000));
  EXPECT_EQ(error_of(*coordinator.decide(1000), 0).status, FSDP_MISMATCH);
}

// A rank that lost a peer may have lost one that ended because of a death, and a silent host may be noticed late.
TEST(Coordinator, LetsADeathOutrankReportsWhileTheJobForms) {
  Accusation lost;
  lost.kind = FailureKind::cut;
  lost.text.set("no contact between host a and host b");
  const Accusation felt = accuse_rank(FailureKind::failed, 1, "rank 1 did not connect");
  const Accusation late = accuse_rank(FailureKind::timeout, 2, "rank 2 is late");
  Coordinator coordinator;
  EXPECT_FALSE(coordinator.open());
  coordinator.hear(lost, 1000);
  coordinator.hear(lost, 1000);
  EXPECT_FALSE(coordinator.decide(1059)) << "it always waits for what failed at the same time";
  const Error cut = error_of(coordinator.decide(1060).value(), 0);
  EXPECT_EQ(cut.rank, -1);
  EXPECT_STREQ(cut.what(), "no contact between host a and host b");
  coordinator.hear(felt, 1010);
  coordinator.hear(late, 1010);
  EXPECT_EQ(error_of(coordinator.decide(1060).value(), 0).rank, 1) << "of equal reports the first one decides";
  Accusation link;  // the frame is not its sender's, so neither end is to blame
  link.kind = FailureKind::failed;
  link.text.set("host a cannot hear host b");
  Coordinator of_link;
  of_link.hear(link, 1000);
  of_link.hear(felt, 1010);
  EXPECT_EQ(error_of(of_link.decide(1060).value(), 0).rank, -1);
  coordinator.hear(accuse_death(3), 1020);
  coordinator.hear(accuse_death(0), 1020);
  coordinator.hear(felt, 1020);
  const Error dead = error_of(coordinator.decide(1060).value(), 0);
  EXPECT_EQ(dead.ranks, (std::vector<uint32_t>{0, 3}));
  EXPECT_STREQ(dead.what(), "ranks 0, 3 died");
}

// A rank's own error names that rank. Its reports about other ranks stay as they are. The texts of both are for logs.
TEST(Accusation, NamesTheRankOfAnOwnErrorAndThatOfAnother) {
  const Accusation own = accuse_for(Error(FSDP_SYSTEM, "no\nmemory"), 2, "a");
  EXPECT_EQ(own.kind, FailureKind::failed);
  EXPECT_EQ(own.rank, 2);
  EXPECT_EQ(own.text.copy(), "rank 2 on a gave up before the job had formed: no?memory");
  Error late(FSDP_TIMEOUT, "ranks 3, 4 are late", 3);
  late.ranks = {3, 4};
  const Error told = error_of(accuse_for(late, 0, "a"), 1);
  EXPECT_EQ(told.status, FSDP_TIMEOUT);
  EXPECT_EQ(told.ranks, (std::vector<uint32_t>{3, 4}));
  EXPECT_STREQ(told.what(), "ranks 3, 4 are late");
  const Error link = error_of(accuse_for(Error(FSDP_PEER_FAILED, "cannot hear"), 0, "a"), 1);
  EXPECT_EQ(link.status, FSDP_PEER_FAILED);
  EXPECT_EQ(link.rank, -1);
  EXPECT_EQ(error_of(accuse_for(Error(FSDP_MISMATCH, "they differ", 4), 0, "a"), 1).status, FSDP_MISMATCH);
}

TEST(Coordinator, NamesEachCutLinkOnce) {
  const NodePlan plan = three_nodes();
  Coordinator coordinator(plan);
  coordinator.hear(accuse_links(plan, {{1, 2}}), 1000);
  coordinator.hear(accuse_links(plan, {{1, 2}, {1, 77}}), 1010);
  EXPECT_FALSE(coordinator.decide(1650))
      << "those that are no neighbours in the tree find their links cut half a second later";
  coordinator.hear(accuse_links(plan, {{0, 2}}), 1690);
  const Error error = error_of(coordinator.decide(1700).value(), 0);
  EXPECT_EQ(error.rank, -1);
  EXPECT_TRUE(error.ranks.empty());
  EXPECT_STREQ(error.what(),
               "no contact between host a (node 0) and host c (node 2), between host b (node 1) and host c (node 2) "
               "for 8.0 s: the network between them is cut");
}

// If heartbeats arrive as often as they are sent, and each check is 400 ms late, nothing is wrong. Two lost heartbeats
// raise doubt.
TEST(Silence, IsDoubtedWhenTwoBeatsAreLost) {
  for (const auto &[beat_ms, doubted_ms] : {std::pair(125u, 1200u), {500u, 1200u}, {1000u, 2400u}, {2000u, 4800u}}) {
    Silence silence;
    for (int beats = 0; beats < 20; ++beats) {
      silence.heard();
      for (uint32_t ms = 0; ms < beat_ms + 400; ms += 50) silence.count(50, beat_ms);
      EXPECT_TRUE(silence.trusted()) << beat_ms;
    }
    silence.heard();
    uint32_t ms = 0;
    for (; silence.trusted() && ms < 10'000; ms += 50) silence.count(50, beat_ms);
    EXPECT_EQ(ms, doubted_ms) << beat_ms;
  }
}

// UDP heartbeats were missed before a neighbour in the tree reported the reason.
TEST(Coordinator, ReportsSilenceAsANeighbourExplainsIt) {
  const NodePlan plan = three_nodes();
  for (const FailureKind kind : {FailureKind::stopped, FailureKind::died}) {
    Coordinator coordinator(plan);
    coordinator.hear(accuse_links(plan, {{1, 2}, {0, 2}}), 1000);
    coordinator.hear(
        kind == FailureKind::died ? accuse_dead("", set_of({3})) : accuse_rank(kind, 3, "rank 3 is stopped"), 1400);
    ASSERT_TRUE(coordinator.decide(1500));
    EXPECT_EQ(error_of(*coordinator.decide(1500), 0).rank, 3);
  }
  Coordinator coordinator(plan);
  coordinator.hear(accuse_links(plan, {{0, 1}, {0, 2}}), 1000);
  coordinator.hear(accuse_rank(FailureKind::stopped, 3, "rank 3 is stopped"), 1400);
  EXPECT_EQ(error_of(*coordinator.decide(1700), 0).rank, -1) << "not all of the links are that node's";
}

// A peer writes these bytes, so the text must be safe whatever they are.
class BadAccusations : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Coordinator, BadAccusations, testing::Values(0, 0x41, 0xff));
TEST_P(BadAccusations, AreSurvived) {
  const NodePlan plan = three_nodes();
  Accusation bad;
  std::memset(static_cast<void *>(&bad), GetParam(), sizeof bad);
  for (const FailureKind kind : {FailureKind::died, FailureKind::stopped, FailureKind::cut, FailureKind::aborted}) {
    bad.kind = kind;
    Coordinator coordinator(plan);
    coordinator.hear(bad, 0);
    coordinator.hear(bad, 0);
    ASSERT_TRUE(coordinator.decide(1000));
    EXPECT_LE(std::string(error_of(*coordinator.decide(1000), 0).what()).size(), sizeof bad.text);
  }
}

}  // namespace
}  // namespace fsdp::membership
