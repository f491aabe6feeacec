// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/format/safetensors.h"

#include <gtest/gtest.h>

#include <random>

#include "base/error.h"

namespace fsdp::checkpoint {
namespace {

constexpr const char *a_file = "some.safetensors";

SafetensorsHeader parse(std::string_view json, uint64_t data_bytes) {
  return parse_header(json, length_bytes + json.size() + data_bytes, a_file);
}

std::string refusal(std::string_view json, uint64_t data_bytes) {
  try {
    parse(json, data_bytes);
  } catch (const Error &error) {
    EXPECT_EQ(error.status, FSDP_INVALID_ARGUMENT);
    EXPECT_EQ(error.message.find(std::string(a_file) + ": "), 0u) << error.message;
    return error.message;
  }
  return "";
}

struct Refused {
  const char *name, *json;
  uint64_t data_bytes;
  const char *text;
};

void PrintTo(const Refused &what, std::ostream *out) { *out << what.name; }

class Refusals : public testing::TestWithParam<Refused> {};

TEST_P(Refusals, NameWhatIsWrong) {
  const Refused &what = GetParam();
  EXPECT_NE(refusal(what.json, what.data_bytes).find(what.text), std::string::npos)
      << refusal(what.json, what.data_bytes);
}

// The safetensors library itself refuses these.
const Refused refused[] = {
    {"overlap",
     R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", 6,
     "tensor \"b\" begins at byte 2 and not where that before it ends, at 4"},
    {"hole",
     R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}})", 6,
     "begins at byte 4"},
    {"hole_in_front", R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3, "begins at byte 1"},
    {"trailing_bytes", R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 3,
     "2 bytes of data, and it has 3: it is longer"},
    {"truncated", R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1,
     "2 bytes of data, and it has 1: it is cut off"},
    {"duplicate",
     R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0,
     "\"a\" comes twice"},
    {"duplicate_field", R"({"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0,
     "\"dtype\" comes twice"},
    {"negative", R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[-2,0]}})", 0, "/a/data_offsets/0 is -2, not"},
    {"float", R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2.0]}})", 2, "/a/data_offsets/1 is 2.0, not"},
    {"float_shape", R"({"a":{"dtype":"U8","shape":[2e0],"data_offsets":[0,2]}})", 2, "/a/shape/0 is 2.0, not"},
    {"too_large", R"({"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,2]}})", 2, "/a/shape/0 is"},
    {"backwards", R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}})", 0, "where data begins and ends"},
    {"one_offset", R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[2]}})", 2, "where data begins and ends"},
    {"three_offsets", R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1,2]}})", 2, "an array of at most 2 numbers"},
    {"wrong_size", R"({"a":{"dtype":"F32","shape":[3,2],"data_offsets":[0,20]}})", 20,
     "\"a\" has 20 bytes of data, but its shape [3, 2] of F32 makes 24"},
    {"product_overflows", R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
     "makes no size"},
    {"bits_overflow", R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0,
     "makes no size"},
    {"half_a_byte", R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1, "makes no size"},
    {"type", R"({"a":{"dtype":99,"shape":[2],"data_offsets":[0,2]}})", 2, "/a/dtype is 99, not a text"},
    {"hole_behind_unknown_type",
     R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})", 4,
     "begins at byte 3"},
    {"no_type", R"({"a":{"shape":[2],"data_offsets":[0,2]}})", 2, "/a/dtype is missing"},
    {"no_shape", R"({"a":{"dtype":"U8","data_offsets":[0,2]}})", 2, "/a/shape is missing"},
    {"no_offsets", R"({"a":{"dtype":"U8","shape":[2]}})", 2, "/a/data_offsets is missing"},
    {"no_object", R"({"a":7})", 0, "/a is 7, not an object"},
    {"an_array", "[]", 0, "not an object"},
    {"a_number", "3", 0, "not an object"},
    {"nothing", "", 0, "its JSON ends being JSON at byte"},
    {"spaces", "   ", 0, "its JSON ends being JSON at byte"},
    {"two_values", "{}{}", 0, "its JSON ends being JSON at byte"},
    {"nested_metadata", R"({"__metadata__":{"a":{"b":"c"}}})", 0, "/__metadata__/a is {\"b\":\"c\"}, not a text"},
    {"metadata_number", R"({"__metadata__":{"a":1}})", 0, "/__metadata__/a is 1, not a text"},
    {"metadata_array", R"({"__metadata__":[]})", 0, "/__metadata__ is [], not an object"},
    {"deep", R"({"a":[[[[[[]]]]]]})", 0, "nested deeper than 4"},
    {"no_utf8", "{\"\xff\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
     "its JSON ends being JSON at byte 3"},
    {"surrogate", R"({"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, "its JSON ends being JSON"},
    {"dimensions", R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1,
     "an array of at most 16 numbers"}};

