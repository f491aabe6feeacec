// SPDX-License-Identifier: Apache-2.0
// What the launcher's variables say, and what the socket's name and the job's secret are made of.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "comm/bootstrap/address.h"
#include "comm/bootstrap/secret.h"
#include "environment_fixture.h"

namespace fsdp::comm::test {
namespace {

Variables with(const Variables &change) {
  return changed({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}}, change);
}

TEST(LauncherEnvironment, WorldOfOneAndFullSet) {
  {
    const Environment none({});
    const WorldOptions options = read_launcher_environment();
    EXPECT_EQ(options.size, 1U);
    EXPECT_EQ(options.rank, 0U);
  }
  const Environment full(with({{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}, {"FSDP_JOB_SECRET", "s"}}));
  const WorldOptions options = read_launcher_environment();
  EXPECT_EQ(options.size, 2U);
  EXPECT_EQ(options.rank, 1U);
  EXPECT_EQ(options.rendezvous, "127.0.0.1:29500");
  EXPECT_EQ(options.secret, "s");
}

TEST(LauncherEnvironment, WhatIsWrongIsNamed) {
  const struct {
    Variables variables;
    fsdp_status status;
    std::vector<const char *> words;
  } table[] = {
      {with({{"RANK", "-"}}), FSDP_INVALID_ARGUMENT, {"but RANK is not"}},
      {with({{"WORLD_SIZE", "-"}, {"MASTER_PORT", "-"}}),
       FSDP_INVALID_ARGUMENT,
       {"but WORLD_SIZE, MASTER_PORT are not"}},
      {{{"MASTER_ADDR", "x"}}, FSDP_INVALID_ARGUMENT, {"MASTER_ADDR is set", "RANK, WORLD_SIZE, MASTER_PORT are not"}},
      {with({{"RANK", ""}}), FSDP_INVALID_ARGUMENT, {"but RANK is not"}},
      {with({{"RANK", "two"}}), FSDP_INVALID_ARGUMENT, {"RANK='two'"}},
      {with({{"RANK", "-1"}}), FSDP_INVALID_ARGUMENT, {"RANK='-1'"}},
      {with({{"RANK", " 1"}}), FSDP_INVALID_ARGUMENT, {"RANK=' 1'"}},
      {with({{"RANK", "1x"}}), FSDP_INVALID_ARGUMENT, {"RANK='1x'"}},
      {with({{"RANK", "99999999999999999999"}}), FSDP_INVALID_ARGUMENT, {"RANK='99999999999999999999'"}},
      {with({{"RANK", "2"}}), FSDP_INVALID_ARGUMENT, {"RANK=2", "WORLD_SIZE=2"}},
      {with({{"WORLD_SIZE", "0"}}), FSDP_INVALID_ARGUMENT, {"WORLD_SIZE='0'"}},
      {with({{"MASTER_PORT", "0"}}), FSDP_INVALID_ARGUMENT, {"MASTER_PORT='0'"}},
      {with({{"MASTER_PORT", "65536"}}), FSDP_INVALID_ARGUMENT, {"MASTER_PORT='65536'"}},
      {{{"FSDP_RENDEZVOUS", "tcp://h:1"}}, FSDP_INVALID_ARGUMENT, {"FSDP_RENDEZVOUS is set, but RANK and WORLD_SIZE"}},
      {with({{"FSDP_RENDEZVOUS", "tcp://h"}}), FSDP_INVALID_ARGUMENT, {"'h' has no port"}},
      {with({{"FSDP_RENDEZVOUS", "name"}, {"LOCAL_WORLD_SIZE", "1"}}), FSDP_INVALID_ARGUMENT, {"'name' is a name"}},
      {with({{"FSDP_RESTART_COUNT", "x"}}), FSDP_INVALID_ARGUMENT, {"FSDP_RESTART_COUNT='x'"}},
      {with({{"LOCAL_WORLD_SIZE", "3"}}), FSDP_INVALID_ARGUMENT, {"LOCAL_WORLD_SIZE='3'"}},
      {with({{"LOCAL_RANK", "2"}}), FSDP_INVALID_ARGUMENT, {"LOCAL_RANK='2'"}},
      {with({{"FSDP_JOB_SECRET_FILE", "/nonexistent"}}), FSDP_INVALID_ARGUMENT, {"/nonexistent", "No such file"}},
      {with({{"FSDP_JOB_SECRET_FILE", "/dev/null"}}), FSDP_INVALID_ARGUMENT, {"/dev/null"}},
      {with({{"FSDP_JOB_SECRET_FILE", "/x"}, {"FSDP_JOB_SECRET", "s"}}), FSDP_INVALID_ARGUMENT, {"both"}},
  };
  for (const auto &row : table) {
    const Environment environment(row.variables);
    const Error error = error_of([] { read_launcher_environment(); });
    EXPECT_EQ(error.status, row.status) << error.message;
    for (const char *word : row.words) EXPECT_NE(error.message.find(word), std::string::npos) << error.message;
  }
}

TEST(LauncherEnvironment, SecretFile) {
  const auto path = std::filesystem::temp_directory_path() / ("secret-" + std::to_string(::getpid()));
  std::ofstream(path) << "from a file\n";
  {
    const Environment environment(with({{"FSDP_JOB_SECRET_FILE", path}}));
    EXPECT_EQ(read_launcher_environment().secret, "from a file");
    EXPECT_EQ(read_job_secret(), "from a file");
  }
  std::filesystem::remove(path);
}

TEST(SocketName, DependsOnAllAndShowsNothing) {
  const std::string name = socket_name("host:1", "secret", 1000);
  EXPECT_NE(name, socket_name("host:2", "secret", 1000));
  EXPECT_NE(name, socket_name("host:1", "Secret", 1000));
  EXPECT_NE(name, socket_name("host:1", "secret", 1001));
  EXPECT_EQ(name, socket_name("host:1", "secret", 1000));
  EXPECT_EQ(name.size(), 5U + 32U);
}

TEST(Authentication, KnownAnswer) {  // RFC 4231, test case 2, behind the label's own end
  const std::string text = "what do ya want for nothing?";
  const auto *bytes = reinterpret_cast<const uint8_t *>(text.data());
  const Digest a = authenticate("Jefe", "label", {{bytes, text.size()}});
  EXPECT_TRUE(equal(a, authenticate("Jefe", "label", {{bytes, text.size()}})));
  EXPECT_FALSE(equal(a, authenticate("Jefe", "labe", {{bytes, text.size()}})));
  EXPECT_FALSE(equal(a, authenticate("jefe", "label", {{bytes, text.size()}})));
  EXPECT_FALSE(equal(a, authenticate("", "label", {{bytes, text.size()}})));
}

}  // namespace
}  // namespace fsdp::comm::test
