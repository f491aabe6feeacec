// SPDX-License-Identifier: Apache-2.0
// Tests the promises of every transport (transport/collectives.h) about bytes and bits. A new transport is a new row in
// collectives_rig.h.
#include "collectives_bodies.h"

namespace fsdp::transport::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Transports, Conformance, testing::ValuesIn(transports),
                         [](const auto &info) { return std::string(info.param.name); });

TEST_P(Conformance, GathersPartsOfAnyLength) {
  for (const uint32_t size : {1, 3})
    run(size, [](Rig &rig) {
      for (const bool stable : {false, true})
        for (const bool in_place : {false, true}) check_gathers(rig, stable, in_place, 10 * stable + 100 * in_place);
    });
}

TEST_P(Conformance, BroadcastsFromEachRank) {
  run(3, [](Rig &rig) {
    for (uint32_t root = 0; root < rig.size(); ++root)
      for (const uint64_t bytes : {1, 40'001}) {
        const Block data = rig.block(bytes);
        for (uint64_t i = 0; i < bytes; ++i) data.own[i] = rig.me() == root ? byte_of(root, i, bytes) : std::byte{0};
        rig.finish(rig.collectives->broadcast(data.at(), bytes, root, {1, "shown"}, *rig.stream));
        for (uint64_t i = 0; i < bytes; ++i) require_byte(data.own[i], byte_of(root, i, bytes), "a broadcast", i);
        rig.rank.meet();
      }
    const Error error = error_of([&] {
      rig.collectives->broadcast(rig.block(64).at(), 1, rig.size(), {1, "of nobody"}, *rig.stream);
    });
    require(error.message.find("broadcast from rank 3 of 3") != std::string::npos, error.message);
  });
}

TEST_P(Conformance, SumsItsSliceInRankOrder) {
  for (const uint32_t size : {1, 2, 4})
    run(size, [](Rig &rig) {
      for (const uint64_t slice : {0, 1, 257, 9001})
        for (const bool accumulate : {false, true}) check_sum(rig, {}, slice * rig.size(), false, accumulate);
    });
}

// Without arenas a slice may be shorter, or empty.
TEST_P(Conformance, SumsEverywhere) {
  run(3, [](Rig &rig) {
    for (const uint64_t count : {3, 2001, 30'000, 60'000}) {  // shared memory sums the first ranks at once
      check_sum(rig, {}, count, true, false);
      if (!rig.plain()) check_sum(rig, {.factor = 0.5F}, count, true, true);
      if (rig.plain()) check_sum(rig, {}, count + 1, true, false);
    }
    if (rig.plain()) check_sum(rig, {}, 1, true, false);
  });
}

TEST_P(Conformance, SumsOfABorrowedStreamHaveTheRightBits) {
  run(3, [](Rig &rig) {
    for (const uint64_t slice : {257, 9001})
      for (const bool everywhere : {false, true}) {
        Summing one(rig, {}, 3 * slice, everywhere);
        one.fill(rig);
        Ticket ticket;
        {
          const device::BorrowedStream borrowed(*rig.stream);
          ticket = rig.collectives->sum({&one.sum, 1}, false, {1, "borrowed"}, *rig.stream);
        }
        rig.finish(ticket);
        one.check(rig, false);
        rig.rank.meet();
      }
  });
}

// Rank 0 comes first, and does not wait for rank 1. Rank 1 sees that rank 0 has come, and does its sum itself. The
// exceptions are a sum everywhere and in place, which waits twice, and sums by messages.
TEST_P(Conformance, ALatePeerMakesTheCallerGiveTheStreamBack) {
  run(2, [](Rig &rig) {
    if (rig.transport.on_gpu) return;
    for (const bool in_place : {false, true}) {
      Summing one(rig, {}, 2 * 257, in_place, in_place ? Target::in_place : Target::elsewhere);
      one.fill(rig);
      Ticket ticket;
      const auto call = [&] {
        const device::BorrowedStream borrowed(*rig.stream);
        require(rig.stream->is_borrowed(), "the stream is not borrowed");
        ticket = rig.collectives->sum({&one.sum, 1}, false, {1, "late"}, *rig.stream);
        const bool here = rig.me() == 1 && !in_place && !rig.plain();
        require(rig.stream->is_borrowed() == here, "the sum is done by the wrong thread");
        if (here) one.check(rig, false);
      };
      if (rig.me() == 0) call();
      rig.rank.meet();
      if (rig.me() == 1) call();
      rig.finish(ticket);
      one.check(rig, false);
      rig.rank.meet();
    }
  });
}

// The engine sums in this way if gradients stay in their place.
TEST_P(Conformance, SumsInPlaceHaveTheRightBits) {
  run(3, [](Rig &rig) {
    for (const uint64_t slice : {256, 9004})
      for (const float factor : {1.0F, 0.5F})
        for (const bool everywhere : {false, true})
          if (!rig.plain() || factor == 1.0F)
            check_sum(rig, {.factor = factor}, 3 * slice, everywhere, false, Target::in_place);
  });
}

TEST_P(Conformance, RoundsToWhatTravelsAndScales) {
  run(3, [](Rig &rig) {
    if (rig.plain()) return;
    for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16})
      for (const fsdp_dtype wire : {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16})
        for (const bool everywhere : {false, true})
          check_sum(rig, {dtype, wire, 0.5F}, 3 * 700, everywhere, !everywhere);
  });
}

