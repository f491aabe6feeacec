// SPDX-License-Identifier: Apache-2.0
// Tests files for people. They are complete or not there at all, no other user can read them, and they never replace
// something that is not a file.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "base/error.h"
#include "trace/file.h"

namespace fsdp::trace::test {
namespace {

class ReplacedFile : public testing::Test {
 protected:
  ReplacedFile() : folder(std::filesystem::temp_directory_path() / ("files-" + std::to_string(::getpid()))) {
    std::filesystem::create_directory(folder);
  }
  ~ReplacedFile() override { std::filesystem::remove_all(folder); }
  std::string path(const std::string &name = "out") const { return folder / name; }
  std::string read(const std::string &name = "out") const {
    std::ifstream file(path(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  size_t files() const {
    return static_cast<size_t>(
        std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()));
  }
  mode_t type_of(const std::string &name) const {
    struct stat status {};
    EXPECT_EQ(::lstat(path(name).c_str(), &status), 0);
    return status.st_mode & S_IFMT;
  }
  void expect_refused(const std::string &name, const std::string &word) const {
    try {
      replace_file(path(name), "text", "a call");
      ADD_FAILURE() << name << " was replaced";
    } catch (const Error &error) {
      EXPECT_EQ(error.status, FSDP_SYSTEM);
      EXPECT_EQ(error.origin, FSDP_ORIGIN_OS);
      for (const std::string &part : {std::string("a call: "), path(name), word})
        EXPECT_NE(error.message.find(part), std::string::npos) << error.message;
    }
  }

  const std::filesystem::path folder;
};

TEST_F(ReplacedFile, IsReadableByNoOtherUser) {
  const mode_t before = ::umask(0);
  std::ofstream(path()) << "old";
  ::chmod(path().c_str(), 0666);
  replace_file(path(), "new", "a call");
  replace_file(path("fresh"), "new", "a call");
  ::umask(before);
  for (const char *name : {"out", "fresh"}) {
    struct stat status {};
    ASSERT_EQ(::stat(path(name).c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07777, 0600u) << name;
    EXPECT_EQ(read(name), "new");
  }
  EXPECT_EQ(files(), 2u);
}

TEST_F(ReplacedFile, OnlyAFileIsReplaced) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_refused("pipe", "is a pipe");
  EXPECT_EQ(type_of("pipe"), static_cast<mode_t>(S_IFIFO));
  std::ofstream(path("file")) << "kept";
  for (const char *target : {"file", "/dev/null", "nowhere"}) {
    ASSERT_EQ(::symlink(target, path("link").c_str()), 0);
    expect_refused("link", "is a symbolic link");
    EXPECT_EQ(type_of("link"), static_cast<mode_t>(S_IFLNK));
    std::filesystem::remove(path("link"));
  }
  EXPECT_EQ(read("file"), "kept");
  std::filesystem::create_directory(path("folder"));
  expect_refused("folder", "Is a directory");
  EXPECT_EQ(files(), 3u);
  if (::mknod(path("device").c_str(), S_IFCHR | 0600, ::makedev(1, 3)) != 0)
    GTEST_SKIP() << "cannot make a device node";
  expect_refused("device", "is a device");
  EXPECT_EQ(type_of("device"), static_cast<mode_t>(S_IFCHR));
}

// For a file that is too large the kernel sends a signal that ends the process.
TEST_F(ReplacedFile, ASizeLimitIsAnErrorAndLeavesNothing) {
  const pid_t process = ::fork();
  if (process == 0) {
    const rlimit limit{1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      replace_file(path(), std::string(5000, 'x'), "a call");
      ::_exit(1);
    } catch (const Error &error) {
      sigset_t now, pending;
      ::pthread_sigmask(SIG_SETMASK, nullptr, &now);
      ::sigpending(&pending);
      if (error.origin_code != EFBIG || error.message.find(path()) == std::string::npos) ::_exit(2);
      ::_exit(sigismember(&now, SIGXFSZ) || sigismember(&pending, SIGXFSZ) ? 3 : 0);
    }
  }
  int status = 0;
  ::waitpid(process, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(files(), 0u);
}

// A signal that the program has blocked and not handled yet is still pending.
TEST_F(ReplacedFile, ASignalOfTheProgramsStays) {
  sigset_t one, before, pending;
  sigemptyset(&one);
  sigaddset(&one, SIGXFSZ);
  ::pthread_sigmask(SIG_BLOCK, &one, &before);
  ::raise(SIGXFSZ);
  replace_file(path(), "text", "a call");
  ::sigpending(&pending);
  EXPECT_TRUE(sigismember(&pending, SIGXFSZ));
  int taken = 0;
  ::sigwait(&one, &taken);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST_F(ReplacedFile, IsAppendedToWhereItIsAFile) {
  append_to_file(path(), "one\n", "a call");
  append_to_file(path(), "two\n", "a call");
  EXPECT_EQ(read(), "one\ntwo\n");
  struct stat status {};
  ASSERT_EQ(::stat(path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  ASSERT_EQ(::symlink("out", path("link").c_str()), 0);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"pipe", "is a pipe"}, {"link", "is a symbolic link"}, {"nowhere/out", "No such file or directory"}};
  for (const auto &[name, word] : cases) try {
      append_to_file(path(name), "three\n", "a call");
      ADD_FAILURE() << name << " was written to";
    } catch (const Error &error) {
      for (const std::string &part : {std::string("a call: "), path(name), word})
        EXPECT_NE(error.message.find(part), std::string::npos) << error.message;
    }
  EXPECT_EQ(read(), "one\ntwo\n");
}

TEST_F(ReplacedFile, OnlyAFileIsKept) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  keep_earlier_file(path("pipe"));
  EXPECT_EQ(type_of("pipe"), static_cast<mode_t>(S_IFIFO));
  std::ofstream(path()) << "old";
  keep_earlier_file(path());
  EXPECT_EQ(read("out.1"), "old");
}

}  // namespace
}  // namespace fsdp::trace::test
