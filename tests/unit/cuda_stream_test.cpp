// SPDX-License-Identifier: Apache-2.0
// Tests the order of work over streams and events of the CUDA device, and that streams call the right kernels.
#include <atomic>
#include <functional>
#include <thread>
#include "base/dtype.h"

#include "cuda_fixture.h"
#include "device/cuda/event.h"
#include "device/host/kernels.h"

namespace fsdp::device {
namespace {

constexpr uint64_t count = 20000;

std::vector<float> read(Device &device, const float *from, uint64_t elements = count) {
  std::vector<float> values(elements);
  device.transfer(values.data(), FSDP_FLOAT32, from, FSDP_FLOAT32, elements);
  return values;
}

void write(Device &device, float *to, const std::vector<float> &values) {
  device.transfer(to, FSDP_FLOAT32, values.data(), FSDP_FLOAT32, values.size());
}

class CudaStreamTest : public CudaTest {};

TEST_F(CudaStreamTest, MemoryIsZeroedAndAlignedToPages) {
  CudaContext context;
  for (const uint64_t bytes : {uint64_t{4}, uint64_t{5000}, uint64_t{3} << 20}) {
    const auto memory = context.device->allocate(bytes, "test");
    ASSERT_EQ(bytes, memory->size_bytes());
    EXPECT_EQ(0u, reinterpret_cast<uintptr_t>(memory->data()) % 512);
    EXPECT_EQ(std::vector<float>(bytes / 4, 0),
              read(*context.device, reinterpret_cast<float *>(memory->data()), bytes / 4));
    const auto pinned = context.device->allocate_host(bytes, "test");
    EXPECT_EQ(0u, reinterpret_cast<uintptr_t>(pinned->data()) % 4096);
    EXPECT_TRUE(std::all_of(pinned->data(), pinned->data() + bytes, [](std::byte b) { return b == std::byte{}; }));
  }
  EXPECT_EQ(6u, context.device->allocations());
  EXPECT_EQ(nullptr, context.device->allocate(0, "test")->data());
}

// Makes a chain over two library streams and a late stream of the caller. Each step doubles the result of the previous
// step, or adds to it.
void run_chain(const Options &options) {
  CudaContext context(options);
  OwnStream own;
  const auto memory = context.device->allocate(count * 4, "test");
  auto *values = reinterpret_cast<float *>(memory->data());
  const auto first = context.device->create_stream("first"), second = context.device->create_stream("second");
  const auto a = context.device->create_event(), b = context.device->create_event(), c = context.device->create_event();
  write(*context.device, values, numbers(count));
  Stream &caller = context.device->caller_stream(own.get());
  for (int round = 0; round < 10; ++round) {
    own.be_late(1000);
    caller.scale(values, 2, count);
    caller.record(*a);
    first->wait(*a);
    first->add(values, FSDP_FLOAT32, values, FSDP_FLOAT32, count);
    first->record(*b);
    second->wait(*b);
    second->scale(values, 0.25F, count);
    second->record(*c);
    caller.wait(*c);
  }
  context.device->synchronize(*c);
  EXPECT_TRUE(c->done());
  EXPECT_EQ(numbers(count), read(*context.device, values));
}

TEST_F(CudaStreamTest, EventsOrderStreams) { run_chain({}); }
TEST_F(CudaStreamTest, EventsOrderStreamsUnderDelays) {
  for (uint64_t seed = 1; seed <= 3; ++seed) run_chain({.delay_us = 500, .delay_seed = seed});
}
TEST_F(CudaStreamTest, EventsOrderStreamsWithoutOverlap) { run_chain({.overlap = false}); }

TEST_F(CudaStreamTest, AnEventIsDoneWhenItsWorkIs) {
  CudaContext context;
  OwnStream own;
  const auto event = context.device->create_event();
  EXPECT_TRUE(event->done()) << "never recorded";
  GpuHeld held(own);
  context.device->caller_stream(own.get()).record(*event);
  EXPECT_FALSE(event->done());
  held.let_go();
  context.device->synchronize(*event);
  EXPECT_TRUE(event->done());
}

TEST_F(CudaStreamTest, WithoutOverlapWorkIsDoneWhenTheCallReturns) {
  CudaContext context({.overlap = false});
  OwnStream own;
  const auto pinned = context.device->allocate_host(count * 4, "test");
  const auto stream = context.device->create_stream("test");
  const auto event = context.device->create_event();
  own.be_late(20000);
  context.device->caller_stream(own.get()).fill(pinned->data(), 1, count * 4);
  context.device->caller_stream(own.get()).record(*event);
  stream->wait(*event);
  stream->fill(pinned->data(), 2, count * 2);
  EXPECT_EQ(std::byte{2}, pinned->data()[0]);
  EXPECT_EQ(std::byte{1}, pinned->data()[count * 4 - 1]);
}

// The later of two records decides, even if its stream is faster.
TEST_F(CudaStreamTest, AnEventRecordedOnTwoStreamsIsDoneAfterBoth) {
  CudaContext context;
  OwnStream slow, fast;
  const auto event = context.device->create_event();
  slow.be_late(50000);
  context.device->caller_stream(slow.get()).record(*event);
  context.device->caller_stream(fast.get()).record(*event);
  context.device->synchronize(*event);
  EXPECT_EQ(cudaSuccess, cudaStreamQuery(slow.get()));
  EXPECT_TRUE(event->done());
}

// The host must not take a record for an earlier one, also if other code has enqueued work between the two.
TEST_F(CudaStreamTest, ARecordIsDoneAfterWhatWasEnqueuedByItsHandle) {
  CudaContext context;
  const auto stream = context.device->create_stream("test");
  const auto before = context.device->create_event(), after = context.device->create_event();
  stream->record(*before);
  context.device->synchronize(*before);
  ASSERT_EQ(0, cuda::kernels::delay(static_cast<cudaStream_t>(stream->handle()), 200'000));
  stream->record(*after);
  EXPECT_FALSE(after->done());
  stream->record(*before);  // nothing lies between the two
  EXPECT_FALSE(before->done());
  context.device->synchronize(*after);
  context.device->synchronize(*before);
}

// An event that moves to another stream is not done before both of its records are.
TEST_F(CudaStreamTest, AnEventThatMovesIsDoneAfterBothOfItsRecords) {
  CudaContext context;
  const auto stream = context.device->create_stream("test"), other = context.device->create_stream("other");
  const auto event = context.device->create_event(), known = context.device->create_event();
  ASSERT_EQ(0, cuda::kernels::delay(static_cast<cudaStream_t>(stream->handle()), 200'000));
  stream->record(*event);
  other->record(*known);
  context.device->synchronize(*known);
  other->record(*event);
  EXPECT_FALSE(event->done());
  context.device->synchronize(*event);
}

#ifdef FSDP_TEST_SIMULATED_CUDA
// Several records in a row share one word that the stream writes for the host. Between other records come work, a wait,
// a lane or a call for the handle.
TEST_F(CudaStreamTest, RecordsThatNothingIsBetweenShareAWord) {
  CudaContext context;
  const auto stream = context.device->create_stream("test"), other = context.device->create_stream("other");
  const auto memory = context.device->allocate(4096, "test");
  const auto lane = context.device->create_host_lane("lane");
  const auto one = context.device->create_event(), two = context.device->create_event(),
             late = context.device->create_event();
  std::atomic<bool> go{false};
  const auto words_with = [&](const std::function<void()> &between) {
    stream->record(*one);
    const uint64_t words = simulated::calls("cuStreamWriteValue32");
    {
      const simulated::Hold hold;  // the awaited work has not ended when the wait begins
      between();
      stream->record(*two);
    }
    go = true;
    context.device->synchronize(*two);
    EXPECT_TRUE(one->done());
    return simulated::calls("cuStreamWriteValue32") - words;
  };
  EXPECT_EQ(words_with([] {}), 0U);
  EXPECT_EQ(words_with([&] { stream->fill(memory->data(), 0, 4096); }), 1U);
  EXPECT_EQ(words_with([&] { (void)stream->handle(); }), 1U);
  EXPECT_EQ(words_with([&] {
              other->fill(memory->data(), 0, 4096);
              other->record(*late);
              stream->wait(*late);
            }),
            2U);
  EXPECT_EQ(words_with([&] {
              lane->wait(*late);
              go = false;
              lane->stream().run([&] {
                while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
              });
              lane->release(*stream);
            }),
            1U);
}

// A delay that the debug options request is work, too.
TEST_F(CudaStreamTest, RecordsUnderDelaysShareNoWord) {
  CudaContext context({.delay_us = 300, .delay_seed = 3});
  const auto stream = context.device->create_stream("test");
  const auto one = context.device->create_event(), two = context.device->create_event();
  stream->record(*one);
  const uint64_t words = simulated::calls("cuStreamWriteValue32");
  stream->record(*two);
  EXPECT_EQ(simulated::calls("cuStreamWriteValue32"), words + 1);
  context.device->synchronize(*two);
}

// The word of a destroyed event still serves the events that share it.
TEST_F(CudaStreamTest, AWordGoesOnCountingForThoseThatShareIt) {
  CudaContext context;
  const auto stream = context.device->create_stream("test");
  auto first = context.device->create_event();
  const auto second = context.device->create_event();
  for (int i = 0; i < 3; ++i) stream->record(*first);
  stream->record(*second);
  context.device->synchronize(*second);
  first.reset();
  std::vector<std::unique_ptr<HostLane>> lanes;
  for (int i = 0; i < 4; ++i) {
    lanes.push_back(context.device->create_host_lane("lane"));
    EXPECT_TRUE(second->done()) << i;
  }
  lanes[0]->stream().run([] {});
  lanes[0]->release(*stream);
  stream->record(*second);
  context.device->synchronize(*second);
}

// A word that would reach half of its numbers is kept as it is, for threads that may still read it.
TEST_F(CudaStreamTest, AWordIsNotCountedRound) {
  CudaContext context;
  const auto stream = context.device->create_stream("test");
  auto event = context.device->create_event();
  const auto word = [&] { return &cuda::cuda_event(*event).word(); };
  auto *const old = const_cast<cuda::PinnedWord *>(word());
  old->value.store(cuda::PinnedWord::most - 1);
  event.reset();
  event = context.device->create_event();
  ASSERT_EQ(word(), old);
  for (int i = 0; i < 3; ++i) {
    (void)stream->handle();  // a word for each record
    stream->record(*event);
    context.device->synchronize(*event);
    EXPECT_EQ(word() == old, i == 0);
  }
  EXPECT_EQ(old->value.load(), cuda::PinnedWord::most);
  for (int i = 0; i < 300; ++i) {
    const auto other = context.device->create_event();
    EXPECT_NE(&cuda::cuda_event(*other).word(), old);
  }
}

// On a stream of the program, the program may have enqueued other work between two records.
TEST_F(CudaStreamTest, RecordsOnAStreamOfTheCallerShareNoWord) {
  CudaContext context;
  const OwnStream own;
  const auto one = context.device->create_event(), two = context.device->create_event();
  context.device->caller_stream(own.get()).record(*one);
  const uint64_t words = simulated::calls("cuStreamWriteValue32");
  own.be_late(100'000);
  context.device->caller_stream(own.get()).record(*two);
  EXPECT_EQ(simulated::calls("cuStreamWriteValue32"), words + 1);
  EXPECT_FALSE(two->done());
  context.device->synchronize(*two);
}
#endif

// Wrappers of callers' streams are few, even if these streams are many and short-lived.
TEST_F(CudaStreamTest, ManyStreamsOfTheCaller) {
  CudaContext context;
  const auto memory = context.device->allocate(4, "test");
  const auto event = context.device->create_event();
  auto *value = reinterpret_cast<float *>(memory->data());
  write(*context.device, value, {1});
  for (int i = 0; i < 100; ++i) {
    OwnStream own;
    Stream &caller = context.device->caller_stream(own.get());
    caller.wait(*event);
    caller.add(value, FSDP_FLOAT32, value, FSDP_FLOAT32, 1);
    if (i % 2) caller.scale(value, 0.25F, 1);
    caller.record(*event);
  }
  context.device->synchronize(*event);
  EXPECT_EQ(1, read(*context.device, value, 1)[0]);
}

TEST_F(CudaStreamTest, KernelsGiveTheBitsOfTheHost) {
  CudaContext context;
  Device &device = *context.device;
  const auto memory = device.allocate(count * 8 + 16, "test");
  auto *values = reinterpret_cast<float *>(memory->data());
  const auto host = numbers(2 * count, -3);
  write(device, values, host);
  const auto results = device.allocate_host(32, "test");
  auto *squares = reinterpret_cast<double *>(results->data());
  auto *bad = reinterpret_cast<uint64_t *>(results->data() + 8);
  auto *zeros = reinterpret_cast<uint64_t *>(results->data() + 16);
  auto *halves = reinterpret_cast<double *>(results->data() + 24);
  const CompactSquaresSpan compact{halves, reinterpret_cast<uint16_t *>(values), nullptr, FSDP_FLOAT16, count, 128};
  const auto stream = device.create_stream("test");
  stream->sum_squares(squares, values, count, 128);
  stream->count_nonfinite(bad, values, count);
  stream->count_zeros(zeros, values, count);
  stream->sum_all_compact_squares({&compact, 1});
  stream->rank_sum({memory->data(), count * 4, 2, FSDP_FLOAT32, FSDP_FLOAT32, values, count, 0.5F, false, true});
  const auto done = device.create_event();
  stream->record(*done);
  device.synchronize(*done);
  EXPECT_EQ(kernels::sum_squares(host.data(), count, 128), *squares);
  EXPECT_EQ(0u, *bad);
  EXPECT_EQ(kernels::count_zeros(host.data(), count), *zeros);
  CompactSquaresSpan on_host = compact;
  on_host.values = reinterpret_cast<const uint16_t *>(host.data());
  EXPECT_EQ(kernels::sum_compact_squares(on_host), *halves);
  std::vector<float> sum(count);
  kernels::rank_sum({reinterpret_cast<const std::byte *>(host.data()), count * 4, 2, FSDP_FLOAT32, FSDP_FLOAT32,
                     sum.data(), count, 0.5F, false});
  EXPECT_EQ(sum, read(device, values));
}

// All streams of the caller use one scratch memory.
TEST_F(CudaStreamTest, NormsOnSeveralStreamsOfTheCaller) {
  CudaContext context;
  Device &device = *context.device;
  const auto memory = device.allocate(count * 4, "test");
  auto *values = reinterpret_cast<float *>(memory->data());
  const auto host = numbers(count);
  write(device, values, host);
  const auto results = device.allocate_host(8 * 8, "test");
  auto *squares = reinterpret_cast<double *>(results->data());
  std::vector<std::unique_ptr<OwnStream>> streams;
  std::vector<std::unique_ptr<Event>> events;
  for (uint64_t i = 0; i < 8; ++i) {
    streams.push_back(std::make_unique<OwnStream>());
    events.push_back(device.create_event());
    Stream &caller = device.caller_stream(streams.back()->get());
    caller.sum_squares(squares + i, values, count - i, 128);
    caller.record(*events.back());
  }
  for (uint64_t i = 0; i < 8; ++i) {
    device.synchronize(*events[i]);
    EXPECT_EQ(kernels::sum_squares(host.data(), count - i, 128), squares[i]) << i;
  }
}

TEST_F(CudaStreamTest, AdamWReadsItsStepFromTheDevice) {
  CudaContext context;
  Device &device = *context.device;
  const AdamW step{0.1F, average_of(0.9), average_of(0.99), 1e-8F, 0.01F, 0.1F, 0.01F, 1, 0};
  const auto memory = device.allocate(count * 4 * 8 + sizeof step, "test");
  auto *base = reinterpret_cast<float *>(memory->data());
  auto *stored = reinterpret_cast<AdamW *>(base + 8 * count);
  const auto stream = device.create_stream("test");
  const auto done = device.create_event();
  for (int i = 0; i < 2; ++i) {
    write(device, base + i * 4 * count, numbers(count));
    write(device, base + (i * 4 + 1) * count, numbers(count, 7));
  }
  const auto span = [&](float *at) {
    return AdamWSpan{at, at + count, at + 2 * count, at + 3 * count, nullptr, FSDP_FLOAT32, count};
  };
  const AdamWSpan given = span(base), from_memory = span(base + 4 * count);
  stream->adamw(step, {&given, 1});
  stream->store_step(stored, step);
  stream->adamw_from(stored, {&from_memory, 1});
  stream->record(*done);
  device.synchronize(*done);
  // Expects the weights and both moments of the host.
  std::vector<float> weight = numbers(count), grad = numbers(count, 7), exp_avg(count), exp_avg_sq(count);
  const AdamWSpan host{weight.data(), grad.data(), exp_avg.data(), exp_avg_sq.data(), nullptr, FSDP_FLOAT32, count};
  kernels::adamw(step, {&host, 1});
  for (float *const at : {base, base + 4 * count}) {
    EXPECT_EQ(weight, read(device, at));
    EXPECT_EQ(exp_avg, read(device, at + 2 * count));
    EXPECT_EQ(exp_avg_sq, read(device, at + 3 * count));
  }
}

TEST_F(CudaStreamTest, CompactAdamWReadsItsStepFromTheDevice) {
  CudaContext context;
  Device &device = *context.device;
  const AdamW step{0.1F, average_of(0.9), average_of(0.99), 1e-8F, 0.01F, 0.1F, 0.01F, 3, 5};
  const auto memory = device.allocate(count * 4 * 8 + sizeof step, "test");
  auto *base = reinterpret_cast<float *>(memory->data());
  auto *stored = reinterpret_cast<AdamW *>(base + 8 * count);
  const auto stream = device.create_stream("test");
  const auto done = device.create_event();
  const auto span = [&](float *at) {
    CompactSpan one{};
    one.weight = at, one.grad = at + count, one.exp_avg = at + 2 * count, one.exp_avg_sq = at + 3 * count;
    one.form = MainForm::rounded, one.name = 7, one.numbers = {11, count, 0}, one.count = count;
    return one;
  };
  // The weights are the first half of their array, in bf16. The other half has the numbers from which they are rounded.
  for (int i = 0; i < 2; ++i) {
    write(device, base + i * 4 * count, std::vector<float>(count, 1.0F));
    write(device, base + (i * 4 + 1) * count, numbers(count, 7));
  }
  const CompactSpan given = span(base), from_memory = span(base + 4 * count);
  stream->round_randomly({base + count, static_cast<uint16_t *>(given.weight), count, {5, 7, 2}, given.numbers});
  stream->round_randomly(
      {base + 5 * count, static_cast<uint16_t *>(from_memory.weight), count, {5, 7, 2}, given.numbers});
  stream->compact_adamw(step, {&given, 1});
  stream->store_step(stored, step);
  stream->compact_adamw_from(stored, {&from_memory, 1});
  stream->record(*done);
  device.synchronize(*done);
  std::vector<float> host(count * 4);
  std::fill_n(host.begin(), count, 1.0F);
  const std::vector<float> grad = numbers(count, 7);
  std::copy(grad.begin(), grad.end(), host.begin() + static_cast<std::ptrdiff_t>(count));
  const CompactSpan expected = span(host.data());
  kernels::round_randomly({grad.data(), static_cast<uint16_t *>(expected.weight), count, {5, 7, 2}, expected.numbers});
  kernels::compact_adamw(step, {&expected, 1});
  for (uint64_t i = 0; i < 4; ++i) {
    const auto first = host.begin() + static_cast<std::ptrdiff_t>(i * count);
    const std::vector<float> wanted(first, first + static_cast<std::ptrdiff_t>(count));
    EXPECT_EQ(wanted, read(device, base + i * count)) << i;
    EXPECT_EQ(wanted, read(device, base + (4 + i) * count)) << i;
  }
}

TEST_F(CudaStreamTest, RunsNoFunctionsOfTheHost) {
  CudaContext context;
  const auto stream = context.device->create_stream("test");
  EXPECT_EQ(FSDP_INTERNAL, failure_of([&] { stream->run([] {}); }).status);
}

TEST_F(CudaStreamTest, TheCallingThreadIsAStream) {
  CudaContext context;
  OwnStream own;
  const auto event = context.device->create_event();
  own.be_late(20000);
  context.device->caller_stream(own.get()).record(*event);
  context.device->calling_thread().wait(*event);
  EXPECT_TRUE(event->done());
  own.be_late(20000);
  context.device->caller_stream(own.get()).record(*event);
  context.device->calling_thread().record(*event);
  EXPECT_TRUE(event->done()) << "the calling thread's work is done at once";
}

}  // namespace
}  // namespace fsdp::device
