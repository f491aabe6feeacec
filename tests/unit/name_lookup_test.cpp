// SPDX-License-Identifier: Apache-2.0
// A name service does not answer. No call waits for it beyond the call's own limit.
#include "membership/launch/meeting_point.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "library_threads.h"
#include "shm_ranks.h"
#include "transport/names.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

std::atomic<bool> answers{true};
std::atomic<int> asked{0};

std::vector<Endpoint> slow_resolver(const std::string &, uint16_t port, std::string &problem, bool *) {
  ++asked;
  while (!answers) std::this_thread::sleep_for(1ms);
  return Endpoint::numeric("192.0.2.7", port, problem);
}

class Lookup : public testing::Test {
 protected:
  void SetUp() override { asked = 0; }
  void TearDown() override {
    answers = true;
    EXPECT_EQ(fsdp::test::await_library_threads(0), 0U) << "the thread of an abandoned question has not ended";
  }
  Limit limit(std::chrono::milliseconds time) const { return {std::chrono::steady_clock::now() + time, waiter}; }

  Failure failure;
  Waiter waiter{failure, nullptr, nullptr, 10'000};
  std::string problem;
};

TEST_F(Lookup, FindsANameAndNeedsNoServiceForANumber) {
  NameLookup names(slow_resolver);
  EXPECT_EQ(names.find("some-host", 80, limit(5s), problem).at(0).text(), "192.0.2.7:80");
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(names.find("192.0.2.9", 81, limit(5s), problem).at(0).text(), "192.0.2.9:81");
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(names.find("some-host", 80, limit(5s), problem).size(), 1U);  // the service is asked again each time
  EXPECT_EQ(asked, 2);
}

TEST_F(Lookup, ASilentNameServiceEndsAtTheLimit) {
  answers = false;
  NameLookup names(slow_resolver);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(names.find("some-host", 80, limit(200ms), problem).empty());
  EXPECT_LT(seconds_since(start), 3.0);
  EXPECT_EQ(problem, "the name service has not answered what the address of 'some-host' is");
  // The same question is still in progress.
  std::thread later([] {
    std::this_thread::sleep_for(100ms);
    answers = true;
  });
  EXPECT_EQ(names.find("some-host", 80, limit(5s), problem).size(), 1U);
  EXPECT_EQ(asked, 1);
  later.join();
}

std::vector<Endpoint> refusing_resolver(const std::string &host, uint16_t, std::string &problem, bool *temporary) {
  ++asked;
  problem = "no address of " + host;
  *temporary = host == "later";
  return {};
}

TEST_F(Lookup, TellsANameThatIsNotKnownFromAServiceThatCannotAnswer) {
  NameLookup names(refusing_resolver);
  EXPECT_TRUE(names.find("later", 80, limit(5s), problem).empty());
  EXPECT_EQ(problem, "no address of later");
  EXPECT_FALSE(names.is_unknown());
  EXPECT_TRUE(names.find("never", 80, limit(5s), problem).empty());
  EXPECT_TRUE(names.is_unknown());
  EXPECT_EQ(names.find("192.0.2.9", 81, limit(5s), problem).size(), 1u);
  EXPECT_FALSE(names.is_unknown());
}

MeetingPoint point_at(const std::string &host) { return {MeetingPoint::Scheme::tcp, "tcp://" + host, host, 80, {}}; }

TEST_F(Lookup, ANameThatIsNotKnownEndsTheSearchAtOnce) {
  NameLookup names(refusing_resolver);
  WorldOptions options;
  options.rendezvous = "tcp://never:80";
  const Error error = error_of([&] { (void)find_host(point_at("never"), options, names, limit(60s), problem); });
  EXPECT_EQ(error.status, FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(error.message, "rendezvous 'tcp://never:80': the host 'never' has no address: no address of never");
  EXPECT_EQ(asked, 1);
}

// A service that cannot answer yet is asked again, and the log says so once.
TEST_F(Lookup, AServiceThatCannotAnswerIsAskedAgain) {
  NameLookup names(+[](const std::string &host, uint16_t port, std::string &why, bool *temporary) {
    if (asked == 2) return Endpoint::numeric("192.0.2.7", port, why);
    return refusing_resolver(host, port, why, temporary);
  });
  WorldOptions options;
  std::vector<std::string> lines;
  options.log = [&](fsdp_log_level, const std::string &line) { lines.push_back(line); };
  EXPECT_EQ(find_host(point_at("later"), options, names, limit(60s), problem).at(0).text(), "192.0.2.7:80");
  EXPECT_EQ(asked, 2);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("no address of later; it is asked again"), std::string::npos) << lines[0];
}

TEST_F(Lookup, AnInterruptedHookEndsIt) {
  answers = false;
  const Waiter interrupted(
      failure, [](void *) -> int32_t { return 1; }, nullptr, 10'000);
  NameLookup names(slow_resolver);
  const Error error = error_of([&] {
    (void)names.find("some-host", 80, {std::chrono::steady_clock::now() + 10s, interrupted}, problem);
  });
  EXPECT_EQ(error.status, FSDP_INTERRUPTED);
}

}  // namespace
}  // namespace fsdp::transport::test
