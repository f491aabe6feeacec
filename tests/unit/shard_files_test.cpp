// SPDX-License-Identifier: Apache-2.0
// Two threads write shards to disk, and ranges of them are read back. A shard is refused if a bit has changed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/fd.h"
#include "checkpoint/files/shard_reader.h"
#include "checkpoint/files/shard_writer.h"
#include "checkpoint_bytes.h"
#include "system_faults.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;
using Numbers = std::vector<uint64_t>;
using namespace test_bytes;
using test::FaultScope;
using Way = test::SystemFault::Way;

Bytes random_bytes(size_t size, uint32_t seed) {
  Bytes bytes(size);
  fill_random(bytes.data(), size, seed);
  return bytes;
}

// A rank saves a box of a tensor with its bytes.
struct Saved {
  ShardTensor tensor;
  Bytes bytes;
};

Saved saved(const std::string &name, const char *type, Box box, uint32_t seed) {
  const ElementType *element = find_element_type(type);
  const size_t size = box.count() * element->bits / 8;
  return {{name, element, std::move(box)}, random_bytes(size, seed)};
}

class Shards : public testing::Test {
 protected:
  Shards() {
    std::string name = "/var/tmp/shard-files-XXXXXX";
    path = ::mkdtemp(name.data());
    folder = Fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  ~Shards() override { fs::remove_all(path); }

  ShardToWrite shard(const std::string &name, const std::vector<Saved> &some) const {
    std::vector<ShardTensor> tensors;
    for (const Saved &one : some) tensors.push_back(one.tensor);
    ShardToWrite shard{Fd(::dup(folder.get())), name, "runs/" + name, plan_shard_file(tensors), {}};
    for (const uint32_t index : shard.file.order)
      shard.rows.push_back([&bytes = some[index].bytes](uint64_t first, std::span<std::byte> to) {
        std::memcpy(to.data(), bytes.data() + first, to.size());
      });
    return shard;
  }
  static std::vector<WrittenShard> write(ShardWriter &writer) {
    std::thread packing([&] { writer.pack([] {}); }), writing([&] { writer.write(); });
    packing.join();
    writing.join();
    return writer.result();
  }
  WrittenShard write(const std::string &name, const std::vector<Saved> &some) const {
    std::vector<ShardToWrite> shards;
    shards.push_back(shard(name, some));
    ShardWriter writer(std::move(shards), Staging::allocate());
    return write(writer).at(0);
  }
  ShardReader reader(const std::string &name) const { return ShardReader(folder.get(), name, "runs/" + name); }

  std::string path;
  Fd folder;
  const AlignedBytes buffer{ShardReader::buffer_bytes};
};

// Returns the part of a tensor's box that the file has.
Bytes read_box(const ShardReader &reader, uint32_t tensor, const Box &box, const Box &to, std::span<std::byte> buffer,
               ShardReader::Counts *counts = nullptr) {
  const size_t element = reader.header().tensors[tensor].type->bits / 8;
  Bytes bytes(to.count() * element);
  const WantedBox wanted{tensor, box, to};
  const auto found = reader.read({&wanted, 1}, buffer, [&](uint32_t, uint64_t at, std::span<const std::byte> elements) {
    std::memcpy(bytes.data() + at * element, elements.data(), elements.size());
  });
  if (counts) *counts = found;
  return bytes;
}

TEST_F(Shards, AreReadAsTheyWereWritten) {
  // The file has several staging blocks, tensors that begin and end inside of them, a scalar and an empty tensor.
  const std::vector<Saved> some{saved("half", "BF16", {{7}, {1'000'003}}, 1),
                                saved("large", "F32", {{32, 0}, {2501, 1000}}, 2), saved("scalar", "F64", {{}, {}}, 3),
                                saved("none", "F32", {{0, 0}, {0, 5}}, 4), saved("more", "F32", {{0}, {3'000'000}}, 5)};
  const WrittenShard written = write("f", some);
  const ShardReader file = reader("f");
  EXPECT_EQ(written.bytes, file.file_bytes());
  EXPECT_EQ(written.header_sum, file.header_sum());
  EXPECT_EQ(file.header().data_offset % 4096, 0u);
  std::vector<std::string> names;
  for (uint32_t i = 0; i < file.header().tensors.size(); ++i) {
    const StoredTensor &tensor = file.header().tensors[i];
    names.push_back(tensor.name);
    const auto &expected = *std::ranges::find(some, tensor.name, [](const Saved &one) { return one.tensor.name; });
    EXPECT_EQ(file.offsets()[i], expected.tensor.box.offset);
    if (expected.bytes.empty()) continue;
    EXPECT_EQ(read_box(file, i, expected.tensor.box, expected.tensor.box, buffer.bytes()), expected.bytes)
        << tensor.name;
  }
  EXPECT_EQ(names, (std::vector<std::string>{"scalar", "large", "none", "more", "half"}));
  EXPECT_EQ(file.verify(buffer.bytes()), file.header().data_bytes());
}

// In the example of the design, three ranks write [96,32] in fp32, and two ranks read it.
TEST_F(Shards, OfThreeRanksAreReadByTwo) {
  const Bytes all = random_bytes(96 * 32 * 4, 1);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    Saved part = saved("w", "F32", {{rank * 32, 0}, {32, 32}}, 0);
    std::memcpy(part.bytes.data(), all.data() + rank * 4096, 4096);
    write(shard_name(rank), {part});
    const ShardReader file = reader(shard_name(rank));
    EXPECT_EQ(file.header().data_bytes(), 4096u);
    EXPECT_EQ(file.offsets(), (std::vector<Numbers>{{rank * 32, 0}}));
    EXPECT_NE(file.header().metadata.at("DCP_SHARDING_INFO").find(format_text("\"saved_offsets\":[{},0]", rank * 32)),
              std::string::npos);
  }
  // Rank 1 of two has rows 48 to 95.
  const Box own{{48, 0}, {48, 32}};
  Bytes bytes(48 * 32 * 4);
  std::vector<ShardReader::Counts> counts;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const ShardReader file = reader(shard_name(rank));
    const std::optional<Box> common = intersect(own, {{rank * 32, 0}, {32, 32}});
    if (!common) continue;
    const WantedBox wanted{0, *common, own};
    const WantedRuns runs(file.header(), file.offsets(), {&wanted, 1});
    runs.for_each([&](const WantedRun &run) { EXPECT_EQ(run.begin, rank == 1 ? 2048u : 0u); });
    counts.push_back(
        file.read({&wanted, 1}, buffer.bytes(), [&](uint32_t, uint64_t at, std::span<const std::byte> elements) {
          std::memcpy(bytes.data() + at * 4, elements.data(), elements.size());
        }));
  }
  EXPECT_EQ(std::memcmp(bytes.data(), all.data() + 48 * 128, bytes.size()), 0);
  ASSERT_EQ(counts.size(), 2u);
  EXPECT_EQ(counts[0].wanted, 2048u);
  EXPECT_EQ(counts[0].read, 4096u);  // includes the block around it
  EXPECT_EQ(counts[1].wanted, 4096u);
  EXPECT_EQ(counts[1].read, 4096u);
}

