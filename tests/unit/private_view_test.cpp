// SPDX-License-Identifier: Apache-2.0
// Tests views of a memory file that copy a page when it is written: their contents, the result of a restore, and how a
// restore knows which pages were written.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <vector>

#include "../own_folder.h"
#include "base/error.h"
#include "transport/shm/arena.h"

namespace fsdp::transport::test {
namespace {

constexpr auto what = "weights";

// Makes a file of this many pages, which is written through a view of its own, and a private view of it.
struct Pages {
  explicit Pages(uint64_t count, const char *pagemap = "/proc/self/pagemap", int seals = 0)
      : bytes(count * page_size()) {
    file = create_memory_file(bytes, what);
    owner = Mapping(file, bytes, Access::read_write, what);
    std::memset(owner.data(), 1, bytes);
    EXPECT_EQ(::fcntl(file.get(), F_ADD_SEALS, seals), 0);
    view.emplace(file, bytes, what, pagemap);
  }
  std::byte *owned(uint64_t page, uint64_t at = 7) const { return owner.data() + page * page_size() + at; }
  std::byte *shown(uint64_t page, uint64_t at = 7) const { return view->data() + page * page_size() + at; }
  void restore(uint64_t page, uint64_t count) const { view->restore(page * page_size(), count * page_size(), what); }
  // Returns the kernel's report about a page of the view.
  uint64_t entry(uint64_t page) const {
    const Fd map(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    const uint64_t at = reinterpret_cast<uintptr_t>(shown(page)) / page_size() * 8;
    uint64_t entry = 0;
    EXPECT_EQ(::pread(map.get(), &entry, sizeof entry, static_cast<off_t>(at)), 8);
    return entry;
  }
  bool is_there(uint64_t page) const { return entry(page) >> 63; }
  bool is_copied(uint64_t page) const { return entry(page) >> 62 && !(entry(page) >> 61 & 1); }

  uint64_t bytes;
  Fd file;
  Mapping owner;
  std::optional<PrivateView> view;
};

void expect_pages(const Pages &pages, const char *name) {
  SCOPED_TRACE(name);
  *pages.shown(2) = std::byte{77};
  EXPECT_EQ(*pages.owned(2), std::byte{1});
  for (const uint64_t page : {1, 2, 3}) *pages.owned(page) = std::byte{5};
  *pages.owned(2, 9) = std::byte{6};
  EXPECT_EQ(*pages.shown(1), std::byte{5});
  EXPECT_EQ(*pages.shown(2), std::byte{77});
  EXPECT_EQ(*pages.shown(2, 9), std::byte{1});  // stale
  EXPECT_EQ(*pages.shown(3), std::byte{5});
  pages.restore(3, 1);
  pages.restore(0, 2);
  EXPECT_EQ(*pages.shown(2), std::byte{77});
  pages.restore(0, 4);
  EXPECT_EQ(*pages.shown(2), std::byte{5});
  EXPECT_EQ(*pages.shown(2, 9), std::byte{6});
  *pages.owned(2) = std::byte{8};
  EXPECT_EQ(*pages.shown(2), std::byte{8});
}

TEST(PrivateView, ShowsWhatWasWrittenUntilItIsRestored) { expect_pages(Pages(4), "sealed against other sizes"); }

// /proc/self/smaps shows that the view reserves no memory (nr), that a forked child does not have it (dc), and that a
// core dump contains it.
TEST(PrivateView, IsMappedAsTheOtherViewsAre) {
  const Pages pages(4);
  std::ifstream maps("/proc/self/smaps");
  const std::string begin = fmt::format("{:x}-", reinterpret_cast<uintptr_t>(pages.view->data()));
  std::string line;
  while (std::getline(maps, line) && !line.starts_with(begin)) continue;
  EXPECT_NE(line.find(" rw-p "), std::string::npos) << line;
  while (std::getline(maps, line) && !line.starts_with("VmFlags:")) continue;
  line += ' ';
  for (const char *flag : {" nr ", " dc "}) EXPECT_NE(line.find(flag), std::string::npos) << flag << " in " << line;
  for (const char *flag : {" lo ", " dd "}) EXPECT_EQ(line.find(flag), std::string::npos) << flag << " in " << line;
}

TEST(PrivateView, IsOneAlsoWhereTheFileIsSealedAgainstFurtherWriters) {
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
  expect_pages(Pages(4, "/proc/self/pagemap", F_SEAL_FUTURE_WRITE), "sealed against further writers");
}

// Writes entries that describe every page around this address as present and as belonging to a file.
void say_all_are_a_files(const std::string &path, const void *address) {
  constexpr uint64_t around = 20'000;
  const std::vector<uint64_t> entries(2 * around, ~uint64_t{0});
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>((reinterpret_cast<uintptr_t>(address) / page_size() - around) * 8));
  file.write(reinterpret_cast<const char *>(entries.data()), static_cast<std::streamsize>(entries.size() * 8));
  EXPECT_TRUE(file.good());
}

// If the kernel reports nothing useful, all pages are given back: there is no pagemap, or it is empty, or contains
// nothing, or says the same about all pages.
TEST(PrivateView, IsRestoredWhereTheKernelDoesNotSayWhatWasWritten) {
  const fsdp::test::OwnFolder folder;
  const std::string empty = folder / "empty", nothing = folder / "nothing", alike = folder / "alike";
  for (const std::string &file : {empty, nothing, alike}) std::ofstream(file).close();
  for (const std::string &file : {nothing, alike}) std::filesystem::resize_file(file, uint64_t{1} << 39);
  say_all_are_a_files(alike, Pages(4).view->data());
  say_all_are_a_files(alike, &folder);
  for (const std::string &pagemap : {folder / "none", empty, nothing, alike}) {
    const Pages pages(4, pagemap.c_str());
    EXPECT_FALSE(pages.view->finds_copies());
    expect_pages(pages, pagemap.c_str());
  }
  EXPECT_TRUE(Pages(4).view->finds_copies());
}

// Runs begin at, cross and end at the border of a single read of pagemap, which is 1024 pages.
TEST(PrivateView, FindsEveryRunOfPages) {
  const Pages pages(3000);
  const std::pair<uint64_t, uint64_t> runs[] = {{0, 1},    {0, 3000}, {1, 2},     {1022, 1},
                                                {1023, 1}, {1024, 1}, {1023, 2},  {1000, 1100},
                                                {2047, 2}, {2999, 1}, {2990, 10}, {1024, 1024}};
  for (const auto &[first, count] : runs) {
    for (uint64_t page = first; page < first + count; ++page) *pages.shown(page) = std::byte{77};
    for (uint64_t page = 0; page < 3000; ++page)
      ASSERT_EQ(pages.is_copied(page), page >= first && page < first + count) << page;
    pages.restore(0, 3000);
    for (uint64_t page = 0; page < 3000; ++page) {
      ASSERT_EQ(*pages.shown(page), std::byte{1}) << page << " of " << first << " and " << count << " more";
      ASSERT_FALSE(pages.is_copied(page)) << page;
    }
  }
  for (uint64_t page = 0; page < 3000; page += 2) *pages.shown(page) = std::byte{77};
  pages.restore(1, 2998);
  for (uint64_t page = 0; page < 3000; ++page)
    ASSERT_EQ(*pages.shown(page), page == 0 ? std::byte{77} : std::byte{1}) << page;
}

// A page that was not written keeps its place in the view.
TEST(PrivateView, GivesBackWhatWasWrittenAlone) {
  const Pages pages(64);
  for (const uint64_t page : {20, 21, 40}) *pages.shown(page) = std::byte{77};
  pages.restore(0, 64);
  for (uint64_t page = 0; page < 64; ++page)
    EXPECT_EQ(pages.is_there(page), page != 20 && page != 21 && page != 40) << page;
}

// If a program locks memory, the kernel copies all pages that may be written at once.
TEST(PrivateView, IsRestoredWhereItsPagesAreLocked) {
  const Pages pages(4);
  if (::mlock(pages.view->data(), pages.bytes) != 0) GTEST_SKIP() << "mlock: " << std::strerror(errno);
  if (!pages.is_copied(2)) GTEST_SKIP() << "mlock does nothing in this program, as under a sanitizer";
  pages.restore(0, 4);
  expect_pages(pages, "locked");
}

TEST(PrivateView, IsNotLockedWhereTheProcessLocksAllThatItMaps) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::mlockall(MCL_FUTURE) != 0) ::_exit(2);
    const Pages pages(4);
    for (uint64_t page = 0; page < 4; ++page)
      if (pages.is_copied(page)) ::_exit(1);
    *pages.owned(2) = std::byte{5};
    ::_exit(*pages.shown(2) == std::byte{5} ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 2) GTEST_SKIP() << "mlockall is not allowed here";
  EXPECT_EQ(status, 0);
}

