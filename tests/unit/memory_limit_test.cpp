// SPDX-License-Identifier: Apache-2.0
// Tests which memory cgroups leave, read from trees of files as kernels show them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "device/memory_limit.h"
#include "engine/runtime/storage.h"
#include "memory/place_planes.h"

namespace fsdp::device::test {
namespace {

constexpr auto mounts_unified =
    "24 30 0:22 / /proc rw,nosuid shared:13 - proc proc rw\n"
    "35 24 0:30 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr auto mounts_old =
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:7 master:1 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

class MemoryLimits : public testing::Test {
 protected:
  MemoryLimits() : root(std::filesystem::temp_directory_path() / ("limits-" + std::to_string(::getpid()))) {}
  ~MemoryLimits() override { std::filesystem::remove_all(root); }
  void put(const std::string &path, const std::string &text) const {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  }
  void put_process(const std::string &cgroup, const std::string &mounts) const {
    put("proc/self/cgroup", cgroup);
    put("proc/self/mountinfo", mounts);
  }
  // Writes the limit, the usage, and the inactive and active file cache. memory.stat has the format of version 2, with
  // entries that must not count.
  void put_unified(const std::string &path, const std::string &limit, uint64_t used, uint64_t inactive,
                   uint64_t active) const {
    put("sys/fs/cgroup" + path + "/memory.max", limit + "\n");
    put("sys/fs/cgroup" + path + "/memory.current", std::to_string(used) + "\n");
    put("sys/fs/cgroup" + path + "/memory.stat",
        "anon 77\nfile 5000\nshmem 4000\nfile_mapped 3\ninactive_anon 9\nactive_anon 9\ninactive_file " +
            std::to_string(inactive) + "\nactive_file " + std::to_string(active) + "\nunevictable 8\n");
  }
  std::vector<MemoryLimit> read() const { return read_memory_limits(root); }

