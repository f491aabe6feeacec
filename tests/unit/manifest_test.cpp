// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/format/manifest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/format/json_document.h"
#include "checkpoint/format/shard_file.h"

namespace fsdp::checkpoint {
namespace {

const std::string some_sum = "0123456789abcdef0123456789abcdef";

// Two ranks have 32 and 64 rows of "w". "v" has two parts of tensor parallelism, and there is a scalar.
Manifest small() {
  Manifest manifest{.sequence = 3,
                    .step = 1200,
                    .ranks = 2,
                    .models = {{"", "2 ranks", 0xab}, {"other", "1 rank", 0xcd}},
                    .files = {},
                    .tensors = {},
                    .bytes = {},
                    .keys = {{"run", "a \"b\""}}};
  manifest.files = {{"shard-00001-model-00001-of-00001.safetensors", 8192, some_sum},
                    {"shard-00002-model-00001-of-00001.safetensors", 12288, some_sum},
                    {"optimizer/0000/shard-00001.safetensors", 0, some_sum}};
  ManifestTensor w{"w", find_element_type("F32"), {96, 32}, {{whole(std::vector<uint64_t>{96, 32}), {}}}};
  w.parts[0].add_rows(0, 32);
  w.parts[0].add_rows(1, 64);
  ManifestTensor v{
      "v", find_element_type("BF16"), {4, 6}, {{{{0, 0}, {4, 2}}, {{0, 1, 4}}}, {{{0, 2}, {4, 4}}, {{0, 2, 2}}}}};
  ManifestTensor s{"state.\xc3\xa4.step", find_element_type("F64"), {}, {{{{}, {}}, {{2, 1, 1}}}}};
  v.model = 1;
  manifest.tensors = {w, v, s};
  manifest.bytes = {{"bytes.rng.00001", find_element_type("U8"), {5}, {{{{0}, {5}}, {{2, 1, 5}}}}}};
  return manifest;
}

TEST(Manifest, IsReadAsItWasWritten) {
  EXPECT_EQ(parse_manifest(write_manifest(small()), "m"), small());
  Manifest partial = small();  // parts of its tensor that one model has saved
  partial.tensors[1].parts.pop_back();
  EXPECT_EQ(parse_manifest(write_manifest(partial), "m"), partial);
  const Manifest nothing;
  EXPECT_EQ(parse_manifest(write_manifest(nothing), "m"), nothing);
}

// In a stack of 3 matrices [4, 2], ranks have cut the second matrix after its first row, and the third in the middle.
Manifest stacked() {
  Manifest manifest = small();
  manifest.tensors[0] = {"w",
                         find_element_type("F32"),
                         {3, 4, 2},
                         {{{{0, 0, 0}, {1, 4, 2}}, {{0, 1, 1}}, 0},
                          {{{1, 0, 0}, {1, 4, 2}}, {{0, 1, 1}, {1, 1, 3}}, 1},
                          {{{2, 0, 0}, {1, 4, 2}}, {{0, 2, 2}}, 1}}};
  return manifest;
}

// Older releases read version 1, and would mistake the rows of such parts for rows of the first dimension.
TEST(Manifest, IsOfVersion2IfRanksHaveCutMatricesOfAStack) {
  EXPECT_EQ(parse_manifest(write_manifest(stacked()), "m"), stacked());
  EXPECT_NE(write_manifest(stacked()).find("\"version\":2,"), std::string::npos);
  EXPECT_NE(write_manifest(small()).find("\"version\":1,"), std::string::npos);
}

TEST(Manifest, RefusesAnAxisThatIsNotThePartsOwn) {
  for (const auto &[from, to, wrong] :
       {std::tuple{"\"axis\":1", "\"axis\":2", "an axis whose preceding dimensions all have size 1 in the part"},
        std::tuple{"\"axis\":1", "\"axis\":3", "an axis whose preceding dimensions all have size 1 in the part"},
        std::tuple{"\"axis\":1", "\"axis\":0", "an axis whose preceding dimensions all have size 1 in the part"},
        std::tuple{",\"axis\":1", "", "cuts of all 1 rows"}}) {
    std::string text = write_manifest(stacked());
    text.replace(text.find(from), std::string_view(from).size(), to);
    try {
      parse_manifest(text, "m");
      ADD_FAILURE() << to << " was read";
    } catch (const Error &error) {
      EXPECT_NE(error.message.find(wrong), std::string::npos) << error.message;
    }
  }
}

TEST(Manifest, RowsThatRanksCutAlikeAreOneRun) {
  ManifestPart part;
  part.add_rows(4, 10);
  part.add_rows(5, 10);
  part.add_rows(6, 10);
  part.add_rows(7, 3);
  part.add_rows(9, 3);  // it is not the next file
  EXPECT_EQ(part.cuts, (std::vector<RowCut>{{4, 3, 10}, {7, 1, 3}, {9, 1, 3}}));
}

// Every second rank of a model has a mesh of its own.
TEST(Manifest, RowsInFilesAtEqualDistancesAreOneRun) {
  ManifestPart part;
  part.add_rows(0, 10);
  for (uint32_t i = 0; i < 9; ++i) part.add_rows(3 + 2 * i, 5);
  for (uint32_t i = 0; i < 7; ++i) part.add_rows(30 + 2 * i, 5);
  ManifestPart joined = part;
  joined.join_cuts();
  std::vector<RowCut> wanted{{0, 1, 10}, {3, 9, 5, 2}};
  for (uint32_t i = 0; i < 7; ++i) wanted.push_back({30 + 2 * i, 1, 5});  // these are too few to join
  EXPECT_EQ(joined.cuts, wanted);
  for (uint32_t i = 0; i < 9; ++i) EXPECT_EQ(joined.cuts[1].file(i), part.cuts[1 + i].first_file);
  ManifestPart more{{}, {{1, 10, 1, 2}}};
  more.add_rows(11, 1);
  EXPECT_EQ(more.cuts, (std::vector<RowCut>{{1, 10, 1, 2}, {11, 1, 1}})) << "11 is not behind 19";
}

// Cuts stay as they are if one of them has other rows or several files, or if files are not consecutive.
TEST(Manifest, OtherCutsAreNotJoined) {
  const auto expect_kept = [](const std::function<RowCut(uint32_t)> &cut) {
    ManifestPart part;
    for (uint32_t i = 0; i < 8; ++i) part.cuts.push_back(cut(i));
    ManifestPart joined = part;
    joined.join_cuts();
    EXPECT_EQ(joined.cuts, part.cuts);
  };
  expect_kept([](uint32_t i) { return RowCut{3 * i, 1, i == 4 ? 6u : 5u}; });
  expect_kept([](uint32_t i) { return RowCut{3 * i, i == 4 ? 2u : 1u, 5}; });
  expect_kept([](uint32_t i) { return RowCut{3 * i, i == 0 ? 2u : 1u, 5}; });
  expect_kept([](uint32_t i) { return RowCut{30 - 3 * i, 1, 5}; });
  expect_kept([](uint32_t) { return RowCut{7, 1, 5}; });
}

Manifest with_distances() {
  Manifest manifest = small();
  manifest.files.clear();
  for (int i = 0; i < 20; ++i)
    manifest.files.push_back({"file" + std::to_string(i), 1, "0123456789abcdef0123456789abcdef"});
  manifest.tensors = {{"w", find_element_type("F32"), {10}, {{{{0}, {10}}, {{1, 10, 1, 2}}}}}};
  manifest.bytes.clear();
  return manifest;
}

// Older releases would treat them as adjacent.
TEST(Manifest, HasVersion3IfFilesAreAtDistances) {
  const std::string text = write_manifest(with_distances());
  EXPECT_NE(text.find("\"version\":3,"), std::string::npos);
  EXPECT_NE(text.find("\"cuts\":[[1,10,1,2]]"), std::string::npos);
  EXPECT_EQ(parse_manifest(text, "m"), with_distances());
  for (const char *cut : {"[2,10,1,2]", "[1,10,1,0]", "[1,10,1,3]", "[1,21,1,1]", "[20,1,10]", "[21,1,10]",
                          "[0,9223372036854775809,1,2]", "[0,1,10,21]", "[1,10,1,2,2]"}) {
    std::string wrong = text;
    wrong.replace(wrong.find("[1,10,1,2]"), 10, cut);
    const auto error = capture_error([&] { parse_manifest(wrong, "m"); });
    ASSERT_TRUE(error);
    EXPECT_NE(error->message.find("/tensors/0/parts/0/cuts/0"), std::string::npos) << error->message;
  }
}

// Changes one thing in the text of a good manifest.
struct Damage {
  const char *name, *from, *to, *text;
};

void PrintTo(const Damage &what, std::ostream *out) { *out << what.name; }

class Damages : public testing::TestWithParam<Damage> {};

TEST_P(Damages, AreRefused) {
  std::string text = write_manifest(small());
  const size_t at = text.find(GetParam().from);
  ASSERT_NE(at, std::string::npos);
  text.replace(at, std::string_view(GetParam().from).size(), GetParam().to);
  try {
    parse_manifest(text, "here/checkpoint.json");
    FAIL() << "it was read";
  } catch (const Error &error) {
    EXPECT_EQ(error.message.find("here/checkpoint.json: "), 0u);
    EXPECT_NE(error.message.find(GetParam().text), std::string::npos) << error.message;
  }
}

const Damage damages[] = {
    {"format", "libfsdp checkpoint", "another one", "/format is \"another one\", not \"libfsdp checkpoint\""},
    {"version", "\"version\":1", "\"version\":2", "not the sum of what stands before it"},
    {"missing", "\"step\":1200,", "", "/step is missing"},
    {"twice", "\"step\":1200,", "\"step\":1,\"step\":2,", "\"step\" comes twice"},
    {"negative", "\"step\":1200", "\"step\":-1200", "/step is -1200"},
    {"ranks", "\"ranks\":2", "\"ranks\":4294967296", "not a number of 32 bits"},
    {"cut_off", ",\n\"sum\":", "", "ends being JSON"},
    {"other_number", "\"step\":1200", "\"step\":1201", "not the sum of what stands before it"},
    {"other_name", "\"name\":\"v\"", "\"name\":\"u\"", "not the sum of what stands before it"},
    {"path_up", "optimizer/0000/shard", "optimizer/../shard",
     "/files/2/0 is \"optimizer/../shard-00001.safetensors\", not the name of a file"},
    {"absolute", "optimizer/0000/shard", "/ptimizer/0000/shard", "not the name of a file"},
    {"hidden", "optimizer/0000/shard", ".ptimizer/0000/shard", "not the name of a file"},
    {"deep", "optimizer/0000/shard", "o/t/m/zer/0000/shard", "not the name of a file"},
    {"slash_at_end", "shard-00002-model-00001-of-00001.safetensors", "shard/", "not the name of a file"},
    {"nul_in_name", "shard-00002", "shard\\u0000", "not the name of a file"},
    {"same_file", "shard-00002", "shard-00001", "once"},
    {"sum", "0123456789abcdef0123456789abcdef", "0123456789ABCDEF0123456789abcdef", "a sum of 32 hexadecimal digits"},
    {"short_sum", "0123456789abcdef0123456789abcdef", "0123456789abcdef", "a sum of 32 hexadecimal digits"},
    {"file_fields", ",8192,", ",", "[name, bytes, sum]"},
    {"hash", "00000000000000ab", "00000000000000xb", "a hash of 16 hexadecimal digits"},
    {"type", "\"BF16\"", "\"BF17\"", "/tensors/1/dtype is \"BF17\", not an element type"},
    {"same_tensor", "\"name\":\"v\"", "\"name\":\"w\"", "once"},
    {"rows_missing", "[1,1,64]", "[1,1,63]", "/tensors/0/parts/0/cuts is [[0,1,32],[1,1,63]], not cuts of all 96 rows"},
    {"rows_too_many", "[1,1,64]", "[1,1,65]", "cuts of all 96 rows"},
    {"rows_overflow", "[1,1,64]", "[0,2,9223372036854775808]", "not rows that 64 bits can count"},
    {"no_such_file", "[1,1,64]", "[3,1,64]", "within 3 files"},
    {"no_such_files", "[1,1,64]", "[2,2,32]", "within 3 files"},
    {"no_files", "[1,1,64]", "[1,0,64]", "within 3 files"},
    {"cut_numbers", "[1,1,64]", "[1,1,64,1,0]", "an array of at most 4 numbers"},
    {"overlap", "\"offset\":[0,2],\"shape\":[4,4]", "\"offset\":[0,1],\"shape\":[4,4]", "parts that do not overlap"},
    {"outside", "\"offset\":[0,2],\"shape\":[4,4]", "\"offset\":[0,3],\"shape\":[4,4]", "a part of its tensor"},
    {"part_missing", "\"offset\":[0,2],\"shape\":[4,4]", "\"offset\":[0,2],\"shape\":[4,3]",
     "parts that fill the tensor"},
    {"part_not_missing", "\"cuts\":[[0,2,2]]}]", "\"cuts\":[[0,2,2]]}],\"partial\":true",
     "not parts that lack some of the tensor"},
    {"bytes_missing", "\"cuts\":[[2,1,5]]}]", "\"cuts\":[[2,1,5]]}],\"partial\":true", "/bytes/0"},
    {"empty_part", "\"parts\":[{\"offset\":[0,0],\"shape\":[4,2]",
     "\"parts\":[{\"offset\":[0,0],\"shape\":[0,2],\"cuts\":[]},{\"offset\":[0,0],\"shape\":[4,2]",
     "not a part that is not empty"},
    {"other_dimensions", "\"offset\":[0,2],\"shape\":[4,4]", "\"offset\":[0],\"shape\":[4]", "a part of its tensor"},
    {"shape_overflows", "\"shape\":[4,6],", "\"shape\":[4294967296,4294967296],",
     "not a shape whose elements 64 bits can count"},
    {"no_such_model", "\"model\":1}", "\"model\":2}", "/tensors/1/model is 2, not one of 2 models"},
    {"bytes_of_floats", "\"dtype\":\"U8\"", "\"dtype\":\"F32\"", "/bytes/0 is"},
    {"key", "\"keys\":{\"run\":", "\"keys\":{\"run\":1,\"r\":", "/keys/run is 1, not a text"}};

INSTANTIATE_TEST_SUITE_P(Manifest, Damages, testing::ValuesIn(damages),
                         [](const auto &info) { return std::string(info.param.name); });

std::string with_version(const std::string &version) {
  std::string text = write_manifest(small());
  text.replace(text.find("\"version\":1") + 10, 1, version);
  const size_t end = text.find(",\n\"sum\"");
  return text.substr(0, end) + ",\n\"sum\":\"" + long_sum_of(text.substr(0, end)) + "\"}\n";
}

TEST(Manifest, OfANewerReleaseIsToldSo) {
  for (const char *known : {"1", "2", "3"}) EXPECT_EQ(parse_manifest(with_version(known), "m"), small());
  try {
    parse_manifest(with_version("4"), "m");
    FAIL() << "it was read";
  } catch (const Error &error) {
    EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
    EXPECT_EQ(error.message, "m: it is of version 4 of the format; this release reads versions 1 to 3");
  }
}

// A flipped bit in the version is reported as damage, and not as a newer release.
TEST(Manifest, WithAnyFlippedBitIsDamaged) {
  const std::string text = write_manifest(small());
  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    fsdp_status status = FSDP_OK;
    try {
      parse_manifest(flipped, "m");
    } catch (const Error &error) {
      status = error.status;
    }
    ASSERT_EQ(status, FSDP_INVALID_ARGUMENT) << "bit " << bit % 8 << " of byte " << bit / 8;
  }
}

TEST(Manifest, SequenceIsFoundInADamagedOne) {
  std::string text = write_manifest(small());
  EXPECT_EQ(find_sequence(text), 3u);
  EXPECT_EQ(find_sequence(text.substr(0, 60)), 3u);
  EXPECT_EQ(find_sequence("{\"sequence\":3"), std::nullopt);  // the text may go on
  EXPECT_EQ(find_sequence("{\"sequence\":x,"), std::nullopt);
  EXPECT_EQ(find_sequence(""), std::nullopt);
  EXPECT_TRUE(ends_as_manifest(text));
  EXPECT_FALSE(ends_as_manifest(text.substr(0, text.size() - 1)));
}

// There are 10,000 tensors on 16,384 ranks, and each rank has a part of each group of ten. Runs describe a rank's parts
// of a tensor, so that most of the text is one line for each file. Times under a sanitizer mean nothing, so the test
// then has a tenth of the tensors and measures nothing.
TEST(Manifest, StaysSmallOnManyRanks) {
#ifdef __SANITIZE_ADDRESS__
  constexpr bool measured = false;
#else
  constexpr bool measured = true;
#endif
  constexpr uint32_t ranks = 16'384, tensors = measured ? 10'000 : 1'000;
  Manifest manifest{
      .sequence = 1, .step = 1, .ranks = ranks, .models = {}, .files = {}, .tensors = {}, .bytes = {}, .keys = {}};
  for (const char *kind : {"", "optimizer/0000/"})
    for (uint32_t r = 0; r < ranks; ++r)
      manifest.files.push_back(
          {format_text("{}shard-{:05}-model-00001-of-00001.safetensors", kind, r + 1), 1 << 30, some_sum});
  for (uint32_t t = 0; t < tensors; ++t)
    for (const char *name :
         {"model.layers.{}.weight", "state.model.layers.{}.exp_avg", "state.model.layers.{}.exp_avg_sq"}) {
      // Takes a tenth of the ranks, with a short piece at either end.
      const uint32_t first = t % 10 * 1638, rows = 4 * 1636 + 3;
      ManifestPart part{whole(std::vector<uint64_t>{rows, 4096}), {}};
      const uint32_t files = *name == 's' ? ranks : 0;
      part.add_rows(files + first, 1);
      for (uint32_t r = 1; r < 1637; ++r) part.add_rows(files + first + r, 4);
      part.add_rows(files + first + 1637, 2);
      manifest.tensors.push_back({format_text(fmt::runtime(name), t), find_element_type("F32"), {rows, 4096}, {part}});
    }
  const std::string text = write_manifest(manifest);
  EXPECT_LE(text.size(), uint64_t{64} << 20);
  EXPECT_EQ(parse_manifest(text, "m"), manifest);
  if (!measured) return;
  // Compares with parsing the same text as plain JSON in this process, because absolute times depend on the machine.
  const auto best_of = [](const auto &body) {
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
      const auto start = std::chrono::steady_clock::now();
      body();
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
  };
  const double ours = best_of([&] { EXPECT_EQ(parse_manifest(text, "m").tensors.size(), 3 * tensors); });
  const double bare = best_of([&] { EXPECT_EQ(nlohmann::json::parse(text)["tensors"].size(), 3 * tensors); });
  fmt::print("{:.1f} MiB, read in {:.2f} s, as JSON alone in {:.2f} s\n", static_cast<double>(text.size()) / (1 << 20),
             ours, bare);
  EXPECT_LE(ours, 6 * bare);
}

TEST(BlockSums, AreOfEachBlockWhateverThePieces) {
  std::vector<std::byte> data((5 << 18) / 2 + 17);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 2654435761U >> 13);
  const std::span<const std::byte> bytes = data;
  const std::vector<uint64_t> wanted{sum_of(bytes.first(1 << 18)), sum_of(bytes.subspan(1 << 18, 1 << 18)),
                                     sum_of(bytes.subspan(2 << 18))};
  EXPECT_EQ(block_count(data.size()), 3u);
  for (const size_t piece : {size_t{1000}, size_t{1} << 18, size_t{4096}, data.size()}) {
    BlockSums sums;
    for (size_t at = 0; at < data.size(); at += piece) sums.add(bytes.subspan(at, std::min(piece, data.size() - at)));
    EXPECT_EQ(sums.finish(), wanted) << piece;
    EXPECT_TRUE(sums.finish().empty());
  }
  EXPECT_EQ(block_count(0), 0u);
}

// xxHash's own tests have this value: it is XXH3 of no bytes.
TEST(BlockSums, SumsAreThoseOfXxh3) {
  EXPECT_EQ(sum_of({}), 0x2D06800538D394C2U);
  EXPECT_EQ(long_sum_of(""), "99aa06d3014798d86001c324468d497f");
}

TEST(BlockSums, TextIsOfOneLength) {
  const std::vector<uint64_t> sums{0, UINT64_MAX, 0xab};
  EXPECT_EQ(format_sums(sums), "0000000000000000ffffffffffffffff00000000000000ab");
  EXPECT_EQ(parse_sums(format_sums(sums), 3, "f"), sums);
  EXPECT_THROW(parse_sums(format_sums(sums), 2, "f"), Error);
  EXPECT_THROW(parse_sums("00000000000000x0", 1, "f"), Error);
  EXPECT_THROW(parse_sums("-000000000000010", 1, "f"), Error);
}

}  // namespace
}  // namespace fsdp::checkpoint