// The kernel writes copies to its swap space, if there is one.
TEST(PrivateView, IsRestoredWhereCopiesWereSwappedOut) {
#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
  const Pages pages(4);
  *pages.shown(2) = std::byte{77};
  if (::madvise(pages.shown(2, 0), page_size(), MADV_PAGEOUT) != 0) GTEST_SKIP() << "no MADV_PAGEOUT";
  unsigned char resident = 0;
  ASSERT_EQ(::mincore(pages.shown(2, 0), page_size(), &resident), 0);
  if (resident & 1) GTEST_SKIP() << "there is no swap space";
  EXPECT_TRUE(pages.is_copied(2));
  pages.restore(0, 4);
  EXPECT_EQ(*pages.shown(2), std::byte{1});
}

// The file has huge pages, if the machine has them for shared memory.
TEST(PrivateView, IsOneOverHugePagesToo) {
  constexpr uint64_t huge = uint64_t{2} << 20;
  const uint64_t bytes = 3 * huge;
  Fd file(::memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
  Mapping owner(file, bytes, Access::read_write, what);
  if (::madvise(owner.data(), bytes, MADV_HUGEPAGE) != 0) GTEST_SKIP() << "MADV_HUGEPAGE: " << std::strerror(errno);
  std::memset(owner.data(), 1, bytes);
  std::ifstream maps("/proc/self/smaps");
  bool is_huge = false, inside = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') < line.find(' ')) inside = line.find("memfd:huge") != std::string::npos;
    if (inside && line.starts_with("ShmemPmdMapped:") && line.find(" 0 kB") == std::string::npos) is_huge = true;
  }
  if (!is_huge)
    GTEST_SKIP() << "shared memory has no huge pages here (/sys/kernel/mm/transparent_hugepage/shmem_enabled)";
  const PrivateView view(file, bytes, what);
  EXPECT_TRUE(view.finds_copies());
  view.data()[huge + 5] = std::byte{77};
  std::memset(owner.data(), 2, bytes);
  EXPECT_EQ(view.data()[huge + 5], std::byte{77});
  EXPECT_EQ(view.data()[2 * huge + 5], std::byte{2});
  view.restore(0, bytes, what);
  for (uint64_t i = 0; i < bytes; i += 4096) ASSERT_EQ(view.data()[i], std::byte{2});
}

