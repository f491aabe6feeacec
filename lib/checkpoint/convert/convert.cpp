// SPDX-License-Identifier: Apache-2.0

#include "checkpoint/convert/convert.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>

#include "base/checked.h"
#include "base/error.h"
#include "base/library_thread.h"
#include "base/text.h"
#include "checkpoint/files/file.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/format/json_document.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/shard_file.h"

namespace fsdp::checkpoint {

namespace {

// Each file keeps its folder open, so the number of files that are written at once is limited.
constexpr size_t files_at_once = 64;

// The thread that writes to the disk.
class WriterThread {
 public:
  explicit WriterThread(ShardWriter &writer) : writer_(writer) {
    const BlockedSignals blocked;
    thread_ = std::thread([this] { writer_.write(); });
  }
  ~WriterThread() {
    writer_.give_up(FSDP_ABORTED, "the writing was given up");  // has no effect if the writing is complete
    thread_.join();
  }
  WriterThread(const WriterThread &) = delete;
  WriterThread &operator=(const WriterThread &) = delete;

 private:
  ShardWriter &writer_;
  std::thread thread_;
};

ShardFile plan_file(const NewFile &file) {
  std::vector<ShardTensor> parts;
  for (const NewTensor *tensor : file.tensors) parts.push_back({tensor->name, tensor->type, whole(tensor->shape)});
  ShardFile planned = plan_shard_file(parts);
  if (file.as_shard) return planned;
  planned.header.metadata = {{"format", "pt"}};
  write_shard_header(planned.header, std::vector<uint64_t>(block_count(planned.header.data_bytes())));
  return planned;
}

class FilesWriter {
 public:
  FilesWriter(const NewCheckpoint &folder, const std::vector<NewFile> &files, NewTensorReader &reader,
              const Progress &progress)
      : folder_(folder), reader_(reader), progress_(progress) {
    for (const NewFile &file : files) {
      planned_.push_back(plan_file(file));
      const SafetensorsHeader &header = planned_.back().header;
      all_ = checked_add(all_, header.data_offset + header.data_bytes(), "bytes of all files");
    }
  }

  void write(const NewFile *first, size_t count, size_t number) {
    std::vector<ShardToWrite> shards;
    for (size_t i = 0; i < count; ++i) shards.push_back(shard_of(first[i], std::move(planned_[number + i])));
    ShardWriter writer(std::move(shards), Staging::allocate());
    const auto poll = [&] { progress_(done_ + writer.bytes_written(), all_); };
    poll_ = poll;
    {
      const WriterThread thread(writer);
      writer.pack(poll);
      while (!writer.is_written()) {
        poll();
        writer.await_written(std::chrono::milliseconds(20));
      }
    }
    std::ranges::move(writer.result(), std::back_inserter(written));
    done_ += writer.bytes_in_all();
    progress_(done_, all_);
  }

  std::vector<WrittenShard> written;

 private:
  ShardToWrite shard_of(const NewFile &file, ShardFile planned) {
    ShardToWrite shard{folder_.make_folder(""), file.name, folder_.shown(file.name), std::move(planned), {}};
    for (const uint32_t index : shard.file.order)
      shard.rows.push_back([this, tensor = file.tensors[index]](uint64_t at, std::span<std::byte> to) {
        poll_();
        reader_.read(*tensor, at, to);
      });
    return shard;
  }

  const NewCheckpoint &folder_;
  NewTensorReader &reader_;
  const Progress &progress_;
  std::vector<ShardFile> planned_;
  std::function<void()> poll_;
  uint64_t done_ = 0, all_ = 0;
};

}  // namespace

std::vector<WrittenShard> write_new_files(const NewCheckpoint &folder, const std::vector<NewFile> &files,
                                          NewTensorReader &reader, const Progress &progress) {
  FilesWriter writer(folder, files, reader, progress);
  for (size_t at = 0; at < files.size(); at += files_at_once)
    writer.write(files.data() + at, std::min(files_at_once, files.size() - at), at);
  return std::move(writer.written);
}

uint64_t data_bytes_of(const NewTensor &tensor) {
  return stored_bytes(*tensor.type, whole(tensor.shape).count()).value_or(0);
}

namespace {

Rename parse_rename(const JsonValue &value) {
  Rename rename{value["theirs"].text(), value["ours"].text()};
  value.for_each_member([&](const std::string &name, const JsonValue &member) {
    if (name == "from_row")
      rename.from_row = member.unsigned_number();
    else if (name == "to_row")
      rename.to_row = member.unsigned_number();
    else if (name == "row_count")
      rename.row_count = member.unsigned_number();
    else if (name == "transposed")
      rename.transposed = member.boolean();
    else
      member.require(name == "theirs" || name == "ours",
                     "a member that is known (theirs, ours, from_row, to_row, row_count, transposed)");
  });
  return rename;
}

}  // namespace

std::vector<Rename> parse_renames(std::string_view text, std::string_view file) {
  const nlohmann::json document = parse_json(text, file, {.depth = 4, .values = 4'000'000});
  std::vector<Rename> renames;
  JsonValue(document, file).for_each_element([&](const JsonValue &value) { renames.push_back(parse_rename(value)); });
  check_renames(renames, file);
  return renames;
}

std::vector<Rename> read_renames(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail_errno(errno, path + ": cannot be opened");
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) fail_errno(EIO, path + ": reading it");
  return parse_renames(text.str(), path);
}

