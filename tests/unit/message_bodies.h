// SPDX-License-Identifier: Apache-2.0
// The work of ranks in the tests of messages over every transport. Every collective is compared with a plain loop that
// adds in the order of collectives.h.
#pragma once

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "shm_ranks.h"

namespace fsdp::transport::test {

// The sent memory is declared before this object, because a failing rank unwinds while its stream may still read that
// memory.
struct MessageBench {
  MessageBench(Rank &rank, std::unique_ptr<Collectives> made)
      : rank(rank), communicator(std::move(made)), stream(rank.device->create_stream("messages")) {}
  explicit MessageBench(Rank &rank)
      : MessageBench(rank, rank.team->create_collectives("messages", Shape::messages())) {}
  void finish() { rank.synchronize(*stream); }
  Rank &rank;
  std::unique_ptr<Collectives> communicator;
  std::unique_ptr<device::Stream> stream;
};

// These values give a sum that depends on the order of the additions.
FSDP_TEST_ALONE inline float rough_value(uint32_t rank, uint64_t i, uint64_t salt) {
  uint64_t bits = (salt * 1009 + rank) * 0x9e3779b97f4a7c15 + i * 0xbf58476d1ce4e5b9;
  bits = (bits ^ bits >> 29) * 0x94d049bb133111eb;
  bits ^= bits >> 31;
  return static_cast<float>(static_cast<int32_t>(bits >> 32)) * (bits & 1 ? 1e-9F : 3e-5F);
}

FSDP_TEST_ALONE inline void fill_rough(float *values, uint32_t rank, uint64_t count, uint64_t salt) {
  for (uint64_t i = 0; i < count; ++i) values[i] = rough_value(rank, i, salt);
}

inline std::vector<float> rough_values(uint32_t rank, uint64_t count, uint64_t salt) {
  std::vector<float> values(count);
  fill_rough(values.data(), rank, count, salt);
  return values;
}

inline void require_same(const float *found, const float *wanted, uint64_t count, const std::string &what) {
  if (count == 0 || std::memcmp(found, wanted, count * sizeof(float)) == 0) return;
  for (uint64_t i = 0; i < count; ++i)
    require(std::memcmp(found + i, wanted + i, sizeof(float)) == 0,
            fmt::format("{}: element {} of {} is {}, not {}", what, i, count, found[i], wanted[i]));
}

// Computes the sums in rank order, for the elements from `first` on.
FSDP_TEST_ALONE inline void add_in_rank_order(float *to, uint64_t count, uint32_t size, uint64_t first, uint64_t salt,
                                              bool accumulate) {
  for (uint32_t r = 0; r < size; ++r)
    for (uint64_t i = 0; i < count; ++i) {
      const float value = rough_value(r, first + i, salt);
      to[i] = r == 0 && !accumulate ? value : to[i] + value;
    }
}
inline void add_in_rank_order(std::vector<float> &to, uint32_t size, uint64_t first, uint64_t salt, bool accumulate) {
  add_in_rank_order(to.data(), to.size(), size, first, salt, accumulate);
}

inline void check_message_all_reduce(MessageBench &bench, std::vector<uint64_t> counts, uint64_t salt) {
  const uint32_t me = bench.rank.rank(), size = bench.rank.size();
  std::vector<std::vector<float>> values;
  std::vector<Sum> spans;
  for (const uint64_t count : counts) {
    values.push_back(rough_values(me, count, salt + spans.size()));
    values.back().push_back(7.0F);
    spans.push_back(everywhere_in_place(values.back().data(), count));
  }
  bench.communicator->sum(spans, false, {static_cast<uint32_t>(salt), "summed"}, *bench.stream);
  bench.finish();
  for (uint64_t s = 0; s < counts.size(); ++s) {
    std::vector<float> want(counts[s]);
    add_in_rank_order(want, size, 0, salt + s, false);
    require_same(values[s].data(), want.data(), counts[s], "all_reduce");
    require(values[s].back() == 7.0F, "all_reduce wrote past its end");
  }
}

enum class Into { other, other_accumulating, own_slice };

inline void check_message_reduce_scatter(MessageBench &bench, uint64_t count, Into into, uint64_t salt) {
  const uint32_t me = bench.rank.rank(), size = bench.rank.size();
  std::vector<float> values = rough_values(me, count * size, salt);
  const std::vector<float> before = values;
  std::vector<float> want = rough_values(me + 100, count, salt), result = want;
  result.push_back(7.0F);
  add_in_rank_order(want, size, me * count, salt, into == Into::other_accumulating);
  float *to = into == Into::own_slice ? values.data() + me * count : result.data();
  const Sum span = slice_sum(Part::alone(values.data()), count, size, to);
  bench.communicator->sum(std::span(&span, 1), into == Into::other_accumulating,
                          {static_cast<uint32_t>(salt), "sliced"}, *bench.stream);
  bench.finish();
  require_same(to, want.data(), count, "reduce_scatter");
  require(result.back() == 7.0F, "reduce_scatter wrote past its end");
  const uint64_t changed = into == Into::own_slice ? count : 0;
  require_same(values.data(), before.data(), me * count, "what reduce_scatter was given, before its slice");
  require_same(values.data() + me * count + changed, before.data() + me * count + changed,
               (size - me) * count - changed, "what reduce_scatter was given, after its slice");
}

FSDP_TEST_ALONE inline void fill_bytes(std::byte *to, uint64_t count, uint32_t rank, uint64_t salt) {
  for (uint64_t i = 0; i < count; ++i) to[i] = static_cast<std::byte>((i * 2654435761 >> 7) + rank * 31 + salt);
}
inline std::vector<std::byte> bytes_of(uint32_t rank, uint64_t count, uint64_t salt) {
  std::vector<std::byte> bytes(count);
  fill_bytes(bytes.data(), count, rank, salt);
  return bytes;
}

inline void check_message_all_gather(MessageBench &bench, std::vector<uint64_t> lengths, uint64_t salt) {
  const uint32_t me = bench.rank.rank(), size = bench.rank.size();
  std::vector<std::vector<std::byte>> wholes;
  std::vector<Gather> spans;
  for (const uint64_t bytes : lengths) {
    wholes.emplace_back(bytes * size + 1, std::byte{77});
    fill_bytes(wholes.back().data() + me * bytes, bytes, me, salt);
    spans.push_back(in_place(wholes.back().data(), bytes, me));
  }
  bench.communicator->gather(spans, {static_cast<uint32_t>(salt), "gathered"}, *bench.stream);
  bench.finish();
  for (uint64_t s = 0; s < lengths.size(); ++s) {
    for (uint32_t r = 0; r < size; ++r)
      require_same_bytes(wholes[s].data() + r * lengths[s], bytes_of(r, lengths[s], salt).data(), lengths[s],
                         fmt::format("all_gather of rank {}", r));
    require(wholes[s].back() == std::byte{77}, "all_gather wrote past its end");
  }
}

inline void check_message_broadcast(MessageBench &bench, uint64_t bytes, uint32_t root, uint64_t salt) {
  std::vector<std::byte> data(bytes + 1, std::byte{77});
  if (bench.rank.rank() == root) fill_bytes(data.data(), bytes, root, salt);
  bench.communicator->broadcast(Part::alone(data.data()), bytes, root, {static_cast<uint32_t>(salt), "sent to all"},
                                *bench.stream);
  bench.finish();
  require_same_bytes(data.data(), bytes_of(root, bytes, salt).data(), bytes, "broadcast");
  require(data.back() == std::byte{77}, "broadcast wrote past its end");
}

// Runs all collectives, with counts below, at and above the chunks, and counts that no number of ranks divides.
inline void check_messages(MessageBench &bench, uint64_t salt, std::vector<uint64_t> counts) {
  for (const uint64_t count : counts) {
    check_message_all_reduce(bench, {count}, ++salt);
    for (const Into into : {Into::other, Into::other_accumulating, Into::own_slice})
      check_message_reduce_scatter(bench, count, into, ++salt);
    check_message_all_gather(bench, {count * 3}, ++salt);
    for (uint32_t root = 0; root < bench.rank.size(); root += 3) check_message_broadcast(bench, count, root, ++salt);
    bench.communicator->barrier({1, "between"}, *bench.stream);
  }
  check_message_all_reduce(bench, counts, ++salt);
  check_message_all_gather(bench, counts, ++salt);
  bench.finish();
}

inline const std::vector<uint64_t> odd_counts = {0, 1, 3, 7, 64, 1001, 65'537, 150'001};

inline void end_round(MessageBench &bench) {
  bench.communicator->quiesce();
  bench.finish();
  bench.rank.meet();
  bench.communicator->next_round();
  bench.rank.meet();
}

// One of three ranks abandons a round while its own tasks are in the middle of a long call, at a point that differs
// from round to round. The next round finds all ranks at the same step and gives right sums.
inline void abandon_in_the_middle(MessageBench &bench, uint32_t rounds, std::chrono::microseconds longer) {
  Rank &rank = bench.rank;
  std::vector<float> values(1'000'000, 1.0F);
  const Sum span = everywhere_in_place(values.data(), values.size());
  for (uint32_t round = 0; round < rounds; ++round) {
    const bool quitter = rank.rank() == round % 3;
    for (int i = 0; i < (quitter ? 2 : 3); ++i)
      bench.communicator->sum(std::span(&span, 1), false, {1, "long"}, *bench.stream);
    if (quitter) {
      std::this_thread::sleep_for(longer * round);
      bench.communicator->abandon();
    } else {
      bench.communicator->quiesce();
    }
    bench.finish();
    const auto broken = bench.communicator->broken();
    if (!quitter)
      require(broken && broken->status == FSDP_INVALID_STATE && broken->rank == static_cast<int32_t>(round % 3),
              broken ? broken->message : "not broken");
    require(!rank.failure.failed(), "the context failed");
    rank.meet();
    bench.communicator->next_round();
    rank.meet();
    check_messages(bench, 50 + round, {10'003});
    end_round(bench);
  }
}

}  // namespace fsdp::transport::test