// Columns of a large tensor are read by their blocks, once each. No other blocks are read.
TEST_F(Shards, AreReadByBlocks) {
  const Saved one = saved("w", "F32", {{0, 0, 0}, {40, 256, 128}}, 1);  // 5 MiB: a row is half a block
  write("f", {one});
  const ShardReader file = reader("f");
  ShardReader::Counts counts;
  const auto expect = [&](const Box &box, uint64_t blocks) {
    const Bytes found = read_box(file, 0, box, box, buffer.bytes(), &counts);
    const RunWalk runs(box, one.tensor.box, box);
    for (uint64_t i = 0; i < runs.run_count(); ++i)
      ASSERT_EQ(std::memcmp(found.data() + runs[i].to * 4, one.bytes.data() + runs[i].from * 4, runs[i].count * 4), 0);
    EXPECT_EQ(counts.wanted, found.size());
    EXPECT_EQ(counts.read, blocks << 18);
  };
  expect({{0, 0, 0}, {40, 256, 128}}, 20);
  expect({{3, 0, 0}, {1, 256, 128}}, 1);
  expect({{3, 0, 0}, {2, 256, 128}}, 2);
  expect({{0, 0, 100}, {40, 256, 1}}, 20);  // a column of each row
  expect({{5, 255, 127}, {30, 1, 1}}, 16);  // one element of each
  expect({{5, 0, 0}, {1, 1, 1}}, 1);
}

