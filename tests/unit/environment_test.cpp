// SPDX-License-Identifier: Apache-2.0
// Tests the meaning of the launcher's variables, the socket's name and the job's secret.
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "../own_folder.h"
#include "environment_fixture.h"
#include "membership/join/guest.h"
#include "membership/wire/secret.h"
#include "transport/names.h"

namespace fsdp::transport::test {
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

TEST(LauncherEnvironment, WrongVariablesAreNamed) {
  const fsdp::test::OwnFolder folder;
  const std::string missing = folder / "none";
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
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"FSDP_RENDEZVOUS", "name"}},
       FSDP_INVALID_ARGUMENT,
       {"LOCAL_RANK and LOCAL_WORLD_SIZE are not set", "'name' is a name"}},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"FSDP_RENDEZVOUS", "name"}},
       FSDP_INVALID_ARGUMENT,
       {"LOCAL_WORLD_SIZE is not set", "'name' is a name"}},
      {with({{"FSDP_RESTART_COUNT", "x"}}), FSDP_INVALID_ARGUMENT, {"FSDP_RESTART_COUNT='x'"}},
      {with({{"LOCAL_WORLD_SIZE", "3"}}), FSDP_INVALID_ARGUMENT, {"LOCAL_WORLD_SIZE='3'"}},
      {with({{"LOCAL_RANK", "2"}}), FSDP_INVALID_ARGUMENT, {"LOCAL_RANK='2'"}},
      {with({{"FSDP_JOB_SECRET_FILE", missing}}), FSDP_INVALID_ARGUMENT, {missing.c_str(), "No such file"}},
      {with({{"FSDP_JOB_SECRET_FILE", "/dev/null"}}), FSDP_INVALID_ARGUMENT, {"/dev/null"}},
      {with({{"FSDP_JOB_SECRET_FILE", missing}, {"FSDP_JOB_SECRET", "s"}}), FSDP_INVALID_ARGUMENT, {"both"}},
  };
  for (const auto &row : table) {
    const Environment environment(row.variables);
    const Error error = error_of([] { read_launcher_environment(); });
    EXPECT_EQ(error.status, row.status) << error.message;
    for (const char *word : row.words) EXPECT_NE(error.message.find(word), std::string::npos) << error.message;
  }
}

class SecretFile : public testing::Test {
 protected:
  SecretFile() : path(std::filesystem::temp_directory_path() / ("secret-" + std::to_string(::getpid()))) {}
  ~SecretFile() override { std::filesystem::remove(path); }
  void write(const std::string &text, mode_t mode = 0600) const {
    std::ofstream(path) << text;
    ::chmod(path.c_str(), mode);
  }
  std::string read(const std::string &name) const {
    const Environment environment(with({{"FSDP_JOB_SECRET_FILE", name}}));
    return read_job_secret();
  }
  void expect_refused(const std::string &name, std::initializer_list<const char *> words) const {
    const Error error = error_of([&] { read(name); });
    EXPECT_EQ(error.status, FSDP_INVALID_ARGUMENT) << error.message;
    EXPECT_NE(error.message.find("FSDP_JOB_SECRET_FILE='" + name), std::string::npos) << error.message;
    for (const char *word : words) EXPECT_NE(error.message.find(word), std::string::npos) << error.message;
  }

  const std::filesystem::path path;
};

TEST_F(SecretFile, ASecretFilesFirstLineIsTheSecret) {
  for (const mode_t mode : {0600, 0400, 0700}) {
    write("from a file\n", mode);
    const Environment environment(with({{"FSDP_JOB_SECRET_FILE", path}}));
    EXPECT_EQ(read_launcher_environment().secret, "from a file");
    EXPECT_EQ(read_job_secret(), "from a file");
    std::filesystem::remove(path);
  }
}

