// SPDX-License-Identifier: Apache-2.0
// Saves and loads through the public ABI, with checksums, and past the page cache if the file system supports that. As
// the reference of a save each rank writes as many bytes to a file of its own; as that of a load the ranks read the
// same files, each rank a part.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "perf/abi_model.h"
#include "perf/bench.h"
#include "perf/scratch.h"

namespace perf {
namespace {

constexpr uint64_t page = 4096, block_bytes = uint64_t{8} << 20;
constexpr uint64_t saved_bytes = 12;  // of an element: weight and both moments

// Files block by block, past the page cache where that can be.
class RawFiles {
 public:
  RawFiles() : block_(static_cast<char *>(std::aligned_alloc(page, block_bytes)), std::free) {
    if (!block_) throw std::bad_alloc();
    std::fill_n(block_.get(), block_bytes, 'x');
  }

  // Writes a new file. When this returns, the file is on the disk and has its name.
  void write(const std::string &file, uint64_t bytes) {
    const std::string fresh = file + ".new";
    const int fd = open(fresh, O_WRONLY | O_CREAT | O_TRUNC);
    for (uint64_t at = 0; at < bytes; at += block_bytes) {
      const uint64_t some = std::min(block_bytes, bytes - at);
      if (::pwrite(fd, block_.get(), some, static_cast<off_t>(at)) != static_cast<ssize_t>(some))
        fail_file(fresh, "writing a block of it");
    }
    if (::fsync(fd) != 0 || ::close(fd) != 0) fail_file(fresh, "bringing it to the disk");
    if (std::rename(fresh.c_str(), file.c_str()) != 0) fail_file(fresh, "naming it");
  }
  // From a page on, up to `end` or the end of the file.
  void read(const std::string &file, uint64_t begin, uint64_t end) {
    const int fd = open(file, O_RDONLY);
    for (uint64_t at = begin; at < end; at += block_bytes)
      if (::pread(fd, block_.get(), whole_pages(std::min(block_bytes, end - at)), static_cast<off_t>(at)) <= 0)
        fail_file(file, "reading a block of it");
    ::close(fd);
  }
  static uint64_t whole_pages(uint64_t bytes) { return (bytes + page - 1) / page * page; }
  bool is_direct() const { return direct_; }

 private:
  int open(const std::string &file, int flags) {
    int fd = ::open(file.c_str(), flags | O_CLOEXEC | (direct_ ? O_DIRECT : 0), 0600);
    if (fd < 0 && errno == EINVAL && direct_) {
      direct_ = false;
      fd = ::open(file.c_str(), flags | O_CLOEXEC, 0600);
    }
    if (fd < 0) fail_file(file, "opening it");
    return fd;
  }

  std::unique_ptr<char, void (*)(void *)> block_;
  bool direct_ = true;
};

// Reads every file below a folder; each rank reads a part of each file.
void read_raw(const Bench &bench, RawFiles &raw, const std::string &folder) {
  for (const auto &entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file() || entry.file_size() == 0) continue;
    const uint64_t bytes = entry.file_size(), part = RawFiles::whole_pages((bytes + bench.size() - 1) / bench.size());
    raw.read(entry.path(), std::min(bytes, part * bench.rank()), std::min(bytes, part * (bench.rank() + 1)));
  }
}

// A model of one weight tensor, with AdamW's states.
class Saved {
 public:
  Saved(Bench &bench, uint32_t size, uint64_t elements, std::string folder)
      : model_(bench, size, FSDP_MODEL_OPTIONS_INIT, {{1, elements}}), folder_(std::move(folder)) {
    model_.load_pattern();
  }

  void save() {
    fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
    options.step = 1;
    options.flags = FSDP_SAVE_REPLACE;
    model_.check(fsdp_save(model_.model.get(), folder_.c_str(), &options));
  }
  // In the window that open() opened.
  void load(const std::string &folder) {
    loaded_ = FSDP_LOADED_INIT;
    model_.check(fsdp_load(model_.model.get(), folder.c_str(), nullptr, &loaded_));
  }
  void load() { load(folder_); }
  void open() { model_.check(fsdp_begin_update(model_.model.get(), nullptr)); }
  void publish() { model_.check(fsdp_publish_weights(model_.model.get(), nullptr)); }
  const std::string &folder() const { return folder_; }
  const fsdp_loaded &loaded() const { return loaded_; }

