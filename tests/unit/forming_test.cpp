// SPDX-License-Identifier: Apache-2.0
// Ranks end while a job over several hosts forms. Soon afterwards all other ranks are told which rank ended, whatever
// their timeouts are.
#include <sys/resource.h>

#include "rendezvous_fixture.h"

namespace fsdp::transport::test {
namespace {

class Forming : public Rendezvous {
 protected:
  void SetUp() override {
    Rendezvous::SetUp();
    options.size = 4;
    options.timeout_ms = 30'000;
    hold = 20s;
  }
  void TearDown() override {
    for (const pid_t process : processes) ::kill(process, SIGKILL);
    Rendezvous::TearDown();
  }
  // Ranks 0 and 1 are processes. Ranks 2 and 3 are hand-made, and belong to distant hosts.
  void start_two() {
    zero = start(0U);
    one = start(1);
  }
  void join_by_hand() {
    two = enter();
    three = enter();
    join(two, 2);
    join(three, 3);
  }
  void await_meeting() {
    for (const size_t index : {zero, one})
      while (!reports[index].met) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(hear<message::Start>(two));
    EXPECT_TRUE(hear<message::Start>(three));
  }
  // Rank 0 sees all of this at once, however long this thread is held up in between.
  template <class Events>
  void at_the_same_time(Events &&events) {
    ::kill(processes[zero], SIGSTOP);
    int status = 0;
    ASSERT_EQ(::waitpid(processes[zero], &status, WUNTRACED), processes[zero]);
    ASSERT_TRUE(WIFSTOPPED(status));
    events();
    ::kill(processes[zero], SIGCONT);
  }
  void expect_told(std::initializer_list<size_t> survivors, int32_t rank, const std::string &text, int64_t since_ns) {
    finish();
    for (const size_t index : survivors) {
      expect(index, FSDP_PEER_FAILED, text);
      EXPECT_EQ(reports[index].rank, rank);
      const double late = static_cast<double>(reports[index].ended_ns - since_ns) * 1e-9;
      EXPECT_LT(late, patience_seconds) << reports[index].text;
    }
  }

  size_t zero = 0, one = 0;
  FrameStream two, three;
};

TEST_F(Forming, ARankThatDiesBeforeItsCardIsNamed) {
  start_two();
  two = enter();
  introduce(two, 2);
  await_join(one);
  const int64_t died_ns = now_ns();
  two = FrameStream();
  expect_told({zero, one}, 2, "rank 2 on far died before the job had formed", died_ns);
}

TEST_F(Forming, ARankThatDiesAfterTheRosterIsNamed) {
  start_two();
  join_by_hand();
  await_meeting();
  const int64_t died_ns = now_ns();
  two = FrameStream();
  const auto told = hear<Verdict>(three);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->accusation.rank, 2);
  EXPECT_EQ(membership::error_of(told->accusation, 3).status, FSDP_PEER_FAILED);
  expect_told({zero, one}, 2, "rank 2 on far died before the job had formed", died_ns);
}

TEST_F(Forming, DeathsAtTheSameTimeAreOneFailure) {
  start_two();
  join_by_hand();
  await_meeting();
  const int64_t died_ns = now_ns();
  at_the_same_time([&] {
    two = FrameStream();
    three = FrameStream();
  });
  expect_told({zero, one}, 2, "ranks 2, 3 died before the job had formed", died_ns);
}

TEST_F(Forming, TheDeathOfRankZeroIsSeenByAll) {
  start_two();
  join_by_hand();
  await_meeting();
  const int64_t died_ns = now_ns();
  ::kill(processes[zero], SIGKILL);
  expect_told({one}, 0, "died before the job had formed", died_ns);
}

TEST_F(Forming, ARankThatGivesUpSaysWhy) {
  start_two();
  join_by_hand();
  await_meeting();
  const int64_t ended_ns = now_ns();
  two.queue(message::share(Report{accusation_of(Error(FSDP_INTERRUPTED, "enough"), 2), 2}));
  EXPECT_TRUE(two.flush());
  expect_told({zero, one}, 2, "gave up before the job had formed: enough", ended_ns);
}

// A leader that sees another leader's connection end may not know that this leader ended because of a third one.
TEST_F(Forming, TheDeadAreBlamedBeforeRanksThatEndedBecauseOfThem) {
  start_two();
  join_by_hand();
  await_meeting();
  const int64_t died_ns = now_ns();
  at_the_same_time([&] {
    two.queue(message::share(Report{accuse_rank(FailureKind::failed, 1, "rank 1 did not connect")}));
    EXPECT_TRUE(two.flush());
    three = FrameStream();
  });
  expect_told({zero, one}, 3, "rank 3 on far died", died_ns);
}

// A rank that has said that it has formed may end. The other ranks are still watched.
TEST_F(Forming, ARankThatHasFormedIsNotMissed) {
  hold = 1s;
  start_two();
  join_by_hand();
  await_meeting();
  for (FrameStream *stream : {&two, &three}) {
    stream->queue(message::share(message::Formed{}));
    EXPECT_TRUE(stream->flush());
    *stream = FrameStream();
  }
  finish();
  for (const size_t index : {zero, one}) expect(index, FSDP_OK);
}

// No rank ends, and the job does not form either. The limits of single steps are not added up.
TEST_F(Forming, TheTimeoutHoldsForTheWhole) {
  options.timeout_ms = 5000;
  const int64_t start_ns = now_ns();
  start_two();
  join_by_hand();
  await_meeting();
  finish();
  for (const size_t index : {zero, one}) {
    expect(index, FSDP_TIMEOUT, "all ranks came to the rendezvous, but not all have met since");
    EXPECT_LT(static_cast<double>(reports[index].ended_ns - start_ns) * 1e-9, 5 + patience_seconds);
  }
}

// A process between the ranks has added bytes to rank 2's messages. Rank 2 has not died, and is no more to blame than
// rank 0.
TEST_F(Forming, AFrameThatIsForgedBlamesNoRank) {
  start_two();
  join_by_hand();
  await_meeting();
  const auto forged = message::write(Report{accuse_rank(FailureKind::aborted, 3, "a lie"), 2});
  const int64_t since_ns = now_ns();
  for (int i = 0; i < 2; ++i) ::send(two.socket().get(), forged.data(), forged.size(), MSG_NOSIGNAL);
  for (FrameStream *stream : {&two, &three}) {
    const auto told = hear<Verdict>(*stream);
    ASSERT_TRUE(told);
    EXPECT_EQ(told->accusation.rank, -1);
  }
  expect_told({zero, one}, -1, "cannot hear rank 2 (host far) before the job has formed: what came was not said by",
              since_ns);
}

TEST_F(Forming, ARankInTheHandshakeIsToldWhyTheJobFails) {
  options.farewell_ms = 10'000;  // rank 0 ends as soon as all are told
  start_two();
  two = enter();
  join(two, 2);
  Fd socket = connect();
  await_readable(socket, 5000);  // rank 0's challenge
  await_join(one);
  two = FrameStream();
  await_end(one);  // rank 0 has told it
  three = prove_to(std::move(socket), Role::guest);
  introduce(three, 3);
  const auto told = hear<Verdict>(three);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->accusation.rank, 2);
  EXPECT_EQ(told->accusation.text.copy(), "rank 2 on far died before the job had formed");
  finish();
}