// In a file of another program, data begins anywhere, there are no checksums, and elements cross the borders of blocks.
TEST_F(Shards, OfOthersAreReadWhereverTheyBegin) {
  SafetensorsHeader header;
  header.tensors = {{"byte", find_element_type("U8"), {1}}, {"w", find_element_type("F32"), {3'000'001}}};
  place_tensors(header);
  const std::string text = write_header(header, 1);
  const Bytes data = random_bytes(header.data_bytes(), 9);
  std::ofstream(path + "/f", std::ios::binary)
      << text << std::string(reinterpret_cast<const char *>(data.data()), data.size());
  const ShardReader file = reader("f");
  const Box box{{5}, {2'999'990}};
  const Bytes found = read_box(file, 1, box, box, buffer.bytes());
  EXPECT_EQ(std::memcmp(found.data(), data.data() + 1 + 20, found.size()), 0);
}

TEST_F(Shards, ThatLackWhatIsWantedAreRefused) {
  write("f", {saved("w", "F32", {{32, 0}, {32, 8}}, 1)});
  const ShardReader file = reader("f");
  for (const Box &box :
       {Box{{31, 0}, {2, 8}}, Box{{63, 0}, {2, 8}}, Box{{32, 1}, {1, 8}}, Box{{0, 0}, {1, 8}}, Box{{32}, {1}}})
    EXPECT_EQ(message_of([&] {
                read_box(file, 0, box, box, buffer.bytes());
              }).find("runs/f: tensor \"w\" is [32, 8] from [32, 0] on here, and ["),
              0u);
}

// A manifest may list the same rows as two parts. The second part would lie before the rows that were read already.
TEST_F(Shards, AreNotReadTwice) {
  write("f", {saved("w", "F32", {{0, 0}, {1'000'000, 6}}, 1)});
  const ShardReader file = reader("f");
  const Box left{{0, 0}, {1'000'000, 2}}, right{{0, 2}, {1'000'000, 4}};
  const WantedBox wanted[] = {{0, left, left}, {0, right, right}};
  EXPECT_NE(message_of([&] {
              file.read(wanted, buffer.bytes(), [](uint32_t, uint64_t, std::span<const std::byte>) {});
            }).find("runs/f: its bytes from 4104 on are wanted twice"),
            std::string::npos);
}

TEST_F(Shards, HaveEachNameOnce) {
  for (const std::vector<Saved> &some :
       {std::vector{saved("a", "F32", {{0}, {1}}, 1), saved("a", "F32", {{0}, {1}}, 1)},
        std::vector{saved("__metadata__", "F32", {{0}, {1}}, 1)}})
    EXPECT_NE(message_of([&] { write("f", some); }).find("cannot be saved: the name is taken"), std::string::npos);
}

