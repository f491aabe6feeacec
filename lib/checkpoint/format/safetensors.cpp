// SPDX-License-Identifier: Apache-2.0

#include "checkpoint/format/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/checked.h"
#include "base/text.h"
#include "checkpoint/format/box.h"
#include "checkpoint/format/json_document.h"

static_assert(std::endian::native == std::endian::little);

namespace fsdp::checkpoint {
namespace {

constexpr const char *metadata_name = "__metadata__";
// Without this limit, the values of a 100 MB header could take a hundred times its size in memory.
constexpr uint64_t max_values = 4'000'000;

// Returns nothing if the sizes exceed 64 bits or the last byte is not full.
std::optional<uint64_t> bytes_of(const ElementType &type, std::span<const uint64_t> shape) {
  uint64_t count = 1;
  for (const uint64_t size : shape)
    if (__builtin_mul_overflow(count, size, &count)) return std::nullopt;
  return stored_bytes(type, count);
}

StoredTensor parse_tensor(const std::string &name, const JsonValue &value) {
  StoredTensor tensor{.name = name, .shape = {}};
  tensor.type = find_element_type(value["dtype"].text());
  if (!tensor.type) tensor.type = &unknown_element_type, tensor.unknown_type = value["dtype"].text();
  tensor.shape = value["shape"].unsigned_numbers(max_dimensions);
  const std::vector<uint64_t> offsets = value["data_offsets"].unsigned_numbers(2);
  value["data_offsets"].require(offsets.size() == 2 && offsets[0] <= offsets[1], "where data begins and ends");
  tensor.begin = offsets[0], tensor.end = offsets[1];
  return tensor;
}

void check_bytes(const StoredTensor &tensor, std::string_view file) {
  if (!is_known(*tensor.type)) return;
  const std::optional<uint64_t> bytes = bytes_of(*tensor.type, tensor.shape);
  if (!bytes || *bytes != tensor.end - tensor.begin)
    refuse_file(file, "tensor {} has {} bytes of data, but its shape [{}] of {} makes {}", quote_json(tensor.name),
                tensor.end - tensor.begin, fmt::join(tensor.shape, ", "), tensor.type->name,
                bytes ? std::to_string(*bytes) : "no size");
}

// Checks that the tensors' data is contiguous, from the first byte to the last.
void check_places(const SafetensorsHeader &header, uint64_t file_bytes, std::string_view file) {
  uint64_t at = 0;
  for (const StoredTensor &tensor : header.tensors) {
    if (tensor.begin != at)
      refuse_file(file, "the data of tensor {} begins at byte {} and not where that before it ends, at {}",
                  quote_json(tensor.name), tensor.begin, at);
    check_bytes(tensor, file);
    at = tensor.end;
  }
  if (const uint64_t has = file_bytes - header.data_offset; has != at)
    refuse_file(file, "its header speaks of {} bytes of data, and it has {}: it is {}", at, has,
                has < at ? "cut off" : "longer than it should be");
}

void append_tensor(std::string &text, const StoredTensor &tensor) {
  text += format_text(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", quote_json(tensor.name),
                      tensor.type->name, fmt::join(tensor.shape, ","), tensor.begin, tensor.end);
}

}  // namespace

const StoredTensor *SafetensorsHeader::find(std::string_view name) const {
  const auto found = std::ranges::find(tensors, name, &StoredTensor::name);
  return found == tensors.end() ? nullptr : &*found;
}

uint64_t read_header_length(std::span<const std::byte, length_bytes> first, uint64_t file_bytes,
                            std::string_view file) {
  uint64_t length = 0;
  std::memcpy(&length, first.data(), length_bytes);
  if (length > longest_header)
    refuse_file(file, "its header would have {} bytes, of at most {}: it is no safetensors file", length,
                longest_header);
  if (file_bytes < length_bytes || length > file_bytes - length_bytes)
    refuse_file(file, "its header has {} bytes, but the file ends after {}", length, file_bytes);
  return length;
}

SafetensorsHeader parse_header(std::string_view json, uint64_t file_bytes, std::string_view file) {
  const nlohmann::json document = parse_json(json, file, {.depth = 4, .values = max_values});
  SafetensorsHeader header;
  header.data_offset = length_bytes + json.size();
  JsonValue(document, file).for_each_member([&](const std::string &name, const JsonValue &value) {
    if (name != metadata_name) return header.tensors.push_back(parse_tensor(name, value));
    if (value.is_null()) return;
    value.for_each_member([&](const std::string &key, const JsonValue &text) { header.metadata[key] = text.text(); });
  });
  // An empty tensor comes before a tensor that begins at the same byte.
  std::ranges::sort(header.tensors, {}, [](const StoredTensor &t) { return std::tie(t.begin, t.end, t.name); });
  check_places(header, file_bytes, file);
  return header;
}

void place_tensors(SafetensorsHeader &header) {
  uint64_t at = 0;
  for (StoredTensor &tensor : header.tensors) {
    const std::optional<uint64_t> bytes = bytes_of(*tensor.type, tensor.shape);
    if (!bytes) fail(FSDP_INVALID_ARGUMENT, "tensor {}: its size exceeds 64 bits", quote_json(tensor.name));
    tensor.begin = at;
    tensor.end = at = checked_add(at, *bytes, "bytes of a file");
  }
}

std::string write_header(SafetensorsHeader &header, uint64_t alignment) {
  std::string text = format_text("{{\"{}\":{{", metadata_name);
  for (const auto &[key, value] : header.metadata)
    text += format_text("{}{}:{}", text.ends_with('{') ? "" : ",", quote_json(key), quote_json(value));
  text += '}';
  for (const StoredTensor &tensor : header.tensors) text += ',', append_tensor(text, tensor);
  text += '}';
  header.data_offset = round_up(length_bytes + text.size(), alignment, "bytes of a header");
  text.resize(header.data_offset - length_bytes, ' ');
  if (text.size() > longest_header)
    fail(FSDP_UNSUPPORTED, "a file's header would have {} bytes, of at most {}", text.size(), longest_header);
  const uint64_t length = text.size();
  std::string bytes(length_bytes, '\0');
  std::memcpy(bytes.data(), &length, length_bytes);
  return bytes + text;
}

}  // namespace fsdp::checkpoint

namespace fsdp::checkpoint {

std::map<std::string, std::string> parse_weight_index(std::string_view text, std::string_view file) {
  const nlohmann::json document = parse_json(text, file, {.depth = 8, .values = 4'000'000});
  std::map<std::string, std::string> files;
  JsonValue(document, file)["weight_map"].for_each_member([&](const std::string &name, const JsonValue &value) {
    value.require(is_inner_path(value.text()), "the path of a file inside this folder");
    files[name] = value.text();
  });
  return files;
}

}  // namespace fsdp::checkpoint