INSTANTIATE_TEST_SUITE_P(Headers, Refusals, testing::ValuesIn(refused),
                         [](const auto &info) { return std::string(info.param.name); });

TEST(Safetensors, NulsBehindTheJsonAreRefused) {
  EXPECT_NE(refusal(std::string_view("{}\0\0", 4), 0).find("its JSON ends being JSON at byte 2"), std::string::npos)
      << refusal(std::string_view("{}\0\0", 4), 0);
}

TEST(Safetensors, OddButLegalFilesAreRead) {
  EXPECT_TRUE(parse("{}", 0).tensors.empty());
  EXPECT_TRUE(parse(R"({"__metadata__":null})", 0).metadata.empty());
  const SafetensorsHeader spaces = parse(" \n{\"a\":{\"dtype\":\"I8\",\"shape\":[3],\"data_offsets\":[0,3]}}  \t", 3);
  EXPECT_EQ(spaces.tensors[0].shape, std::vector<uint64_t>{3});
  EXPECT_EQ(spaces.data_offset, length_bytes + 58);
  // There are a scalar, empty tensors between others, data in another order than the header, and a field of a later
  // release.
  const SafetensorsHeader odd =
      parse(R"({"z":{"dtype":"F64","shape":[],"data_offsets":[4,12],"later":[1]},)"
            R"("e":{"dtype":"F32","shape":[0,5],"data_offsets":[4,4]},)"
            R"("":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]},"__metadata__":{"format":"pt"}})",
            12);
  ASSERT_EQ(odd.tensors.size(), 3u);
  EXPECT_EQ(odd.tensors[0].name, "");
  EXPECT_EQ(odd.tensors[1].name, "e");
  EXPECT_EQ(odd.tensors[1].shape, (std::vector<uint64_t>{0, 5}));
  EXPECT_EQ(odd.tensors[2].name, "z");
  EXPECT_TRUE(odd.tensors[2].shape.empty());
  EXPECT_EQ(odd.tensors[2].type->bits, 64u);
  EXPECT_EQ(odd.metadata.at("format"), "pt");
  EXPECT_EQ(odd.find("e"), &odd.tensors[1]);
  EXPECT_EQ(odd.find("f"), nullptr);
}

// Only the use of an unknown type can be refused, so the type's name is kept for that.
TEST(Safetensors, TensorsOfUnknownTypesHaveTheirBytes) {
  const SafetensorsHeader header = parse(
      R"({"a":{"dtype":"F99","shape":[7],"data_offsets":[0,5]},"b":{"dtype":"U8","shape":[2],"data_offsets":[5,7]}})",
      7);
  EXPECT_FALSE(is_known(*header.tensors[0].type));
  EXPECT_EQ(header.tensors[0].unknown_type, "F99");
  EXPECT_TRUE(is_known(*header.tensors[1].type));
  EXPECT_EQ(header.tensors[1].begin, 5u);
}

