// SPDX-License-Identifier: Apache-2.0
// Tests sums in 16 bits, as NCCL computes them and as this library does.
#include <bit>
#include <cmath>

#include "base/dtype.h"
#include "device/host/kernels.h"
#include "nccl_ranks.h"
#include "transport/nccl/connection.h"

namespace fsdp::transport::test {
namespace {

// These are exact in bfloat16, as is their sum. A sum that adds the first two before the third loses 1.
constexpr float probe[] = {256, 1, 1};
constexpr uint32_t ranks = 3;

uint16_t bfloat16_of(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }
float value_of(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Calls NCCL's own reduce-scatter of one number a rank.
float reduce_by_nccl(NcclRank &mine) {
  const auto library = nccl::load_library();
  nccl::UniqueId id{};
  EXPECT_EQ(library->ncclGetUniqueId(&id), nccl::success);
  std::vector<nccl::UniqueId> ids(mine.size());
  mine.host->all_gather(&id, sizeof id, ids.data(), "id");
  nccl::ConnectionPlan plan;
  plan.name = "probe";
  plan.ranks = static_cast<int>(mine.size());
  plan.rank = static_cast<int>(mine.rank());
  nccl::Connection connection(library, plan, *mine.device, mine.waiter);
  connection.join(ids.front(), 10'000);
  const auto stream = mine.device->create_stream("probe");
  const auto memory = mine.device->allocate(512, "probe");
  auto *values = reinterpret_cast<uint16_t *>(memory->data());
  for (uint32_t r = 0; r < mine.size(); ++r) values[r] = bfloat16_of(probe[mine.rank()]);
  connection.launch("probe", [&](nccl::Comm *comm) {
    EXPECT_EQ(library->ncclReduceScatter(values, values + mine.rank(), 1, nccl::bfloat16, nccl::addition, comm,
                                         stream->handle()),
              nccl::success);
  });
  mine.synchronize(*stream);
  EXPECT_TRUE(connection.finish(10'000));
  return value_of(mine.read<uint16_t>(values + mine.rank(), 1)[0]);
}

// The ring of a rank begins after that rank, so the rounding depends on the rank that gets the sum.
TEST_F(NcclTest, ARingRoundsAtEachHop) {
  float seen[ranks];
  expect_well(run_ranks({ranks}, [&](NcclRank &mine) { seen[mine.rank()] = reduce_by_nccl(mine); }));
  EXPECT_EQ(seen[0], 258);  // 1 + 1, + 256
  EXPECT_EQ(seen[1], 256);  // 1 + 256, + 1
  EXPECT_EQ(seen[2], 256);  // 256 + 1, + 1
  control().set(Knob::round_sums_once, 1);
  expect_well(run_ranks({ranks}, [&](NcclRank &mine) { EXPECT_EQ(reduce_by_nccl(mine), 258); }));
}

// Reduces gradients that are all different, and not exact in 16 bits.
struct Sums {
  fsdp_dtype dtype, wire;
  bool apart;  // uses a receive buffer even if the gradient has room
};

class Reduced {
 public:
  static constexpr uint64_t shard = 301;

  Reduced(NcclRank &mine, const Sums &sums)
      : mine_(mine),
        sums_(sums),
        bytes_((mine.size() * shard * sizeof(float) + 4095) / 4096 * 4096),
        full_(mine.team->create_parts(bytes_, "grads")),
        wire_(mine.device->allocate(bytes_, "wire")),
        received_(mine.device->allocate(bytes_, "received")),
        to_(mine.device->allocate(shard * sizeof(float), "to")) {
    std::vector<float> values(mine.size() * shard);
    for (uint64_t i = 0; i < values.size(); ++i)
      values[i] = std::sin(static_cast<float>(i * mine.size() + mine.rank())) * (i % 7 == 0 ? 300.0F : 1.0F);
    device::kernels::cast(own(), sums.dtype, values.data(), FSDP_FLOAT32, values.size());
    for (uint64_t i = 0; i < shard; ++i) to()[i] = static_cast<float>(i);
  }
  float *to() const { return reinterpret_cast<float *>(to_->data()); }
  Sum span() const {
    const bool rounded = dtype_size(sums_.wire) < dtype_size(sums_.dtype);
    std::byte *const received = sums_.apart || !rounded ? received_->data() : nullptr;
    Sum sum =
        slice_sum(Part::in(*full_, 0, bytes_, mine_.rank()), sums_.dtype, sums_.wire, shard, mine_.size(), to(), 0.3F);
    sum.rounded = rounded ? wire_->data() : nullptr;
    sum.received = mine_.size() > 1 ? received : nullptr;
    return sum;
  }
  // Computes the host kernel's sum of the same gradients on top of the existing values.
  std::vector<float> expected() const {
    std::vector<std::byte> all(mine_.size() * bytes_);
    mine_.host->all_gather(own(), bytes_, all.data(), "gradients");
    std::vector<float> sums = mine_.read<float>(to(), shard);
    device::kernels::rank_sum({all.data() + mine_.rank() * shard * dtype_size(sums_.dtype), bytes_, mine_.size(),
                               sums_.dtype, sums_.wire, sums.data(), shard, 0.3F, true});
    return sums;
  }

 private:
  std::byte *own() const { return full_->writable() + mine_.rank() * bytes_; }

  NcclRank &mine_;
  Sums sums_;
  uint64_t bytes_;
  std::unique_ptr<Arena> full_;
  std::unique_ptr<device::Memory> wire_, received_, to_;
};

void expect_bits_of_the_host(NcclRank &mine, const Sums &sums) {
  const Reduced reduced(mine, sums);
  const std::vector<float> expected = reduced.expected();
  const auto stream = mine.device->create_stream("reduce");
  const auto communicator = mine.team->create_collectives("reduce");
  const Sum span = reduced.span();
  communicator->sum({&span, 1}, true, {1, "layer"}, *stream);
  mine.synchronize(*stream);
  const auto seen = mine.read<float>(reduced.to(), Reduced::shard);
  EXPECT_EQ(std::memcmp(seen.data(), expected.data(), Reduced::shard * sizeof(float)), 0)
      << "ranks " << mine.size() << ", dtype " << sums.dtype << ", wire " << sums.wire << ", apart " << sums.apart;
}

class NcclSums : public NcclTest, public testing::WithParamInterface<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, NcclSums, testing::Values(1U, 2U, 3U, 4U));

TEST_P(NcclSums, OfFewerBitsThan32HaveTheHostsBits) {
  for (const Sums &sums : {Sums{FSDP_BFLOAT16, FSDP_BFLOAT16, true}, Sums{FSDP_FLOAT16, FSDP_FLOAT16, true},
                           Sums{FSDP_FLOAT32, FSDP_BFLOAT16, true}, Sums{FSDP_FLOAT32, FSDP_BFLOAT16, false},
                           Sums{FSDP_FLOAT32, FSDP_FLOAT16, false}, Sums{FSDP_FLOAT16, FSDP_FLOAT32, true},
                           Sums{FSDP_BFLOAT16, FSDP_FLOAT16, true}}) {
    control().reset();
    expect_well(run_ranks({GetParam()}, [&](NcclRank &mine) { expect_bits_of_the_host(mine, sums); }));
    EXPECT_EQ(control().count(Count::messages), GetParam() * (GetParam() - 1));
    EXPECT_EQ(control().count(Count::reduce_scatters), 0);
  }
}

// NCCL's ring would give two of the ranks 256.
TEST_F(NcclTest, NoHopLosesWhatIsSmall) {
  expect_well(run_ranks({ranks}, [&](NcclRank &mine) {
    const Reduced reduced(mine, {FSDP_BFLOAT16, FSDP_BFLOAT16, true});
    Sum span = reduced.span();
    span.factor = 1;
    std::byte *const own = span.from.own;
    for (uint64_t i = 0; i < ranks * Reduced::shard; ++i)
      reinterpret_cast<uint16_t *>(own)[i] = bfloat16_of(probe[mine.rank()]);
    const auto stream = mine.device->create_stream("reduce");
    const auto communicator = mine.team->create_collectives("reduce");
    communicator->sum({&span, 1}, false, {1, "layer"}, *stream);
    mine.synchronize(*stream);
    for (const float sum : mine.read<float>(reduced.to(), Reduced::shard)) ASSERT_EQ(sum, 258);
  }));
}

}  // namespace
}  // namespace fsdp::transport::test
