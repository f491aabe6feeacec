// SPDX-License-Identifier: Apache-2.0
// Tests collectives by NCCL over the simulated one: their results, and how they are called.
#include "nccl_ranks.h"
#include "transport/team.h"

namespace fsdp::transport::test {
namespace {

// Returns a value that identifies rank and place, and is exact in bfloat16 and float16.
float value_of(uint32_t rank, uint64_t i) {
  return static_cast<float>(static_cast<int>(i % 13) - 6 + 3 * static_cast<int>(rank));
}

struct Grads {
  Grads(NcclRank &mine, uint64_t shard)
      : shard(shard),
        bytes((mine.size() * shard * sizeof(float) + 4095) / 4096 * 4096),
        full(mine.team->create_parts(bytes, "grads")),
        to(mine.device->allocate(shard * sizeof(float), "to")),
        own(full->writable() + mine.rank() * bytes) {
    fill(mine);
    std::memset(to->data(), 0, shard * sizeof(float));
  }
  void fill(NcclRank &mine) {
    auto *values = reinterpret_cast<float *>(own);
    for (uint64_t i = 0; i < mine.size() * shard; ++i) values[i] = value_of(mine.rank(), i);
  }
  Part part() const { return {own, full.get(), 0, bytes}; }
  Sum span(NcclRank &mine, float factor) const { return slice_sum(part(), shard, mine.size(), to->data(), factor); }
  // The result consists of this many sums of this rank's slice. Whole numbers are small, so that sums are exact in any
  // order.
  void expect_sums(NcclRank &mine, float times, const std::string &what) {
    const auto seen = mine.read<float>(to->data(), shard);
    for (uint64_t i = 0; i < shard; ++i)
      ASSERT_EQ(seen[i], times * sum(mine.size(), mine.rank() * shard + i)) << what << ' ' << i;
  }
  static float sum(uint32_t size, uint64_t i) {
    float total = 0;
    for (uint32_t r = 0; r < size; ++r) total += value_of(r, i);
    return total;
  }