  // Checks that a load restores what was saved, after other weights have replaced it.
  uint64_t check(Bench &bench) {
    save();
    open();
    const std::vector<float> zeros(model_.shapes[0].elements);
    model_.check(fsdp_load_param(model_.groups[0], 0, zeros.data(), FSDP_FLOAT32, zeros.size(), FSDP_EVERY_RANK, 0));
    publish();
    open();
    load();
    publish();
    return bench.lab.sum(model_.count_wrong(0));
  }

 private:
  AbiModel model_;
  std::string folder_;
  fsdp_loaded loaded_ = FSDP_LOADED_INIT;
};

std::vector<uint64_t> element_counts(const Bench &bench) {
  std::vector<uint64_t> counts;
  for (const uint64_t bytes : bench.request.sizes(saved_bytes)) counts.push_back(bytes / saved_bytes);
  return counts;
}

void add_line(Bench &bench, Line line, const char *reference) {
  line.reference = reference;
  line.bus_factor = 1;
  bench.report.add(line);
}

// Bytes that ranks have read, relative to the bytes that they keep.
double read_over_wanted(Bench &bench, const fsdp_loaded &loaded) {
  const uint64_t read = bench.lab.sum(loaded.read_bytes), wanted = bench.lab.sum(loaded.wanted_bytes);
  return static_cast<double>(read) / static_cast<double>(wanted);
}

void add_load(Bench &bench, Saved &saved, Line line, const char *reference, uint64_t wrong) {
  line.more = {{"read_over_wanted", read_over_wanted(bench, saved.loaded())}};
  line.checked = bench.request.check;
  line.wrong = wrong;
  add_line(bench, line, reference);
}

// Loads what is in a folder, against a read of the same bytes of its files.
void run_against_raw(Bench &bench, const Scratch &scratch, Saved &saved, const std::string &folder, const char *variant,
                     uint64_t bytes, uint64_t wrong) {
  RawFiles raw;
  const Line line = make_line(bench, "load", variant, scratch.kind(), bytes,
                              measure(
                                  bench, [&] { saved.load(folder); }, [&] { read_raw(bench, raw, folder); }));
  saved.load(folder);
  add_load(bench, saved, line, raw.is_direct() ? "O_DIRECT read of its files" : "read of its files", wrong);
}

// Loads files that one rank has written on all ranks.
void run_onto_others(Bench &bench, const Scratch &scratch, Saved &saved, uint64_t elements) {
  const std::string folder = scratch.file("of-one");
  if (bench.rank() == 0) Saved(bench, 1, elements, folder).save();
  bench.lab.meet();
  constexpr const char *variant = "of 1 rank's files";
  run_against_raw(bench, scratch, saved, folder, variant, elements * saved_bytes, 0);
  const Line line = make_line(bench, "load", variant, scratch.kind(), elements * saved_bytes,
                              measure(
                                  bench, [&] { saved.load(folder); }, [&] { saved.load(); }));
  saved.load(folder);
  add_load(bench, saved, line, "load of as many ranks' files", 0);
}

}  // namespace

void run_save(Bench &bench) {
  for (const uint64_t elements : element_counts(bench)) {
    const Scratch scratch(bench);
    Saved saved(bench, bench.size(), elements, scratch.file("saved"));
    const uint64_t wrong = bench.request.check ? saved.check(bench) : 0;
    const uint64_t bytes = elements * saved_bytes, part = RawFiles::whole_pages(bytes / bench.size());
    const std::string file = scratch.file(fmt::format("raw-{}", bench.rank()));
    RawFiles raw;
    raw.write(file, part);  // each save replaces the one before, and so does each reference
    Line line = make_line(bench, "save", "", scratch.kind(), bytes,
                          measure(
                              bench, [&] { saved.save(); }, [&] { raw.write(file, part); }));
    line.checked = bench.request.check;
    line.wrong = wrong;
    add_line(bench, line, raw.is_direct() ? "O_DIRECT write" : "write and fsync");
    bench.lab.meet();
  }
}

void run_load(Bench &bench) {
  for (const uint64_t elements : element_counts(bench)) {
    const Scratch scratch(bench);
    Saved saved(bench, bench.size(), elements, scratch.file("saved"));
    saved.save();
    const uint64_t wrong = bench.request.check ? saved.check(bench) : 0;
    saved.open();
    run_against_raw(bench, scratch, saved, saved.folder(), "", elements * saved_bytes, wrong);
    if (bench.size() > 1) run_onto_others(bench, scratch, saved, elements);
    saved.publish();
    bench.lab.meet();
  }
}

}  // namespace perf