TEST_F(Shards, AreTheSameForTheSameState) {
  const std::vector<Saved> some{saved("a", "F32", {{0}, {5000}}, 1), saved("b", "F16", {{3, 1}, {7, 9}}, 2)};
  const auto text = [&](const std::string &name) {
    std::ifstream file(path + "/" + name, std::ios::binary);
    return std::string{std::istreambuf_iterator<char>(file), {}};
  };
  write("one", some);
  write("two", some);
  EXPECT_EQ(text("one"), text("two"));
  EXPECT_EQ(text("one").size(), 4096 + 20'000 + 126);
}

// Inverts one bit in every 23rd byte of a file, and in every byte of its header. With FSDP_TEST_MANY it takes each
// byte.
TEST_F(Shards, WithAnyBitTurnedAreRefused) {
  const bool many = std::getenv("FSDP_TEST_MANY");
#ifdef __SANITIZE_THREAD__  // the reader has no second thread
  const size_t head = 1, stride = 61;
#else
  const size_t head = 1200, stride = 23;
#endif
  const std::vector<Saved> some{saved("a", "F32", {{0, 0}, {64, 128}}, 1), saved("b", "BF16", {{0}, {1500}}, 2)};
  const WrittenShard written = write("f", some);
  std::string good;
  {
    std::ifstream file(path + "/f", std::ios::binary);
    good.assign(std::istreambuf_iterator<char>(file), {});
  }
  ASSERT_EQ(good.size(), 4096 + 32'768 + 3000);
  std::minstd_rand random(5);
  const Fd file(::open((path + "/f").c_str(), O_WRONLY | O_CLOEXEC));
  for (size_t at = 0; at < good.size(); at += many || at < head ? 1 : stride) {
    const char bad = static_cast<char>(good[at] ^ (1 << random() % 8));
    ASSERT_EQ(::pwrite(file.get(), &bad, 1, static_cast<off_t>(at)), 1);
    const std::string message = message_of([&] {
      const ShardReader damaged = reader("f");
      if (damaged.header_sum() != written.header_sum) fail(FSDP_INVALID_ARGUMENT, "runs/f: its header is another");
      damaged.verify(buffer.bytes());
    });
    EXPECT_EQ(message.find("runs/f: "), 0u) << at << ": " << message;
    if (at >= 4096) {
      const char *name = at < 4096 + 32'768 ? "\"a\"" : "\"b\"";
      EXPECT_NE(message.find(name), std::string::npos) << message;
      EXPECT_NE(message.find("bytes 4096 to 39864"), std::string::npos) << message;
    }
    ASSERT_EQ(::pwrite(file.get(), &good[at], 1, static_cast<off_t>(at)), 1);
  }
  EXPECT_EQ(message_of([&] { reader("f").verify(buffer.bytes()); }), "");
}

// An unwanted part of a damaged file is not read, so its damage is not reported.
TEST_F(Shards, AreDamagedOnlyWhereTheyAreRead) {
  const Saved one = saved("w", "F32", {{0}, {1 << 20}}, 1);
  write("f", {one});
  const uint64_t data = reader("f").header().data_offset;
  std::fstream(path + "/f").seekp(static_cast<std::streamoff>(data + (2 << 20) + 5)).put('\x55').put('\x44');
  const ShardReader file = reader("f");
  const Box before{{0}, {1 << 19}}, around{{0}, {(1 << 19) + 1}};
  EXPECT_EQ(message_of([&] { read_box(file, 0, before, before, buffer.bytes()); }), "");
  EXPECT_NE(message_of([&] {
              read_box(file, 0, around, around, buffer.bytes());
            }).find(format_text("bytes {} to {}, of \"w\", are not", data + (2 << 20), data + (2 << 20) + (1 << 18))),
            std::string::npos);
}

// While a chunk of 4 MiB is taken, the next chunk is read, but no more than that.
TEST_F(Shards, AreReadAChunkAheadOfTheirTaker) {
  const Box all{{0}, {4 << 20}};
  const Saved one = saved("w", "F32", all, 1);
  write("f", {one});
  const ShardReader file = reader("f");
  const FaultScope reads({Way::none, 0, 0, "pread"});
  const WantedBox wanted{0, all, all};
  file.read({&wanted, 1}, buffer.bytes(), [&](uint32_t, uint64_t at, std::span<const std::byte> elements) {
    const int ahead = std::min(static_cast<int>(at * 4 / ShardReader::chunk_bytes) + 2, 4);
    for (int tries = 0; reads.calls() < ahead && tries < 10'000; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(reads.calls(), ahead);
    EXPECT_EQ(std::memcmp(elements.data(), one.bytes.data() + at * 4, elements.size()), 0);
  });
}

// ---- the writer's two threads ----

// The disk is slow. The copying is done as soon as the last blocks have room, and then the source may change.
TEST_F(Shards, MayChangeOnceTheyAreCopied) {
  std::vector<Saved> some{saved("w", "F32", {{0}, {6 << 20}}, 1)};  // 24 MiB, of 32 of staging
  const Bytes before = some[0].bytes;
  std::vector<ShardToWrite> shards;
  shards.push_back(shard("f", some));
  ShardWriter writer(std::move(shards), Staging::allocate());
  std::thread packing([&] { writer.pack([] {}); });
  writer.await_packed(std::chrono::milliseconds(60'000));
  ASSERT_TRUE(writer.is_packed());  // no thread writes yet
  EXPECT_EQ(writer.bytes_written(), 0u);
  std::ranges::fill(some[0].bytes, std::byte{0});
  std::thread writing([&] { writer.write(); });
  packing.join();
  writing.join();
  EXPECT_EQ(writer.result().at(0).bytes, writer.bytes_in_all());
  EXPECT_EQ(writer.bytes_written(), writer.bytes_in_all());
  const Box box{{0}, {6 << 20}};
  EXPECT_EQ(read_box(reader("f"), 0, box, box, buffer.bytes()), before);
}

TEST_F(Shards, NeedNoMoreThanTheirStaging) {
  const std::vector<Saved> some{saved("w", "F32", {{0}, {10 << 20}}, 1)};  // 40 MiB
  std::vector<ShardToWrite> shards;
  shards.push_back(shard("f", some));
  ShardWriter writer(std::move(shards), Staging::allocate());
  std::thread packing([&] { writer.pack([] {}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(writer.is_packed());  // four blocks are full, and no thread empties them
  std::thread writing([&] { writer.write(); });
  packing.join();
  writing.join();
  EXPECT_TRUE(writer.is_packed());
  EXPECT_EQ(reader("f").verify(buffer.bytes()), uint64_t{40} << 20);
}

TEST_F(Shards, ThatCannotBeWrittenNameTheFileAndEndBothThreads) {
  const std::vector<Saved> some{saved("w", "F32", {{0}, {10 << 20}}, 1)};
  int at = 0;
  for (bool happened = true; happened; ++at) {
    std::vector<ShardToWrite> shards;
    shards.push_back(shard(format_text("f{}", at), some));
    ShardWriter writer(std::move(shards), Staging::allocate());
    const FaultScope fault({Way::fails, at, ENOSPC, ""});
    const std::string message = message_of([&] { write(writer); });
    happened = fault.happened();
    if (happened) {
      EXPECT_EQ(message.find(format_text("runs/f{}: ", at)), 0u) << message;
      EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
      EXPECT_TRUE(writer.is_packed());
    } else {
      EXPECT_EQ(message, "");
    }
  }
  EXPECT_GE(at, 10);
}

TEST_F(Shards, ThatAreGivenUpEndBothThreads) {
  const std::vector<Saved> some{saved("w", "F32", {{0}, {10 << 20}}, 1)};
  for (const bool writes : {false, true}) {
    std::vector<ShardToWrite> shards;
    shards.push_back(shard(writes ? "a" : "b", some));
    ShardWriter writer(std::move(shards), Staging::allocate());
    std::thread packing([&] { writer.pack([] {}); }), writing([&] {
      if (writes) writer.write();
    });
    writer.give_up(FSDP_ABORTED, "enough");
    packing.join();
    writing.join();
    EXPECT_EQ(message_of([&] { writer.result(); }), "enough");
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
