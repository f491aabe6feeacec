// SPDX-License-Identifier: Apache-2.0
// The ranks' work in the tests of shared memory communication. Every collective is compared with a plain computation of
// it.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "../library_threads.h"
#include "base/checked.h"
#include "base/dtype.h"
#include "device/host/kernels.h"
#include "shm_ranks.h"

namespace fsdp::transport::test {

// Counts everything of that kind that this process holds, because a job must give it back.
struct Holdings {
  size_t files = entries("/proc/self/fd"), threads = fsdp::test::library_threads();
  size_t mappings = shared_mappings();

  std::string text() const {
    return fmt::format("{} descriptors, {} threads, {} shared mappings", files, threads, mappings);
  }
  // A thread that was joined is still listed for a moment.
  static Holdings await(const Holdings &wanted) {
    Holdings found;
    for (int tries = 0; found.text() != wanted.text() && tries < 5000; ++tries, found = Holdings())
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return found;
  }
  static Holdings without_threads() {
    fsdp::test::await_library_threads(0);
    return {};
  }
  static size_t entries(const char *path) {
    const std::filesystem::directory_iterator folder(path);
    return static_cast<size_t>(std::distance(begin(folder), end(folder)));
  }
  static size_t shared_mappings() {
    std::ifstream maps("/proc/self/maps");
    size_t count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("memfd:fsdp") != std::string::npos;
    return count;
  }
};

// The values are small whole numbers, so that their sums are exact in every dtype.
FSDP_TEST_ALONE inline float value_of(uint32_t rank, uint64_t i, uint64_t salt) {
  return static_cast<float>((rank * 7 + i * 3 + salt) % 17) - 5.0F;
}

// Makes one arena in which every rank has `stride` bytes.
struct Stripes {
  Stripes(Rank &rank, uint64_t stride_bytes, const std::string &what) : stride(stride_bytes) {
    const Range own{rank.rank() * stride, stride};
    me = rank.rank();
    arena = rank.team->create_arena(stride * rank.size(), std::span(&own, 1), what);
    mine = arena->writable() + own.offset;
  }
  Part at(uint64_t offset) const { return Part::in(*arena, offset, stride, me); }
  uint64_t stride;
  uint32_t me;
  std::unique_ptr<Arena> arena;
  std::byte *mine;
};

struct Bench {
  explicit Bench(Rank &rank, uint64_t stride = 1 << 18)
      : rank(rank),
        in(rank, stride, "inputs"),
        out(rank, stride, "outputs"),
        communicator(rank.team->create_collectives("test collectives")),
        stream(rank.device->create_stream("test")) {}
  void finish(Ticket ticket) {
    communicator->await_release(ticket, *stream);
    rank.synchronize(*stream);
  }
  Rank &rank;
  Stripes in, out;
  std::unique_ptr<Collectives> communicator;
  std::unique_ptr<device::Stream> stream;
};

FSDP_TEST_ALONE inline void fill_floats(float *to, uint64_t count, uint32_t rank, uint64_t salt) {
  for (uint64_t i = 0; i < count; ++i) to[i] = value_of(rank, i, salt);
}
inline void fill_values(std::byte *to, fsdp_dtype dtype, uint64_t count, uint32_t rank, uint64_t salt) {
  std::vector<float> values(count);
  fill_floats(values.data(), count, rank, salt);
  if (count) device::kernels::cast(to, dtype, values.data(), FSDP_FLOAT32, count);
}

// Stores the sums of elements from `first` on, added to `before`.
FSDP_TEST_ALONE inline void fill_sums(float *to, uint64_t count, uint32_t size, uint64_t first, uint64_t salt,
                                      float factor, float before) {
  for (uint64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (uint32_t r = 0; r < size; ++r) sum += value_of(r, first + i, salt);
    to[i] = sum * factor + before;
  }
}
inline void require_sums(const float *found, uint64_t count, uint32_t size, uint64_t first, uint64_t salt, float factor,
                         float before, const std::string &what) {
  std::vector<float> wanted(count);
  fill_sums(wanted.data(), count, size, first, salt, factor, before);
  for (uint64_t i = 0; i < count; ++i)
    if (found[i] != wanted[i])
      throw std::runtime_error(fmt::format("{}: element {} is {}, not {}", what, i, found[i], wanted[i]));
}

FSDP_TEST_ALONE inline void fill_multiples(std::byte *to, uint64_t count, uint64_t factor, uint64_t salt) {
  for (uint64_t i = 0; i < count; ++i) to[i] = static_cast<std::byte>(i * factor + salt);
}

// The value is the same on every rank.
struct Lengths {
  explicit Lengths(uint64_t seed) : random(seed) {}
  uint64_t operator()(uint64_t most) { return random() % 4 == 0 ? random() % 3 : random() % (most + 1); }
  std::mt19937_64 random;
};

inline void check_reduce_scatter(Bench &bench, uint64_t seed, fsdp_dtype dtype) {
  Lengths lengths(seed);
  const uint32_t size = bench.rank.size(), me = bench.rank.rank();
  const uint64_t span_count = 1 + seed % 5;
  std::vector<Sum> spans;
  std::vector<std::vector<float>> results;
  uint64_t offset = 0;
  const bool accumulate = seed % 2;
  for (uint64_t s = 0; s < span_count; ++s) {
    const uint64_t count = lengths(1500);
    fill_values(bench.in.mine + offset, dtype, count * size, me, seed + s);
    results.emplace_back(count + 1, 1.0F);
    spans.push_back(slice_sum(bench.in.at(offset), dtype, FSDP_FLOAT32, count, size, results.back().data(), 0.5F));
    offset += round_up(count * size * 4, 128);
  }
  bench.finish(bench.communicator->sum(spans, accumulate, {static_cast<uint32_t>(seed), "reduced"}, *bench.stream));
  for (uint64_t s = 0; s < span_count; ++s) {
    const uint64_t count = spans[s].count / size;
    require_sums(results[s].data(), count, size, me * count, seed + s, 0.5F, accumulate ? 1.0F : 0.0F,
                 fmt::format("reduce_scatter, span {}", s));
    require(results[s][count] == 1.0F, "reduce_scatter wrote past its end");
  }
}

inline void check_all_gather(Bench &bench, uint64_t seed, bool stable) {
  Lengths lengths(seed);
  const uint32_t size = bench.rank.size(), me = bench.rank.rank();
  std::vector<Gather> spans;
  std::vector<std::vector<std::byte>> results;
  uint64_t offset = 0;
  for (uint64_t s = 0; s < 1 + seed % 7; ++s) {
    const uint64_t count = lengths(2000);
    fill_values(bench.in.mine + offset, FSDP_BFLOAT16, count, me, seed + s);
    results.emplace_back(count * 2 * size + 1);
    spans.push_back({bench.in.at(offset), results.back().data(), count * 2});
    offset += round_up(count * 2, 128);
  }
  const Tag tag{static_cast<uint32_t>(seed), "gathered"};
  if (stable) {
    bench.rank.meet();
    bench.communicator->gather_stable(spans, tag, *bench.stream);
    bench.rank.synchronize(*bench.stream);
    bench.rank.meet();
  } else {
    bench.finish(bench.communicator->gather(spans, tag, *bench.stream));
  }
  for (uint64_t s = 0; s < spans.size(); ++s)
    for (uint32_t r = 0; r < size; ++r) {
      std::vector<std::byte> want(spans[s].bytes);
      fill_values(want.data(), FSDP_BFLOAT16, want.size() / 2, r, seed + s);
      require(!want.size() || !std::memcmp(want.data(), results[s].data() + r * want.size(), want.size()),
              fmt::format("all_gather: rank {}'s piece of span {} differs", r, s));
    }
}

inline void check_all_reduce(Bench &bench, uint64_t seed) {
  Lengths lengths(seed);
  const uint32_t size = bench.rank.size(), me = bench.rank.rank();
  std::vector<Sum> spans;
  uint64_t offset = 0;
  const bool accumulate = seed % 2;
  for (uint64_t s = 0; s < 1 + seed % 3; ++s) {
    const uint64_t count = lengths(1500);
    fill_values(bench.in.mine + offset, FSDP_FLOAT32, count * size, me, seed + s);
    std::fill_n(reinterpret_cast<float *>(bench.out.mine + offset), count * size, 2.0F);
    spans.push_back(everywhere(bench.in.at(offset), bench.out.at(offset), count * size, 0.25F));
    offset += round_up(count * size * 4, 128);
  }
  bench.finish(bench.communicator->sum(spans, accumulate, {static_cast<uint32_t>(seed), "all-reduced"}, *bench.stream));
  for (uint64_t s = 0; s < spans.size(); ++s)
    require_sums(spans[s].to.floats(), spans[s].count, size, 0, seed + s, 0.25F, accumulate ? 2.0F : 0.0F,
                 fmt::format("all_reduce, span {}", s));
}

inline void check_broadcast(Bench &bench, uint64_t seed) {
  const uint32_t root = static_cast<uint32_t>(seed % bench.rank.size());
  const uint64_t bytes = Lengths(seed)(5000);
  std::vector<std::byte> wanted(bytes);
  fill_multiples(wanted.data(), bytes, 5, seed);
  if (bench.rank.rank() == root) std::copy(wanted.begin(), wanted.end(), bench.in.mine);
  bench.finish(bench.communicator->broadcast(bench.in.at(0), bytes, root, {1, "broadcast"}, *bench.stream));
  require_same_bytes(bench.in.mine, wanted.data(), bytes, "broadcast");
}

inline void check_everything(Bench &bench, uint64_t seed) {
  check_reduce_scatter(bench, seed, FSDP_FLOAT32);
  check_reduce_scatter(bench, seed, FSDP_BFLOAT16);
  check_all_gather(bench, seed, false);
  check_all_gather(bench, seed, true);
  check_all_reduce(bench, seed);
  check_broadcast(bench, seed);
  bench.finish(bench.communicator->barrier({2, "barrier"}, *bench.stream));
}

inline void collectives_body(Rank &rank) {
  {
    Bench bench(rank);
    for (uint64_t seed = 0; seed < 12; ++seed) {
      check_everything(bench, seed);
      if (seed % 3 != 2) continue;
      bench.communicator->quiesce();
      rank.meet();
      bench.communicator->next_round();
      rank.meet();
    }
    require(!bench.communicator->broken(), "broken without a reason");
  }
  rank.leave();
}

inline void exchange_body(Rank &rank) {
  for (const uint64_t base : {0, 1, 100, 32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 200'000}) {
    const auto text = [&](uint32_t r) {
      std::vector<std::byte> bytes(base + r * 1000 * (base > 0));
      fill_multiples(bytes.data(), bytes.size(), 3, r);
      return bytes;
    };
    const auto all = rank.team->all_gather(text(rank.rank()), "lengths");
    require(all.size() == rank.size(), "exchange: number of ranks");
    for (uint32_t r = 0; r < rank.size(); ++r) require(all[r] == text(r), fmt::format("exchange: rank {}'s bytes", r));
    std::vector<std::byte> mine(base), fixed(base * rank.size());
    std::fill(mine.begin(), mine.end(), static_cast<std::byte>(rank.rank() + 1));
    rank.team->all_gather(mine.data(), base, fixed.data(), "fixed");
    std::vector<std::byte> wanted;
    for (uint32_t r = 0; r < rank.size(); ++r) wanted.insert(wanted.end(), base, static_cast<std::byte>(r + 1));
    require_same_bytes(fixed.data(), wanted.data(), wanted.size(), "all_gather");
  }
  rank.leave();
}

inline void versions_body(Rank &rank) {
  auto versions = rank.team->create_versions("versions");
  device::Stream &thread = rank.device->calling_thread();
  Stripes stripes(rank, 4096, "in versions");
  auto *own = reinterpret_cast<uint64_t *>(stripes.mine);
  for (uint64_t version = 1; version <= 300; ++version) {
    *own = version * 100 + rank.rank();
    versions->publish(version, thread);
    versions->await(version, thread, "await of a version");
    require(versions->ready(version), "a version that was awaited is ready");
    for (uint32_t r = 0; r < rank.size(); ++r) {
      uint64_t seen;
      std::memcpy(&seen, stripes.arena->data() + r * stripes.stride, sizeof seen);
      if (seen != version * 100 + r)
        throw std::runtime_error(fmt::format("version {}: rank {} shows {}", version, r, seen));
    }
    rank.meet();  // so that no rank goes on while others still read
  }
  require(!versions->ready(301), "a version that nobody has published");
  rank.leave();
}

}  // namespace fsdp::transport::test