// ssh refuses such a key, too.
TEST_F(SecretFile, ThatOthersMayReadIsRefused) {
  for (const auto &[mode, text] : {std::pair<mode_t, const char *>{0644, "mode 0644"},
                                   {0604, "mode 0604"},
                                   {0620, "mode 0620"},
                                   {0650, "mode 0650"}}) {
    write("a secret", mode);
    expect_refused(path, {text, "chmod 600", "defaultMode: 0400"});
  }
  write("a secret");
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  ASSERT_EQ(::chown(path.c_str(), static_cast<uid_t>(-1), 4711), 0);
  write("a secret", 0640);
  expect_refused(path, {"group 4711 may read it (mode 0640)", "not of that group", "chmod 600"});
  write("a secret", 0600);
  ASSERT_EQ(::chown(path.c_str(), 4711, static_cast<gid_t>(-1)), 0);
  expect_refused(path, {"user 4711", "user 0"});
}

TEST_F(SecretFile, ThatIsNoFileIsRefusedAtOnce) {
  expect_refused("/dev/null", {"not a regular file"});
  expect_refused(std::filesystem::temp_directory_path(), {"not a regular file"});
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const auto before = std::chrono::steady_clock::now();
  ::alarm(5);
  expect_refused(path, {"not a regular file"});
  ::alarm(0);
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(4));
}

// Kubernetes mounts secrets in this way with fsGroup.
TEST_F(SecretFile, ThatAGroupOfThisProcessMayReadIsRead) {
  for (const mode_t mode : {0440, 0640}) {
    write("from a file", mode);
    EXPECT_EQ(read(path), "from a file");
    std::filesystem::remove(path);
  }
  if (::geteuid() != 0) GTEST_SKIP() << "only root can take another group";
  const pid_t process = ::fork();
  if (process == 0) {
    write("from a file", 0640);
    const gid_t groups[] = {4712, 4711};
    const bool set = ::chown(path.c_str(), 0, 4711) == 0 && ::setgroups(2, groups) == 0;
    ::_exit(set && read(path) == "from a file" ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(process, &status, 0), process);
  EXPECT_EQ(status, 0);
}

// In Kubernetes, token is a link to ..data/token, and ..data is a link to the folder of the current version.
class LinkedSecret : public SecretFile {
 protected:
  LinkedSecret() : folder(path.string() + ".d") {
    std::filesystem::create_directories(folder / "..2026_11_28");
    std::ofstream(folder / "..2026_11_28" / "token") << "from a link\n";
    ::chmod((folder / "..2026_11_28" / "token").c_str(), 0400);
    std::filesystem::create_symlink("..2026_11_28", folder / "..data");
    std::filesystem::create_symlink("..data/token", folder / "token");
  }
  ~LinkedSecret() override { std::filesystem::remove_all(folder); }
  const std::filesystem::path folder;
};

TEST_F(LinkedSecret, IsFollowedWithinFoldersOfItsUser) {
  EXPECT_EQ(read(folder / "token"), "from a link");
  std::filesystem::create_symlink(folder / "token", path);  // an absolute link
  EXPECT_EQ(read(path), "from a link");
  ::chmod(folder.c_str(), 01777);  // other users cannot replace it in a sticky folder
  EXPECT_EQ(read(folder / "token"), "from a link");
}

TEST_F(LinkedSecret, ThatOthersMayChangeIsRefused) {
  for (const mode_t mode : {0777, 0770, 0722}) {
    ::chmod(folder.c_str(), mode);
    expect_refused(folder / "token", {"symbolic link 'token' in a folder", "that others may change", "chmod go-w"});
  }
  ::chmod(folder.c_str(), 0700);
  ::chmod((folder / "..2026_11_28" / "token").c_str(), 0444);
  expect_refused(folder / "token", {"mode 0444", "chmod 600"});
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a link away";
  ::chmod((folder / "..2026_11_28" / "token").c_str(), 0400);
  ASSERT_EQ(::lchown((folder / "..data").c_str(), 4711, 4711), 0);
  expect_refused(folder / "token", {"symbolic link '..data' of user 4711"});
  ASSERT_EQ(::lchown((folder / "..data").c_str(), 0, 0), 0);
  EXPECT_EQ(read(folder / "token"), "from a link");
  ASSERT_EQ(::chown(folder.c_str(), 4711, 4711), 0);
  expect_refused(folder / "token", {"in a folder (user 4711, mode 0700)"});
}

TEST_F(LinkedSecret, ThatLeadsNowhereIsRefused) {
  std::filesystem::create_symlink("nothing", folder / "dangling");
  expect_refused(folder / "dangling", {"No such file or directory"});
  std::filesystem::create_symlink("circle", folder / "circle");
  expect_refused(folder / "circle", {"more than 16 symbolic links"});
  std::filesystem::create_symlink("/", folder / "root");
  expect_refused(folder / "root", {"it leads to a folder"});
  std::filesystem::create_symlink("..2026_11_28", folder / "inner");
  expect_refused(folder / "inner", {"not a regular file"});
}

// Returns whether a core dump would contain the memory, according to the kernel.
bool is_dumped(const void *data) {
  std::ifstream maps("/proc/self/smaps");
  const auto at = reinterpret_cast<uintptr_t>(data);
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t first = 0, last = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &first, &last) == 2) inside = at >= first && at < last;
    if (inside && line.starts_with("VmFlags:")) return line.find(" dd") == line.npos;
  }
  throw std::runtime_error("not mapped");
}

