// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/format/manifest.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "base/text.h"
#include "checkpoint/format/json_document.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/shard_file.h"

namespace fsdp::checkpoint {
namespace {

constexpr std::string_view sum_name = ",\n\"sum\":\"";  // precedes the checksum of all text before it
constexpr const char *format_name = "libfsdp checkpoint";
constexpr size_t cut_numbers = 3;   // a cut has a fourth number if the numbers of its files are not consecutive
constexpr size_t least_joined = 8;  // shorter runs are not joined, so older releases can read small checkpoints
constexpr size_t max_parts = size_t{1} << 16;
constexpr size_t max_compared = size_t{1} << 23;  // limit for comparisons of two parts

// ---- text ----

template <class Range, class Write>
void append_list(std::string &text, const char *name, const Range &range, Write write) {
  text += format_text("\"{}\":[", name);
  bool first = true;
  for (const auto &value : range) {
    text += first ? "\n" : ",\n";
    first = false;
    write(value);
  }
  text += "]";
}

void append_part(std::string &text, const ManifestPart &part) {
  text += format_text(R"({{"offset":[{}],"shape":[{}],"cuts":[)", fmt::join(part.box.offset, ","),
                      fmt::join(part.box.shape, ","));
  for (const RowCut &cut : part.cuts)
    text += format_text("{}[{},{},{}{}]", text.ends_with('[') ? "" : ",", cut.first_file, cut.files, cut.rows,
                        cut.step > 1 ? format_text(",{}", cut.step) : "");
  text += "]";
  if (part.axis) text += format_text(R"(,"axis":{})", part.axis);
  text += "}";
}

void append_tensor(std::string &text, const ManifestTensor &tensor) {
  text += format_text(R"({{"name":{},"dtype":"{}","shape":[{}],"parts":[)", quote_json(tensor.name), tensor.type->name,
                      fmt::join(tensor.shape, ","));
  for (size_t i = 0; i < tensor.parts.size(); ++i) {
    if (i) text += ',';
    append_part(text, tensor.parts[i]);
  }
  text += "]";
  if (!tensor.filled()) text += R"(,"partial":true)";
  if (tensor.model) text += format_text(R"(,"model":{})", tensor.model);
  text += "}";
}

// ---- values ----

uint32_t number32(const JsonValue &value) {
  const uint64_t number = value.unsigned_number();
  value.require(number <= UINT32_MAX, "a number of 32 bits");
  return static_cast<uint32_t>(number);
}

// A name becomes a path, so it must be a possible name of a checkpoint's file.
bool is_file_name(std::string_view name) {
  for (int folders = 0; folders < 3; ++folders) {
    const size_t slash = name.find('/');
    if (slash == name.npos) return is_plain_name(name);
    if (!is_plain_name(name.substr(0, slash))) return false;
    name.remove_prefix(slash + 1);
  }
  return false;
}

bool is_sum(std::string_view text) {
  return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == text.npos;
}

ManifestFile parse_file(const JsonValue &value) {
  value.require(value.size() == 3, "[name, bytes, sum]");
  ManifestFile file{value.element(0).text(), value.element(1).unsigned_number(), value.element(2).text()};
  value.element(0).require(is_file_name(file.name), "the name of a file in this folder");
  value.element(2).require(is_sum(file.header_sum), "a sum of 32 hexadecimal digits");
  return file;
}

ManifestModel parse_model(const JsonValue &value) {
  ManifestModel model{value["name"].text(), value["description"].text(), 0};
  if (value.has("rounding_seed")) model.rounding_seed = value["rounding_seed"].unsigned_number();
  const std::string &hash = value["layout_hash"].text();
  const auto [end, error] = std::from_chars(hash.data(), hash.data() + hash.size(), model.layout_hash, 16);
  value["layout_hash"].require(hash.size() == 16 && error == std::errc() && end == hash.data() + hash.size(),
                               "a hash of 16 hexadecimal digits");
  return model;
}

RowCut parse_cut(const JsonValue &value, uint64_t files) {
  const std::vector<uint64_t> numbers = value.unsigned_numbers(cut_numbers + 1);
  const uint64_t step = numbers.size() > cut_numbers ? numbers[cut_numbers] : 1;
  value.require(
      numbers.size() >= cut_numbers && numbers[0] < files && numbers[1] > 0 && numbers[1] <= files && step > 0 &&
          step <= files && (numbers[1] - 1) * step < files - numbers[0],
      format_text("[first file, number of files, rows] or [first file, number of files, rows, step], within {} files",
                  files));
  return {static_cast<uint32_t>(numbers[0]), static_cast<uint32_t>(numbers[1]), numbers[2],
          static_cast<uint32_t>(step)};
}

uint32_t parse_axis(const JsonValue &value, const Box &box) {
  const uint32_t axis = number32(value);
  value.require(axis > 0 && axis < box.shape.size() &&
                    std::ranges::all_of(box.shape.begin(), box.shape.begin() + axis, [](uint64_t n) { return n == 1; }),
                "an axis whose preceding dimensions all have size 1 in the part");
  return axis;
}

ManifestPart parse_part(const JsonValue &value, std::span<const uint64_t> shape, uint64_t files) {
  ManifestPart part;
  part.box = {value["offset"].unsigned_numbers(max_dimensions), value["shape"].unsigned_numbers(max_dimensions)};
  bool inside = part.box.offset.size() == shape.size() && part.box.shape.size() == shape.size();
  for (size_t d = 0; inside && d < shape.size(); ++d)
    inside = part.box.offset[d] <= shape[d] && part.box.shape[d] <= shape[d] - part.box.offset[d];
  value.require(inside, "a part of its tensor");
  value.require(part.box.count() > 0 || whole(shape).count() == 0, "a part that is not empty");
  if (value.has("axis")) part.axis = parse_axis(value["axis"], part.box);
  uint64_t rows = 0;
  value["cuts"].for_each_element([&](const JsonValue &cut) {
    part.cuts.push_back(parse_cut(cut, files));
    const RowCut &added = part.cuts.back();
    uint64_t more = 0;
    cut.require(!__builtin_mul_overflow(added.rows, added.files, &more) && !__builtin_add_overflow(rows, more, &rows),
                "rows that 64 bits can count");
  });
  value["cuts"].require(rows == part.rows(), format_text("cuts of all {} rows", part.rows()));
  return part;
}

std::vector<uint64_t> parse_shape(const JsonValue &value) {
  std::vector<uint64_t> shape = value.unsigned_numbers(max_dimensions);
  uint64_t count = 1;
  for (const uint64_t size : shape)
    value.require(!__builtin_mul_overflow(count, size, &count), "a shape whose elements 64 bits can count");
  return shape;
}

void check_overlap(const ManifestTensor &tensor, const JsonValue &value) {
  std::vector<const Box *> boxes;
  for (const ManifestPart &part : tensor.parts) boxes.push_back(&part.box);
  size_t most = max_compared;
  const auto found = find_overlap(boxes, most);
  value.require(!found || found->first, format_text("parts of which at most {} pairs must be compared", max_compared));
  value.require(!found, "parts that do not overlap");
}

// Disjoint parts fill the tensor if together they have its size. If they do not, the manifest must say so.
void check_parts(const ManifestTensor &tensor, const JsonValue &value) {
  const bool partial = value.has("partial");
  const char *const wanted = partial ? "parts that lack some of the tensor" : "parts that fill the tensor";
  uint64_t count = 0;
  for (const ManifestPart &part : tensor.parts)
    value["parts"].require(!__builtin_add_overflow(count, part.box.count(), &count), wanted);
  const uint64_t all = whole(tensor.shape).count();
  value["parts"].require(partial ? count < all : count == all, wanted);
  check_overlap(tensor, value["parts"]);
}

ManifestTensor parse_tensor(const JsonValue &value, const Manifest &manifest) {
  const uint64_t files = manifest.files.size();
  ManifestTensor tensor{
      value["name"].text(), find_element_type(value["dtype"].text()), parse_shape(value["shape"]), {}};
  value["dtype"].require(tensor.type, "an element type that is known");
  value["parts"].require(value["parts"].size() <= max_parts, format_text("at most {} parts", max_parts));
  value["parts"].for_each_element(
      [&](const JsonValue &part) { tensor.parts.push_back(parse_part(part, tensor.shape, files)); });
  check_parts(tensor, value);
  return tensor;
}

template <class Values>
void require_different_names(const Values &values, const JsonValue &list) {
  std::set<std::string_view> names;
  for (const auto &value : values)
    list.require(names.insert(value.name).second, format_text("one with {} once", quote_json(value.name)));
}

// A tensor without a model number belongs to the first model.
uint32_t parse_model_number(const JsonValue &value, size_t models) {
  if (!value.has("model")) return 0;
  const uint32_t model = number32(value["model"]);
  value["model"].require(model < models, format_text("one of {} models", models));
  return model;
}

ManifestTensor parse_bytes(const JsonValue &value, const Manifest &manifest) {
  ManifestTensor tensor = parse_tensor(value, manifest);
  value.require(tensor.shape.size() == 1 && tensor.type == find_element_type("U8") && !value.has("partial"),
                "bytes in one dimension");
  return tensor;
}

Manifest parse_document(const JsonValue &value) {
  Manifest manifest;
  manifest.sequence = value["sequence"].unsigned_number();
  manifest.step = value["step"].unsigned_number();
  manifest.ranks = number32(value["ranks"]);
  value["models"].for_each_element([&](const JsonValue &model) { manifest.models.push_back(parse_model(model)); });
  value["files"].for_each_element([&](const JsonValue &file) { manifest.files.push_back(parse_file(file)); });
  require_different_names(manifest.files, value["files"]);
  value["tensors"].for_each_element([&](const JsonValue &tensor) {
    manifest.tensors.push_back(parse_tensor(tensor, manifest));
    manifest.tensors.back().model = parse_model_number(tensor, manifest.models.size());
  });
  require_different_names(manifest.tensors, value["tensors"]);
  value["bytes"].for_each_element(
      [&](const JsonValue &bytes) { manifest.bytes.push_back(parse_bytes(bytes, manifest)); });
  require_different_names(manifest.bytes, value["bytes"]);
  value["keys"].for_each_member(
      [&](const std::string &key, const JsonValue &text) { manifest.keys[key] = text.text(); });
  return manifest;
}

}  // namespace

void ManifestPart::add_rows(uint32_t file, uint64_t more) {
  if (!cuts.empty()) {
    RowCut &last = cuts.back();
    if (last.rows == more && last.step == 1 && last.first_file + last.files == file) {
      ++last.files;
      return;
    }
  }
  cuts.push_back({file, 1, more});
}

namespace {

// The number of cuts, from the first one on, that are one run of files at equal distances.
size_t count_alike(std::span<const RowCut> cuts) {
  if (cuts.size() < 2 || cuts[0].files != 1 || cuts[1].first_file <= cuts[0].first_file) return 1;
  const uint32_t step = cuts[1].first_file - cuts[0].first_file;
  size_t count = 1;
  while (count < cuts.size() && cuts[count].files == 1 && cuts[count].rows == cuts[0].rows &&
         cuts[count].first_file == cuts[0].first_file + count * step)
    ++count;
  return count;
}

}  // namespace

void ManifestPart::join_cuts() {
  std::vector<RowCut> joined;
  for (std::span<const RowCut> left(cuts); !left.empty();) {
    const size_t alike = count_alike(left), taken = alike < least_joined ? 1 : alike;
    joined.push_back(left[0]);
    if (taken > 1)
      joined.back().files = static_cast<uint32_t>(taken), joined.back().step = left[1].first_file - left[0].first_file;
    left = left.subspan(taken);
  }
  cuts = std::move(joined);
}

bool ManifestTensor::filled() const {
  uint64_t count = 0;
  for (const ManifestPart &part : parts) count += part.box.count();
  return count == whole(shape).count();
}

namespace {

uint64_t version_of(const Manifest &manifest) {
  uint64_t version = first_manifest_version;
  for (const ManifestTensor &tensor : manifest.tensors)
    for (const ManifestPart &part : tensor.parts) {
      if (std::ranges::any_of(part.cuts, [](const RowCut &cut) { return cut.step > 1; })) return 3;
      if (part.axis) version = 2;
    }
  return version;
}

}  // namespace

std::string write_manifest(const Manifest &manifest) {
  std::string text = format_text("{{\"format\":\"{}\",\"version\":{},\"sequence\":{},\"step\":{},\"ranks\":{},\n",
                                 format_name, version_of(manifest), manifest.sequence, manifest.step, manifest.ranks);
  append_list(text, "models", manifest.models, [&](const ManifestModel &model) {
    text += format_text(R"({{"name":{},"description":{},"layout_hash":"{:016x}"{}}})", quote_json(model.name),
                        quote_json(model.description), model.layout_hash,
                        model.rounding_seed ? format_text(",\"rounding_seed\":{}", *model.rounding_seed) : "");
  });
  text += ",\n";
  append_list(text, "tensors", manifest.tensors, [&](const ManifestTensor &tensor) { append_tensor(text, tensor); });
  text += ",\n";
  append_list(text, "bytes", manifest.bytes, [&](const ManifestTensor &tensor) { append_tensor(text, tensor); });
  text += ",\n";
  append_list(text, "files", manifest.files, [&](const ManifestFile &file) {
    text += format_text("[{},{},\"{}\"]", quote_json(file.name), file.bytes, file.header_sum);
  });
  text += ",\n\"keys\":{";
  for (const auto &[key, value] : manifest.keys)
    text += format_text("{}{}:{}", text.ends_with('{') ? "" : ",", quote_json(key), quote_json(value));
  text += "}";
  return text + std::string(sum_name) + long_sum_of(text) + "\"}\n";
}

// The checksum is checked before the version. A flipped bit in the version is then reported as damage, and not as a
// newer release.
Manifest parse_manifest(std::string_view text, std::string_view file) {
  const nlohmann::json document = parse_json(text, file);
  const JsonValue value(document, file);
  value["format"].require(value["format"].text() == format_name, format_text("\"{}\"", format_name));
  const size_t end = text.rfind(sum_name);
  const std::string &sum = value["sum"].text();
  const bool whole = end != text.npos && sum == long_sum_of(text.substr(0, end));
  const uint64_t version = value["version"].unsigned_number();
  if (whole && (version < first_manifest_version || version > manifest_version))
    fail(FSDP_UNSUPPORTED, "{}: it is of version {} of the format; this release reads versions {} to {}", file, version,
         first_manifest_version, manifest_version);
  Manifest manifest = parse_document(value);
  value["sum"].require(whole, "the sum of what stands before it");
  return manifest;
}

std::optional<uint64_t> find_sequence(std::string_view text) {
  constexpr std::string_view name = "\"sequence\":";
  const size_t at = text.find(name);
  uint64_t sequence = 0;
  if (at == text.npos) return std::nullopt;
  const auto [end, error] = std::from_chars(text.data() + at + name.size(), text.data() + text.size(), sequence);
  if (error != std::errc() || end == text.data() + text.size() || *end != ',') return std::nullopt;
  return sequence;
}

bool ends_as_manifest(std::string_view text) { return text.ends_with("\"}\n"); }

}  // namespace fsdp::checkpoint