  const std::filesystem::path root;
};

TEST_F(MemoryLimits, EveryAncestorOfVersionTwoCounts) {
  put_process("0::/job.slice/step/task\n", mounts_unified);
  put("sys/fs/cgroup/memory.stat", "anon 1\n");  // the root has neither limit nor usage
  put_unified("/job.slice", "1000000", 600000, 100000, 50000);
  put_unified("/job.slice/step", "max", 500000, 0, 0);
  put_unified("/job.slice/step/task", "800000", 300000, 0, 0);
  const auto limits = read();
  ASSERT_EQ(limits.size(), 2u);
  EXPECT_EQ(limits[0].path, "/sys/fs/cgroup/job.slice/step/task");
  EXPECT_EQ(limits[0].free_bytes(), 500000u);
  EXPECT_EQ(limits[1].path, "/sys/fs/cgroup/job.slice");
  EXPECT_EQ(limits[1].limit_bytes, 1000000u);
  EXPECT_EQ(limits[1].used_bytes, 600000u);
  EXPECT_EQ(limits[1].reclaimable_bytes, 150000u);
  EXPECT_EQ(limits[1].free_bytes(), 550000u);
  EXPECT_NE(limits[0].inode, limits[1].inode);
  EXPECT_EQ(limits[0].inode, read()[0].inode);
}

TEST_F(MemoryLimits, VersionOneHasOtherNames) {
  put_process("5:devices:/\n4:memory:/job/one\n0::/elsewhere\n", mounts_old);
  for (const std::string path : {"", "/job", "/job/one"}) {
    put("sys/fs/cgroup/memory" + path + "/memory.limit_in_bytes", path == "/job" ? "70000\n" : "9223372036854771712\n");
    put("sys/fs/cgroup/memory" + path + "/memory.usage_in_bytes", "30000\n");
    put("sys/fs/cgroup/memory" + path + "/memory.stat",
        "cache 1\ninactive_file 1\nactive_file 2\ntotal_cache 9\ntotal_inactive_file 4000\ntotal_active_file 1000\n");
  }
  const auto limits = read();
  ASSERT_EQ(limits.size(), 1u);
  EXPECT_EQ(limits[0].path, "/sys/fs/cgroup/memory/job");
  EXPECT_EQ(limits[0].free_bytes(), 45000u);
}

// A container's mount begins at its own cgroup, and shows it as the root.
TEST_F(MemoryLimits, AContainersLimitIsThatOfItsOwnGroup) {
  put_unified("", "900", 100, 0, 0);
  put_process("0::/\n", mounts_unified);  // with a cgroup namespace
  ASSERT_EQ(read().size(), 1u);
  EXPECT_EQ(read()[0].path, "/sys/fs/cgroup");
  const std::string bound = "35 24 0:30 /docker/c0ffee /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n";
  put_process("0::/docker/c0ffee\n", bound);  // without one
  EXPECT_EQ(read().size(), 1u);
  put_unified("/inner", "800", 100, 0, 0);
  put_process("0::/docker/c0ffee/inner\n", bound);
  ASSERT_EQ(read().size(), 2u);
  EXPECT_EQ(read()[0].free_bytes(), 700u);
  put_process("0::/docker/c0ffee22\n", bound);  // this mount does not show that cgroup
  EXPECT_EQ(read().size(), 1u);
  put_process("0::/../../other\n", mounts_unified);  // it lies outside of the namespace
  EXPECT_EQ(read().size(), 1u);
}

TEST_F(MemoryLimits, WhatIsUsedUpLeavesNothing) {
  put_process("0::/a\n", mounts_unified);
  put_unified("/a", "1000", 1200, 100, 0);
  EXPECT_EQ(read().at(0).free_bytes(), 0u);
  put_unified("/a", "1000", 100, 4000, 0);  // the files are read at different moments
  EXPECT_EQ(read().at(0).free_bytes(), 1000u);
}

TEST_F(MemoryLimits, WhereThereIsNoneThereIsNone) {
  EXPECT_TRUE(read().empty());
  put_process("0::/a\n", "");
  EXPECT_TRUE(read().empty());
  put_process("5:devices:/\n", mounts_old);
  EXPECT_TRUE(read().empty());
  put_process("garbage\n\n0:\n:::\n", mounts_unified);
  EXPECT_TRUE(read().empty());
  put_process("0::/a\n", mounts_unified);
  put_unified("/a", "max", 5, 0, 0);
  EXPECT_TRUE(read().empty());
  put_unified("/a", "many", 5, 0, 0);
  EXPECT_TRUE(read().empty());
}

uint64_t bytes_of(const memory::ModelPlan &plan, uint32_t rank, uint32_t ranks) {
  const memory::InnerPlace place{rank, ranks};
  return engine::host_bytes(plan, true, {&place, 1});
}

// The sum over the ranks of a host, or over the regions of one rank, exceeds 64 bits. It must become the largest
// number, and not a small one.
TEST(HostBytes, SumsBeyond64BitsAreTheLargestNumber) {
  memory::ModelPlan plan;
  plan.region(memory::RegionId::whole_compute) = {.reach = memory::Reach::parts, .bytes = uint64_t{1} << 62};
  EXPECT_EQ(bytes_of(plan, 0, 2), uint64_t{1} << 63);
  EXPECT_EQ(bytes_of(plan, 1, 2), 0u);
  EXPECT_EQ(bytes_of(plan, 0, 5), UINT64_MAX);
  plan.region(memory::RegionId::main).bytes = uint64_t{3} << 62;
  EXPECT_EQ(bytes_of(plan, 1, 2), uint64_t{3} << 62);
  EXPECT_EQ(bytes_of(plan, 0, 2), UINT64_MAX);
}

// Planes in a file take room on the disk. Planes on the host beside a GPU take memory there.
TEST(HostBytes, BytesInAFileAreNoMemory) {
  memory::ModelPlan plan;
  memory::name_regions(plan, 1);
  plan.region(memory::RegionId::home).bytes = 1 << 20;
  plan.region(memory::RegionId::turns).bytes = 1 << 12;
  plan.region(memory::RegionId::host_home).bytes = 1 << 8;
  const memory::InnerPlace place{0, 1};
  for (const bool host_memory : {true, false})
    EXPECT_EQ(engine::host_bytes(plan, host_memory, {&place, 1}), (1u << 12) + (1u << 8)) << host_memory;
}

}  // namespace
}  // namespace fsdp::device::test