TEST_P(Conformance, ManySumsAreOneCall) {
  run(3, [](Rig &rig) {
    std::vector<Summing> all;
    std::vector<Sum> sums;
    for (const uint64_t slice : {5, 0, 4000, 1, 333}) {
      all.emplace_back(rig, Addends(), 3 * slice, false);
      all.back().fill(rig);
      sums.push_back(all.back().sum);
    }
    rig.finish(rig.collectives->sum(sums, true, {1, "many"}, *rig.stream));
    for (const Summing &one : all) one.check(rig, true);
    rig.finish(rig.collectives->sum({}, false, {1, "none"}, *rig.stream));
    rig.finish(rig.collectives->gather({}, {1, "none"}, *rig.stream));
  });
}

// A rank sends its addends of the other ranks' slices. If all ranks get the sum, it also sends the sum of its own slice
// to them. Where ranks read each other's memory, nothing is sent. Slots of 16 KiB are short calls over TCP, in which a
// rank sends all of its addends to each other rank.
TEST_P(Conformance, CountsWhatItsRankSends) {
  run(3, [](Rig &rig) {
    const bool sends = rig.plain() || rig.transport.nccl;
    const uint64_t slack = rig.transport.nccl ? 0 : 64;  // chunks are cut into three parts each, with integer division
    uint64_t sent = rig.collectives->sent_bytes();
    const auto require_sent = [&](const char *what, uint64_t slices) {
      const uint64_t wanted = sends ? slices * 4000 * sizeof(float) : 0;
      const uint64_t now = rig.collectives->sent_bytes();
      require(now - sent + slack >= wanted && now - sent <= wanted + slack,
              fmt::format("{}: {} bytes and not {}", what, now - sent, wanted));
      sent = now;
    };
    check_sum(rig, {}, 12'000, false, false);
    require_sent("a sum of slices", 2);
    check_sum(rig, {}, 12'000, true, false);
    const bool by_short_calls = rig.transport.over_net && rig.transport.on_gpu && !over_ucx();
    require_sent("a sum everywhere", by_short_calls ? 6 : 4);
    std::vector<Summing> two;
    std::vector<Sum> sums;
    for (int i = 0; i < 2; ++i) {
      two.emplace_back(rig, Addends(), 12'000, false);
      two.back().fill(rig);
      sums.push_back(two.back().sum);
    }
    rig.finish(rig.collectives->sum(sums, false, {1, "two"}, *rig.stream));
    require_sent("two sums in one call", 4);
  });
}

TEST_P(Conformance, RefusesSumsThatItsShapeHasNot) {
  run(2, [](Rig &rig) {
    const auto refused = [&](const std::vector<Sum> &sums, bool accumulate, const char *text) {
      const Error error = error_of([&] {
        rig.collectives->sum(sums, accumulate, {1, "refused"}, *rig.stream);
        rig.finish();
      });
      require(error.status == FSDP_INTERNAL && error.message.find(text) != std::string::npos, error.message);
    };
    const Summing one(rig, {}, 64, false), whole(rig, {}, 64, true);
    Sum odd = one.sum;
    odd.count = 63;
    refused({odd}, false, "no equal slices of 2 ranks");
    refused({one.sum, whole.sum}, false, "everywhere and to their ranks alone");
    if (!rig.plain()) {
      Sum hidden = one.sum, unread = whole.sum;
      hidden.from = Part::alone(one.from.own);
      unread.to = Part::alone(whole.result.own);
      refused({hidden}, false, "no other rank reads");
      refused({unread}, false, "no other rank reads");
      return;
    }
    Sum scaled = one.sum, narrow = one.sum, moved = whole.sum;
    scaled.factor = 2;
    narrow.wire = FSDP_BFLOAT16;
    moved.to = one.result.at();
    refused({scaled}, false, "float32 sent as float32, times 2");
    refused({narrow}, false, "float32 sent as bfloat16");
    refused({moved}, false, "not in place");
    refused({whole.sum}, true, "not in place");
  });
}

}  // namespace
}  // namespace fsdp::transport::test