std::optional<Error> failure_of(const std::function<void()> &body) {
  try {
    body();
  } catch (const Error &error) {
    return error;
  }
  return {};
}

void expect_failure(const std::optional<Error> &error, int code, const std::string &words) {
  ASSERT_TRUE(error);
  EXPECT_EQ(error->status, FSDP_SYSTEM);
  EXPECT_EQ(error->origin, FSDP_ORIGIN_OS);
  EXPECT_EQ(error->origin_code, code);
  EXPECT_EQ(error->message, words + ": " + std::strerror(code));
}

TEST(PrivateView, SaysThatPagesCouldNotBeGivenBack) {
  const fsdp::test::OwnFolder folder;
  const Pages pages(4, (folder / "none").c_str());
  ASSERT_EQ(::munmap(pages.shown(0, 0), pages.bytes), 0);
  expect_failure(failure_of([&] { pages.restore(0, 4); }), ENOMEM,
                 "weights: giving back 16384 bytes of a view that were written (madvise)");
}

TEST(PrivateView, SaysThatTheKernelDidNotTellWhatWasWritten) {
  const Pages pages(4);
  int pagemap = -1;
  for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd"))
    if (std::error_code none; std::filesystem::read_symlink(entry.path(), none).string().ends_with("/pagemap"))
      pagemap = std::stoi(entry.path().filename());
  for (const auto &[path, code] : {std::pair("/dev/null", EIO), std::pair("/proc/self", EISDIR)}) {
    const Fd other(::open(path, O_RDONLY | O_CLOEXEC));  // another mapping in its place
    ASSERT_EQ(::dup3(other.get(), pagemap, O_CLOEXEC), pagemap);
    expect_failure(failure_of([&] { pages.restore(1, 3); }), code,
                   "weights: reading from /proc/self/pagemap which of 3 pages of a view were written");
  }
}

}  // namespace
}  // namespace fsdp::transport::test