TEST(Safetensors, LengthsAreCheckedBeforeAnythingIsRead) {
  const auto length = [](uint64_t length, uint64_t file_bytes) -> std::string {
    std::array<std::byte, length_bytes> first;
    for (size_t i = 0; i < length_bytes; ++i) first[i] = static_cast<std::byte>(length >> (8 * i));
    try {
      return std::to_string(read_header_length(first, file_bytes, a_file));
    } catch (const Error &error) {
      return error.message;
    }
  };
  EXPECT_EQ(length(2, 10), "2");
  EXPECT_EQ(length(258, 266), "258");
  EXPECT_NE(length(3, 10).find("its header has 3 bytes, but the file ends after 10"), std::string::npos);
  EXPECT_NE(length(0, 7).find("the file ends after 7"), std::string::npos);
  EXPECT_NE(length(uint64_t{1} << 63, 1000).find("it is no safetensors file"), std::string::npos);
  EXPECT_NE(length(UINT64_MAX, 1000).find("it is no safetensors file"), std::string::npos);
  EXPECT_NE(length(100'000'001, 200'000'000).find("of at most 100000000"), std::string::npos);
  EXPECT_EQ(length(100'000'000, 200'000'000), "100000000");
}

// These are the bytes in the format's description.
TEST(Safetensors, WritesTheseBytes) {
  SafetensorsHeader header;
  header.tensors = {{"b\"", find_element_type("F32"), {2, 3}}, {"a", find_element_type("BF16"), {}}};
  header.metadata = {{"format", "pt"}, {"DCP_VERSION", "1.0"}};
  place_tensors(header);
  const std::string bytes = write_header(header, 256);
  const std::string json = R"({"__metadata__":{"DCP_VERSION":"1.0","format":"pt"},)"
                           R"("b\"":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                           R"("a":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}})";
  EXPECT_EQ(bytes.substr(8), json + std::string(256 - 8 - json.size(), ' '));
  EXPECT_EQ(bytes.substr(0, 8), std::string("\xf8\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(header.data_offset, 256u);
  EXPECT_EQ(header.data_bytes(), 26u);
}

TEST(Safetensors, ReadsWhatItWrites) {
  std::minstd_rand random(3);
  for (int trial = 0; trial < 200; ++trial) {
    SafetensorsHeader header;
    for (uint64_t i = random() % 8; i-- > 0;) {
      StoredTensor tensor{"t" + std::to_string(i) + "\n\\\"\xc3\xa4", &element_types[random() % 19], {}};
      for (uint64_t d = random() % 4; d-- > 0;) tensor.shape.push_back(1 + random() % 5);
      header.tensors.push_back(tensor);
    }
    if (random() % 2) header.metadata["k\t\x01"] = "v\"" + std::to_string(trial);
    place_tensors(header);
    const std::string bytes = write_header(header, 4096);
    ASSERT_EQ(bytes.size() % 4096, 0u);
    const SafetensorsHeader read = parse(std::string_view(bytes).substr(8), header.data_bytes());
    EXPECT_EQ(read.tensors, header.tensors);
    EXPECT_EQ(read.metadata, header.metadata);
    EXPECT_EQ(read.data_offset, header.data_offset);
  }
}

TEST(Safetensors, SizesThatOverflowAreNotPlaced) {
  SafetensorsHeader header;
  header.tensors = {{"a", find_element_type("U8"), {uint64_t{1} << 32, uint64_t{1} << 32}}};
  EXPECT_THROW(place_tensors(header), Error);
  const StoredTensor large{"a", find_element_type("U8"), {uint64_t{1} << 60}};
  header.tensors.assign(15, large);
  EXPECT_NO_THROW(place_tensors(header));
  header.tensors.push_back(large);  // the last byte's number would be 2^64
  EXPECT_THROW(place_tensors(header), Error);
}

}  // namespace
}  // namespace fsdp::checkpoint