TEST(Secret, IsLeftOutOfCoreDumps) {
  const Secret secret("the secret");
  EXPECT_FALSE(is_dumped(std::string_view(secret).data()));
  const Secret copy = secret;
  EXPECT_EQ(std::string_view(copy).data(), std::string_view(secret).data()) << "a second place in memory";
  EXPECT_TRUE(Secret().empty() && Secret("").empty());
}

TEST(Secret, ATextIsWipedWhenItsScopeEnds) {
  std::string text(100, 's');
  {
    const WipedText wiped(text);
    EXPECT_EQ(text, std::string(100, 's'));
  }
  EXPECT_EQ(text, std::string(100, '\0'));
}

TEST_F(SecretFile, ThatIsEmptyOrTooLongIsRefused) {
  for (const std::string &text :
       {std::string(), std::string("\n"), std::string(4097, 'x'), std::string(5'000'000, 'x')}) {
    write(text);
    expect_refused(path, {"1 to 4096 bytes"});
  }
  write(std::string(4096, 'x') + "\n");
  EXPECT_EQ(read(path).size(), 4096u);
}

TEST(SocketName, DependsOnAllAndShowsNothing) {
  const std::string name = socket_name("host:1", "secret", 1000);
  EXPECT_NE(name, socket_name("host:2", "secret", 1000));
  EXPECT_NE(name, socket_name("host:1", "Secret", 1000));
  EXPECT_NE(name, socket_name("host:1", "secret", 1001));
  EXPECT_EQ(name, socket_name("host:1", "secret", 1000));
  EXPECT_EQ(name.size(), 5U + 32U);
}

// These are the key and text of RFC 4231's test case 2, behind the label and its end. Python's hmac and hashlib gave
// the answer.
TEST(Authentication, DigestsAreThoseOfRfc4231) {
  const std::string text = "what do ya want for nothing?";
  const auto *bytes = reinterpret_cast<const uint8_t *>(text.data());
  const Digest known = {0xe8, 0x64, 0xb6, 0x7e, 0x2d, 0xed, 0x97, 0xfe, 0xc1, 0x41, 0xf0, 0xb8, 0xfb, 0xd6, 0x5f, 0x9f,
                        0x9b, 0xea, 0x3a, 0xa0, 0xb6, 0xac, 0xa3, 0x6d, 0xb1, 0x1a, 0xce, 0x8a, 0xfe, 0xcc, 0xa9, 0x8c};
  const Digest a = authenticate("Jefe", "label", {{bytes, text.size()}});
  EXPECT_EQ(a, known);
  EXPECT_TRUE(equal(a, known));
  EXPECT_EQ(authenticate("Jefe", "label", {{bytes, 5}, {bytes + 5, 0}, {bytes + 5, text.size() - 5}}), known);
  for (const size_t byte : {0, 15, 31}) {
    Digest other = known;
    other[byte] ^= 0x80;
    EXPECT_FALSE(equal(a, other)) << byte;
  }
  EXPECT_FALSE(equal(a, authenticate("Jefe", "labe", {{bytes, text.size()}})));
  EXPECT_FALSE(equal(a, authenticate("jefe", "label", {{bytes, text.size()}})));
  EXPECT_FALSE(equal(a, authenticate("", "label", {{bytes, text.size()}})));
}

}  // namespace
}  // namespace fsdp::transport::test
