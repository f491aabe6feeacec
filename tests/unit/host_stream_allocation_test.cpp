// SPDX-License-Identifier: Apache-2.0
// This is a program of its own, because it counts every operator new.
#include <cstdlib>
#include <new>

#include "host_stream_fixture.h"

namespace {
std::atomic<uint64_t> allocations{0};
}

void *operator new(size_t bytes) {
  ++allocations;
  if (void *data = std::malloc(bytes ? bytes : 1)) return data;
  throw std::bad_alloc();
}
void operator delete(void *data) noexcept { std::free(data); }
void operator delete(void *data, size_t) noexcept { std::free(data); }

namespace fsdp::test {
namespace {

TEST(HostStreamAllocation, NothingAfterTheFirstRound) {
  for (const bool overlap : {true, false}) {
    Host host(device::Options{.overlap = overlap});
    auto first = host.stream("first"), second = host.stream("second");
    auto event = host.device->create_event();
    std::vector<float> a(1000), b(1000);
    uint64_t ran = 0;
    const auto round = [&] {
      first->copy(a.data(), b.data(), 4000);
      first->run([&ran] { ++ran; });
      first->record(*event);
      second->wait(*event);
      second->scale(a.data(), 2, 1000);
      second->record(*event);
      host.device->caller_stream(nullptr).wait(*event);
      host.device->synchronize(*event);
    };
    round();
    const uint64_t before = allocations;
    for (int i = 0; i < 3000; ++i) round();
    EXPECT_EQ(allocations, before);
    EXPECT_EQ(ran, 3001u);
  }
}

}  // namespace
}  // namespace fsdp::test