  uint64_t shard, bytes;
  std::unique_ptr<Arena> full;
  std::unique_ptr<device::Memory> to;
  std::byte *own;
};

class NcclSizes : public NcclTest, public testing::WithParamInterface<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, NcclSizes, testing::Values(1U, 2U, 4U));

TEST_P(NcclSizes, GathersPiecesOfOneLaunch) {
  ::setenv("FSDP_NCCL_COPY_ENGINES", "1", 1);
  expect_well(run_ranks({GetParam()}, [](NcclRank &mine) {
    constexpr uint64_t part = 8192;
    const auto stream = mine.device->create_stream("gather");
    const auto arena = mine.team->create_parts(part, "weights");
    const auto pool = mine.device->allocate(mine.size() * part, "pool");
    mine.team->register_memory(pool->data(), pool->size_bytes(), "pool");
    EXPECT_NE(mine.team->notes().at(1).text.find("gathers by copy engines do not notice"), std::string::npos);
    const auto communicator = mine.team->create_collectives("gather");
    std::memset(arena->writable() + mine.rank() * part, static_cast<int>(mine.rank() + 1), part);
    const uint64_t cut = 3000;
    const Gather spans[] = {{Part::in(*arena, 0, part, mine.rank()), pool->data(), cut},
                            {Part::in(*arena, cut, part, mine.rank()), pool->data() + mine.size() * cut, part - cut}};
    for (int i = 0; i < 3; ++i) communicator->gather_stable(spans, {1, "layer"}, *stream);
    const Ticket ticket = communicator->gather(spans, {1, "layer"}, *stream);
    mine.synchronize(*stream);
    EXPECT_TRUE(communicator->released(ticket));
    const auto seen = mine.read<uint8_t>(pool->data(), mine.size() * part);
    for (uint64_t i = 0; i < seen.size(); ++i) {
      const uint64_t second = mine.size() * cut;
      ASSERT_EQ(seen[i], (i < second ? i / cut : (i - second) / (part - cut)) + 1) << i;
    }
  }));
  EXPECT_EQ(control().count(Count::launches), 4 * GetParam());
  EXPECT_EQ(control().count(Count::all_gathers), 8 * GetParam());
  EXPECT_EQ(control().count(Count::registered_collectives), 8 * GetParam());
  EXPECT_EQ(control().count(Count::copy_engine_gathers), 8 * GetParam());
  EXPECT_EQ(control().count(Count::aborts), 0);
  EXPECT_EQ(control().count(Count::finished), GetParam());
}

TEST_P(NcclSizes, APieceAtItsPlaceIsGatheredInPlace) {
  expect_well(run_ranks({GetParam()}, [](NcclRank &mine) {
    constexpr uint64_t bytes = 512;
    const uint64_t part = mine.size() * bytes;
    const auto stream = mine.device->create_stream("gather");
    const auto arena = mine.team->create_parts(part, "whole weights");
    const auto communicator = mine.team->create_collectives("gather");
    std::byte *whole = arena->writable() + mine.rank() * part;
    std::memset(whole + mine.rank() * bytes, 7 + static_cast<int>(mine.rank()), bytes);
    const Gather span{Part::in(*arena, 0, part + bytes, mine.rank()), whole, bytes};
    communicator->gather({&span, 1}, {1, "layer"}, *stream);
    mine.synchronize(*stream);
    const auto seen = mine.read<uint8_t>(whole, part);
    for (uint64_t i = 0; i < part; ++i) ASSERT_EQ(seen[i], 7 + i / bytes) << i;
  }));
  EXPECT_EQ(control().count(Count::in_place_gathers), GetParam());
}

TEST_P(NcclSizes, ReducesInTheGradientItself) {
  expect_well(run_ranks({GetParam()}, [](NcclRank &mine) {
    const auto stream = mine.device->create_stream("reduce");
    Grads a(mine, 100), b(mine, 1024);
    const auto communicator = mine.team->create_collectives("reduce");
    const auto reduce = [&](bool accumulate) {
      a.fill(mine);
      b.fill(mine);
      const Sum spans[] = {a.span(mine, 0.5F), b.span(mine, 0.5F)};
      communicator->sum(spans, accumulate, {1, "layer"}, *stream);
      mine.synchronize(*stream);
    };
    reduce(false);
    reduce(true);
    a.expect_sums(mine, 2 * 0.5F, "a");
    b.expect_sums(mine, 2 * 0.5F, "b");
  }));
  EXPECT_EQ(control().count(Count::in_place_reduces), 4 * GetParam());
  EXPECT_EQ(control().count(Count::registered_collectives), 4 * GetParam());
}

TEST_P(NcclSizes, AllReducesBroadcastsAndMeets) {
  expect_well(run_ranks({GetParam()}, [](NcclRank &mine) {
    const auto stream = mine.device->create_stream("reduce");
    Grads grads(mine, 64);
    const uint64_t whole_bytes = mine.size() * grads.shard * sizeof(float);
    const auto whole = mine.team->create_parts(whole_bytes, "whole");
    const auto communicator = mine.team->create_collectives("reduce");
    std::byte *mine_whole = whole->writable() + mine.rank() * whole_bytes;
    const Sum span =
        everywhere(grads.part(), {mine_whole, whole.get(), 0, whole_bytes}, mine.size() * grads.shard, 0.25F);
    communicator->sum({&span, 1}, false, {1, "layer"}, *stream);
    mine.synchronize(*stream);
    const auto seen = mine.read<float>(mine_whole, mine.size() * grads.shard);
    for (uint64_t i = 0; i < seen.size(); ++i) ASSERT_EQ(seen[i], 0.25F * Grads::sum(mine.size(), i)) << i;

    const uint32_t root = mine.size() - 1;
    grads.fill(mine);
    communicator->broadcast(grads.part(), 16, root, {2, "param"}, *stream);
    communicator->barrier({3, "end"}, *stream);
    mine.synchronize(*stream);
    const auto sent = mine.read<float>(grads.own, 4);
    for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(sent[i], value_of(root, i)) << i;
  }));
}

TEST_P(NcclSizes, ExchangesMessages) {
  expect_well(run_ranks({GetParam()}, [](NcclRank &mine) {
    const auto stream = mine.device->create_stream("outer");
    constexpr uint64_t count = 50;
    const auto memory = mine.device->allocate(mine.size() * count * sizeof(float), "values");
    const auto to = mine.device->allocate(count * sizeof(float), "to");
    auto *values = reinterpret_cast<float *>(memory->data());
    const auto communicator = mine.team->create_collectives("outer", Shape::messages());
    const auto fill = [&] {
      for (uint64_t i = 0; i < mine.size() * count; ++i) values[i] = value_of(mine.rank(), i);
    };
    fill();
    std::memset(to->data(), 0, count * sizeof(float));
    const Sum slice = slice_sum(Part::alone(values), count, mine.size(), to->data());
    communicator->sum({&slice, 1}, true, {1, "a"}, *stream);
    mine.synchronize(*stream);
    const auto slices = mine.read<float>(to->data(), count);
    for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(slices[i], Grads::sum(mine.size(), mine.rank() * count + i)) << i;
    fill();
    const Sum sum = everywhere_in_place(values, mine.size() * count);
    communicator->sum({&sum, 1}, false, {1, "b"}, *stream);
    mine.synchronize(*stream);
    for (uint64_t i = 0; i < mine.size() * count; ++i) ASSERT_EQ(values[i], Grads::sum(mine.size(), i)) << i;
    fill();
    mine.meet();
    const Gather whole = in_place(memory->data(), count * sizeof(float), mine.rank());
    communicator->gather({&whole, 1}, {1, "c"}, *stream);
    communicator->barrier({1, "d"}, *stream);
    mine.synchronize(*stream);
    for (uint64_t i = 0; i < mine.size() * count; ++i)
      ASSERT_EQ(values[i], value_of(static_cast<uint32_t>(i / count), i)) << i;
    communicator->quiesce();
    communicator->next_round();
    communicator->barrier({1, "e"}, *stream);
    mine.synchronize(*stream);
  }));
}

// Without an order the simulated NCCL would see kernels of both on one GPU at the same time.
TEST_F(NcclTest, TwoCommunicatorsLaunchInOneOrder) {
  for (const int64_t version : {22809, 23100}) {
    control().set(Knob::version, version);
    simulated::set_delay(300, 7);
    expect_well(run_ranks({2}, [](NcclRank &mine) {
      const auto gathers = mine.device->create_stream("gather"), reduces = mine.device->create_stream("reduce");
      constexpr uint64_t part = 4096;
      const auto arena = mine.team->create_parts(part, "weights");
      const auto pool = mine.device->allocate(mine.size() * part, "pool");
      Grads grads(mine, 64);
      const auto gather = mine.team->create_collectives("gather"), reduce = mine.team->create_collectives("reduce");
      const Gather span{Part::in(*arena, 0, part, mine.rank()), pool->data(), part};
      const Sum sum = grads.span(mine, 1);
      for (int i = 0; i < 20; ++i) {
        gather->gather_stable({&span, 1}, {1, "layer"}, *gathers);
        reduce->sum({&sum, 1}, false, {1, "layer"}, *reduces);
      }
      reduce->quiesce();
      mine.synchronize(*gathers);
      mine.synchronize(*reduces);
      reduce->next_round();
    }));
    EXPECT_STREQ(control().breaches(), "") << version;
  }
}

// The ranks of the job describe their team. Each rank makes a communicator, which NCCL refuses if it cannot serve the
// ranks.
std::vector<Note> first_notes(const NcclJob &job) {
  std::vector<Note> notes(job.size);
  expect_well(run_ranks(job, [&](NcclRank &mine) {
    notes[mine.rank()] = mine.team->notes().at(0);
    EXPECT_NE(mine.team->create_collectives("gather"), nullptr);
  }));
  return notes;
}

void expect_words(const std::string &text, const std::vector<const char *> &words) {
  for (const char *word : words) EXPECT_NE(text.find(word), std::string::npos) << word << " is not in: " << text;
}

// One rank warns, and says which variable to set.
void expect_warning(const std::vector<Note> &notes, const std::vector<const char *> &words) {
  for (size_t r = 0; r < notes.size(); ++r) {
    EXPECT_EQ(notes[r].level, r == 0 ? FSDP_LOG_WARNING : FSDP_LOG_INFO) << notes[r].text;
    expect_words(notes[r].text, words);
    expect_words(notes[r].text, {"device memory travels through the host's, without NCCL", "FSDP_TRANSPORT_STAGING"});
  }
}

TEST_F(NcclTest, RanksThatShareAGpuTravelThroughTheHostUnlessNcclMay) {
  const NcclJob job{2, 20'000, true, DeviceTransport::automatic};
  expect_warning(first_notes(job), {"ranks 0 and 1 share a GPU, which needs NCCL 2.30.3 or later (this is 2.32.3) and "
                                    "NCCL_MULTI_RANK_GPU_ENABLE=1 (not set)",
                                    "device_index", "CUDA_VISIBLE_DEVICES"});
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  expect_words(first_notes(job).at(0).text, {"NCCL 2.32.3 (", "launches are ordered by events"});
}

// Each slice has its own device number, but NCCL identifies it by the place of its GPU.
TEST_F(NcclTest, SlicesOfOneGpuTravelThroughTheHostUnlessNcclMay) {
  const NcclJob job{4, 20'000, false, DeviceTransport::automatic};
  simulated::set_slices(2);
  expect_warning(first_notes(job), {"ranks 0 and 1 have slices (MIG) of one GPU (0000:10:00)", "a whole GPU"});
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  control().reset();  // NCCL has read its variables
  expect_words(first_notes(job).at(0).text, {"NCCL 2.32.3 ("});
}

TEST_F(NcclTest, SlicesOfOneGpuAreRefusedWhereNcclWasAskedFor) {
  simulated::set_slices(2);
  for (const Error &error : run_ranks({2}, [](NcclRank &) {})) {
    EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
    expect_words(error.message, {"NCCL cannot serve these ranks: ranks 0 and 1 have slices (MIG) of one GPU"});
  }
}

TEST_F(NcclTest, ARankThatIsAloneIsNotWarned) {
  ::setenv("FSDP_NCCL_LIBRARY", "libnccl-that-is-not-there.so", 1);
  const Note note = first_notes({1, 20'000, false, DeviceTransport::automatic}).at(0);
  EXPECT_EQ(note.level, FSDP_LOG_INFO) << note.text;
  expect_words(note.text, {"libnccl-that-is-not-there.so"});
}

// The team says that the ranks are on several hosts.
class TeamApart final : public DeviceTeam {
 public:
  TeamApart(std::shared_ptr<Team> host, device::Device &device) : DeviceTeam(std::move(host), device) {}
  bool spans_hosts() const noexcept override { return true; }
  std::unique_ptr<Collectives> create_collectives(const std::string &what, const Shape &shape) override {
    return host_->create_collectives(what, shape);
  }
};

TEST_F(NcclTest, BetweenHostsItIsRefusedWhereItWasAskedFor) {
  expect_well(run_ranks({2, 20'000, false, DeviceTransport::staging}, [](NcclRank &mine) {
    const auto apart = std::make_shared<TeamApart>(mine.host, *mine.device);
    const auto team_of = [&](DeviceTransport transport) {
      return create_device_team(apart, *mine.device, transport, mine.waiter, mine.failure);
    };
    const Error error = error_of([&] { (void)team_of(DeviceTransport::nccl); });
    EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
    expect_words(error.message, {"FSDP_TRANSPORT_NCCL", "the 2 ranks from 0 to 1", "between hosts",
                                 "not guarded by the job's secret", "device_transport 0", "FSDP_TRANSPORT_STAGING"});
    const auto chosen = team_of(DeviceTransport::automatic);
    EXPECT_EQ(chosen->transport(), DeviceTransport::staging);
    EXPECT_EQ(chosen->notes().at(0).level, FSDP_LOG_INFO);
    expect_words(chosen->notes().at(0).text, {"2 ranks from 0 to 1", "on several hosts"});
    EXPECT_TRUE(team_of(DeviceTransport::staging)->notes().empty());
  }));
}

TEST_F(NcclTest, SumsInBlocksAreRefused) {
  expect_well(run_ranks({4}, [](NcclRank &mine) {
    EXPECT_NE(mine.team->create_collectives("reduce", {.block = 4}), nullptr);  // one block of all ranks works
    const Error error = error_of([&] { (void)mine.team->create_collectives("blocks", {.block = 2}); });
    EXPECT_EQ(error.status, FSDP_UNSUPPORTED) << error.message;
    for (const char *word : {"blocks: sums in blocks of 2 ranks by NCCL", "FSDP_TRANSPORT_STAGING"})
      EXPECT_NE(error.message.find(word), std::string::npos) << error.message;
  }));
}

}  // namespace
}  // namespace fsdp::transport::test
