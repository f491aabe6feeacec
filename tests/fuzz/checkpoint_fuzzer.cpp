// SPDX-License-Identifier: Apache-2.0
// Fuzzes the parsers of a checkpoint's files. Any bytes are either read or refused with the file's name. Parsed data is
// written and read again, and must stay the same. The first byte chooses the parser. At the end each parser has read
// some inputs.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/shard_file.h"

namespace {

using namespace fsdp::checkpoint;

uint64_t inputs;
std::array<uint64_t, 5> understood;  // counted by parser

// Judges only long runs: a single input that is played again shows too little.
void look_back() {
  for (size_t i = 0; inputs > 10'000 && i < understood.size(); ++i)
    if (!understood[i]) {
      std::fprintf(stderr, "checkpoint_fuzzer: parser %zu has read none of %llu inputs\n", i,
                   static_cast<unsigned long long>(inputs));
      std::_Exit(1);
    }
}

void require(bool is) {
  if (!is) std::abort();
}

// Reads a whole file: length, JSON, data.
void read_file(std::string_view file) {
  std::array<std::byte, length_bytes> first{};
  if (file.size() < length_bytes) throw fsdp::Error(FSDP_INVALID_ARGUMENT, "fuzzed: too short");
  std::memcpy(first.data(), file.data(), length_bytes);
  const uint64_t length = read_header_length(first, file.size(), "fuzzed");
  SafetensorsHeader header = parse_header(file.substr(length_bytes, length), file.size(), "fuzzed");
  require(header.data_offset + header.data_bytes() == file.size());
  for (const StoredTensor &tensor : header.tensors) require(tensor.begin <= tensor.end && tensor.end <= file.size());
  const SafetensorsHeader read = header;
  const bool writable = std::ranges::all_of(read.tensors, [](const StoredTensor &one) { return is_known(*one.type); });
  if (!writable) return;  // files of other libraries have types that the library never writes
  const std::string text = write_header(header, 64);
  const SafetensorsHeader again =
      parse_header(std::string_view(text).substr(length_bytes), text.size() + header.data_bytes(), "again");
  require(again.tensors == read.tensors && again.metadata == read.metadata);
  const auto offsets = saved_offsets(read, "fuzzed");
  require(offsets.size() == read.tensors.size());
  (void)read_sums(read, "fuzzed");
}

void read_json(std::string_view json) {
  const uint64_t data_bytes = json.size() / 2;
  (void)parse_header(json, length_bytes + json.size() + data_bytes, "fuzzed");
}

// Appends the checksum with which a manifest must end, because random bytes would never match it.
void read_manifest(std::string_view text) {
  text = text.substr(0, text.find_last_of('}'));
  const Manifest manifest = parse_manifest(std::string(text) + ",\n\"sum\":\"" + long_sum_of(text) + "\"}\n", "fuzzed");
  require(parse_manifest(write_manifest(manifest), "again") == manifest);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size) {
  if (!inputs++) std::atexit(look_back);
  if (!size) return 0;
  const std::string_view bytes(reinterpret_cast<const char *>(data) + 1, size - 1);
  try {
    switch (data[0] % 5) {
      case 0: read_file(bytes); break;
      case 1: read_json(bytes); break;
      case 2: read_manifest(bytes); break;
      case 3: (void)parse_weight_index(bytes, "fuzzed"); break;
      default: (void)parse_sums(bytes, bytes.size() / 16, "fuzzed");
    }
    ++understood[data[0] % 5];
  } catch (const fsdp::Error &error) {
    require(error.message.starts_with("fuzzed: "));
  }
  return 0;
}