namespace {

constexpr std::array<std::string_view, 9> copied_suffixes = {".json", ".txt",   ".model",    ".jinja", ".py",
                                                             ".md",   ".vocab", ".tiktoken", ".yaml"};
constexpr std::array<std::string_view, 3> copied_names = {"LICENSE", "NOTICE", "USE_POLICY"};
constexpr uint64_t copied_at_once = uint64_t{1} << 20;

bool is_copied(const std::string &name) {
  if (name.starts_with('.') || name.ends_with(".index.json") || name == manifest_name) return false;
  return std::ranges::any_of(copied_suffixes, [&](std::string_view suffix) { return name.ends_with(suffix); }) ||
         std::ranges::find(copied_names, name) != copied_names.end();
}

void copy_file(int folder, const std::string &name, const std::string &shown, const NewCheckpoint &to) {
  const InFile from(folder, name, shown, LinkPolicy::followed);
  OutFile file(to.fd(), name, to.shown(name));
  const AlignedBytes buffer(copied_at_once);
  for (uint64_t at = 0; at < from.bytes(); at += copied_at_once) {
    const uint64_t some = std::min(copied_at_once, from.bytes() - at);
    from.read(at, some, buffer.bytes());
    file.write(at, buffer.bytes().first(round_up(some, io_alignment)));
  }
  file.finish(from.bytes());
}

}  // namespace

std::vector<std::string> copy_plain_files(const std::string &from, const NewCheckpoint &to) {
  const Folder folder(from);
  std::vector<std::string> copied;
  for (const std::string &name : list_folder(folder.fd(), from)) {
    if (!is_copied(name)) continue;
    copy_file(folder.fd(), name, folder.shown(name), to);
    copied.push_back(name);
  }
  return copied;
}

