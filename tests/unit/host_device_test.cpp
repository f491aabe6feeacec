// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "device/host/host_device.h"
#include "host_stream_fixture.h"

namespace fsdp::test {
namespace {

TEST(HostMemory, IsZeroedAlignedAndPresent) {
  Host host;
  const auto memory = host.device->allocate(1000003, "main weights");
  ASSERT_EQ(memory->size_bytes(), 1000003u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->data()) % 4096, 0u);
  for (size_t i = 0; i < 1000003; ++i) ASSERT_EQ(memory->data()[i], std::byte{});
  std::vector<unsigned char> present((1000003 + 4095) / 4096);
  ASSERT_EQ(mincore(memory->data(), 1000003, present.data()), 0);
  for (const auto page : present) EXPECT_EQ(page & 1, 1);
  std::memset(memory->data(), 0xff, 1000003);
}

TEST(HostMemory, AnAllocationOfNoBytesIsMemoryOfNone) {
  Host host;
  const auto memory = host.device->allocate(0, "nothing");
  EXPECT_EQ(memory->size_bytes(), 0u);
}

TEST(HostMemory, TooMuchNamesWhatAndHowMuch) {
  Host host;
  try {
    (void)host.device->allocate(uint64_t{1} << 60, "gather pool");
    ADD_FAILURE() << "an exbibyte was allocated";
  } catch (const Error &error) {
    EXPECT_EQ(error.status, FSDP_OUT_OF_MEMORY);
    EXPECT_NE(error.message.find("gather pool"), std::string::npos);
    EXPECT_NE(error.message.find("1152921504606846976"), std::string::npos);
  }
}

TEST(HostMemory, ChildrenDoNotInheritIt) {
  Host host;
  const auto memory = host.device->allocate(4096, "private [x]");
  const pid_t child = fork();
  if (child == 0) {
    unsigned char present = 0;
    _exit(mincore(memory->data(), 4096, &present) == 0 ? 1 : 0);  // ENOMEM: not mapped
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(HostDevice, FailsTheAllocationAskedFor) {
  Host host(device::Options{.failed_allocation = 3});
  const auto first = host.device->allocate(10, "first");
  host.device->count_allocation(10, "second");
  EXPECT_EQ(status_of([&] { (void)host.device->allocate(10, "third"); }), FSDP_OUT_OF_MEMORY);
  EXPECT_EQ(status_of([&] { (void)host.device->allocate(10, "fourth"); }), FSDP_OK);
}

TEST(HostDevice, HasNoStreamsOfTheCaller) {
  Host host;
  EXPECT_EQ(status_of([&] { (void)host.device->caller_stream(reinterpret_cast<fsdp_stream>(uintptr_t{16})); }),
            FSDP_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace fsdp::test