TEST_F(Forming, AnotherLibraryIsRefusedByBothVersions) {
  start_two();
  two = enter();
  two.queue(message::share(message::Hello{wire_version + 1, 2, "9.8.7"}));
  EXPECT_TRUE(two.flush());
  const auto word = hear<message::Refused>(two);
  ASSERT_TRUE(word);
  EXPECT_EQ(word->status, FSDP_MISMATCH);
  EXPECT_NE(
      word->text.find(fmt::format("rank 2 has libfsdp 9.8.7 (wire format {}), rank 0 has libfsdp {} (wire format {})",
                                  wire_version + 1, library_version, wire_version)),
      std::string::npos)
      << word->text;
  EXPECT_EQ(std::string(reports[0].logged), fmt::format("refused a connection to the rendezvous from {}: {}",
                                                        Endpoint::local(two.socket()).text(), word->text));
}

double cpu_seconds(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string words;
  std::getline(file, words);
  std::istringstream rest(words.substr(words.rfind(')') + 2));
  std::string skipped;
  for (int i = 0; i < 11; ++i) rest >> skipped;
  double user = 0, system = 0;
  rest >> user >> system;
  return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

// Rank 0's listener stays readable. Rank 0 must not spin over that, and accepts the connections when it can.
TEST_F(Forming, WithoutDescriptorsRankZeroWaits) {
#ifdef __SANITIZE_ADDRESS__  // UndefinedBehaviorSanitizer checks objects through a pipe
  GTEST_SKIP() << "a sanitizer needs descriptors";
#endif
  options.size = 2;
  hold = 0s;
  zero = start(0U);
  connect();
  rlimit normal{}, none{};
  ASSERT_EQ(::prlimit(processes[zero], RLIMIT_NOFILE, nullptr, &normal), 0);
  none = normal;
  none.rlim_cur = 3;
  ASSERT_EQ(::prlimit(processes[zero], RLIMIT_NOFILE, &none, nullptr), 0);
  one = start(1);
  std::this_thread::sleep_for(200ms);
  const double before = cpu_seconds(processes[zero]);
  std::this_thread::sleep_for(1500ms);
  EXPECT_LT(cpu_seconds(processes[zero]) - before, 0.3);
  ASSERT_EQ(::prlimit(processes[zero], RLIMIT_NOFILE, &normal, nullptr), 0);
  finish();
  for (const size_t index : {zero, one}) expect(index, FSDP_OK);
}

TEST_F(Forming, ATimeoutSaysThatDescriptorsWereMissing) {
#ifdef __SANITIZE_ADDRESS__  // UndefinedBehaviorSanitizer checks objects through a pipe
  GTEST_SKIP() << "a sanitizer needs descriptors";
#endif
  options.size = 2;
  options.timeout_ms = 2000;
  zero = start(0U);
  connect();
  rlimit none{3, 4096};
  ASSERT_EQ(::prlimit(processes[zero], RLIMIT_NOFILE, &none, nullptr), 0);
  one = start(1);
  finish();
  expect(zero, FSDP_TIMEOUT, "too many open files: this process may have 3 (see ulimit -n)");
}

}  // namespace
}  // namespace fsdp::transport::test