namespace {

constexpr const char *single_name = "model.safetensors";

// Assigns tensors to a file, one after the other, until the file is full.
std::vector<NewFile> split_files(const std::vector<NewTensor> &tensors, uint64_t most) {
  std::vector<NewFile> files;
  uint64_t bytes = 0;
  for (const NewTensor &tensor : tensors) {
    const uint64_t more = data_bytes_of(tensor);
    if (files.empty() || bytes > most || more > most - bytes) {
      files.push_back({"", {}, false});
      bytes = 0;
    }
    files.back().tensors.push_back(&tensor);
    bytes = checked_add(bytes, more, "bytes of a file");
  }
  for (size_t i = 0; i < files.size(); ++i)
    files[i].name =
        files.size() == 1 ? single_name : format_text("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
  return files;
}

std::string write_weight_index(const std::vector<NewFile> &files) {
  uint64_t bytes = 0;
  std::map<std::string, std::string> map;
  for (const NewFile &file : files)
    for (const NewTensor *tensor : file.tensors) bytes += data_bytes_of(*tensor), map[tensor->name] = file.name;
  std::string text = format_text("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{", bytes);
  for (const auto &[name, file] : map)
    text += format_text("{}\n    {}: {}", text.ends_with('{') ? "" : ",", quote_json(name), quote_json(file));
  return text + "\n  }\n}\n";
}

// Splits the path of a file or folder that will be made into folder and name.
std::pair<std::string, std::string> split_path(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const size_t slash = path.find_last_of('/');
  const std::string name = slash == path.npos ? path : path.substr(slash + 1);
  if (name.empty() || name == "." || name == "..")
    fail(FSDP_INVALID_ARGUMENT, "{} is no name for a new folder", quote_json(path));
  return {slash == path.npos ? "." : slash == 0 ? "/" : path.substr(0, slash), name};
}

Converted describe(const std::string &path, const std::vector<NewFile> &files,
                   const std::vector<WrittenShard> &written) {
  Converted converted{.path = path, .files = {}, .copied = {}};
  for (const NewFile &file : files) converted.files.push_back(file.name), converted.tensors += file.tensors.size();
  for (const WrittenShard &one : written) converted.bytes += one.bytes;
  return converted;
}

// The manifest has the same bytes in every run of the import.
Manifest describe_import(const std::vector<NewTensor> &tensors, const NewFile &file, const WrittenShard &written,
                         uint64_t sequence, uint64_t step) {
  Manifest manifest;
  manifest.sequence = sequence, manifest.step = step, manifest.ranks = 1;
  manifest.models = {{"", "imported weights", 0}};
  manifest.files = {{file.name, written.bytes, written.header_sum}};
  for (const NewTensor &tensor : tensors) {
    ManifestPart part{whole(tensor.shape), {}};
    part.add_rows(0, part.rows());
    manifest.tensors.push_back({tensor.name, tensor.type, tensor.shape, {std::move(part)}});
  }
  return manifest;
}

// Throws if a rename matches no tensor, because it is then probably mistyped.
void require_used(std::span<const Rename> renames, const SpreadTensors &tensors, std::string Rename::*stored) {
  for (const Rename &rename : renames)
    if (std::ranges::none_of(tensors,
                             [&](const auto &one) { return match_name(rename.*stored, one.first).has_value(); }))
      fail(FSDP_INVALID_ARGUMENT, "renames: no tensor is called {}", quote_json(rename.*stored));
}

void require_new(const Folder &folder, const std::string &name, const std::string &shown) {
  if (folder.has(name)) fail(FSDP_INVALID_STATE, "{}: is there already, and nothing is overwritten", shown);
}

}  // namespace

Converted consolidate(const std::string &checkpoint, const std::string &out, const ConsolidateChoice &choice,
                      const CastElements &cast, const Progress &progress) {
  check_renames(choice.renames, "renames");
  const auto [parent_path, name] = split_path(out);
  const Folder parent(parent_path);
  require_new(parent, name, out);
  const WeightFiles source(checkpoint);
  if (!source.is_checkpoint()) fail(FSDP_INVALID_ARGUMENT, "{}: is no checkpoint of libfsdp", checkpoint);
  std::string sum;
  const std::vector<StoredFile> stored = source.list(sum);
  const SpreadTensors tensors = collect_tensors(stored);
  require_used(choice.renames, tensors, &Rename::ours);
  const std::vector<NewTensor> planned = plan_export(tensors, choice.renames, choice.as);
  if (planned.empty()) fail(FSDP_INVALID_ARGUMENT, "{}: there are no weights in it", checkpoint);
  const std::vector<NewFile> files = split_files(planned, choice.max_bytes);
  parent.remove_leftovers();
  NewCheckpoint made(parent);
  NewTensorReader reader(source, cast);
  Converted converted = describe(out, files, write_new_files(made, files, reader, progress));
  if (files.size() > 1) made.put(weight_index_name, write_weight_index(files));
  if (!choice.copied_folder.empty()) converted.copied = copy_plain_files(choice.copied_folder, made);
  made.commit(name, false);
  return converted;
}

Converted import_weights(const std::string &weights, const std::string &folder, std::span<const Rename> renames,
                         uint64_t step, const CastElements &cast, const Progress &progress) {
  check_renames(renames, "renames");
  const WeightFiles source(weights);
  std::string sum;
  const std::vector<StoredFile> stored = source.list(sum);
  const SpreadTensors tensors = collect_tensors(stored);
  require_used(renames, tensors, &Rename::theirs);
  const std::vector<NewTensor> planned = plan_import(tensors, renames);
  if (planned.empty()) fail(FSDP_INVALID_ARGUMENT, "{}: there are no weights in it", weights);
  const Folder into = Folder::make(folder);
  require_new(into, step_name(step), into.shown(step_name(step)));
  into.remove_leftovers();
  NewCheckpoint made(into);
  std::vector<NewFile> files{{shard_name(0), {}, true}};
  for (const NewTensor &tensor : planned) files[0].tensors.push_back(&tensor);
  NewTensorReader reader(source, cast);
  const std::vector<WrittenShard> written = write_new_files(made, files, reader, progress);
  const std::string text =
      write_manifest(describe_import(planned, files[0], written.at(0), into.next_sequence(), step));
  parse_manifest(text, made.shown(manifest_name));  // a manifest that this refuses could not be loaded
  made.commit(step_name(step), text, false);
  return describe(into.shown(step_name(step)), files, written);
}

}  // namespace fsdp::checkpoint
