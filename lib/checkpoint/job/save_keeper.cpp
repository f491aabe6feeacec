// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/save_keeper.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/library_thread.h"
#include "checkpoint/files/shard_reader.h"

namespace fsdp::checkpoint {
namespace {

// Reading a post costs a few cache lines. A rank that reads many posts, or asks the kernel, therefore reads less often.
constexpr std::chrono::milliseconds longest_pause(2), look_period(20), job_period(100);

void remove_all_but(const SaveChoice &choice, const Folder &folder) {
  const std::vector<FolderEntry> there = folder.list();
  for (size_t i = choice.keep; i < there.size(); ++i)
    if (std::ranges::find(choice.spared, there[i].name) == choice.spared.end())
      choice.commit_manifest ? folder.remove_in_place(there[i].name) : folder.remove(there[i].name);
}

// The error as every rank reports it.
Error of_rank(const Error &error, uint32_t rank) {
  Error told(error.status, format_text("rank {}: {}", rank, error.message), static_cast<int32_t>(rank), error.origin,
             error.origin_code);
  told.ends_context = false;
  return told;
}

}  // namespace

Save::Keeper::Keeper(const SaveRanks &ranks, std::unique_ptr<SaveTask> task)
    : team_(ranks.team),
      world_(ranks.world),
      timeout_(ranks.waiter.timeout_ms()),
      patience_(std::min<uint32_t>(1000, ranks.waiter.timeout_ms() / 4)),
      task_(std::move(task)),
      number_(std::strtoull(task_->id.substr(0, 16).c_str(), nullptr, 16)) {
  result_.name = task_->name;
  if (!task_->shards.empty()) {
    if (task_->order.staging.blocks.empty()) task_->order.staging = Staging::allocate();
    writer_ = std::make_shared<ShardWriter>(std::move(task_->shards), std::move(task_->order.staging),
                                            task_->order.piece_bytes);
  }
  disk_.emplace(task_->folder, writer_);
  disk_->set_patience(patience_);
  task_->folder.reset();  // the disk thread owns it now
  const auto body = [](void *self) -> void * {
    static_cast<Keeper *>(self)->run();
    return nullptr;
  };
  thread_ = LibraryThread{"fsdp-save", "a save"}.start(body, this);
}

Save::Keeper::~Keeper() {
  give_up(FSDP_ABORTED, "the save was given up");
  pthread_join(thread_, nullptr);
}

// ---- for callers ----

SaveProgress Save::Keeper::progress() const noexcept {
  const std::lock_guard lock(mutex_);
  if (ended_) return end_;
  SaveProgress progress;
  progress.packed = packed_;
  if (writer_) progress.bytes = writer_->bytes_written(), progress.bytes_in_all = writer_->bytes_in_all();
  return progress;
}

void Save::Keeper::await_packed(std::chrono::milliseconds longest) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, longest, [&] { return packed_; });
}

void Save::Keeper::await_end(std::chrono::milliseconds longest) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, longest, [&] { return ended_; });
}

SaveResult Save::Keeper::result() const {
  const std::lock_guard lock(mutex_);
  if (failure_) throw *failure_;
  return result_;
}

void Save::Keeper::give_up(fsdp_status status, const char *why) noexcept {
  try {
    given_up_.set(Error(status, why));
  } catch (...) {  // no memory for the text
    given_up_.set(Error(status, {}));
  }
}

// ---- the thread ----

void Save::Keeper::run() noexcept {
  post(SaveState::writing);
  looked_ = moved_ = Clock::now();
  std::optional<Error> failure = capture_error([&] { write(); });
  {
    const std::lock_guard lock(mutex_);
    packed_ = true;
  }
  changed_.notify_all();
  if (failure && writer_) {
    writer_->give_up(FSDP_ABORTED, "the save was given up");
    writer_->await_written(patience_);  // other ranks are told only when the file is no longer in use
  }
  if (const auto lost = capture_error([&] { failure = first() ? lead(failure) : follow(failure); })) failure = lost;
  if (first())
    await_heard();
  else
    post(heard_ ? SaveState::heard : SaveState::left);
  finish(std::move(failure));
}

void Save::Keeper::finish(std::optional<Error> failure) noexcept {
  disk_.reset();
  {
    const std::lock_guard lock(mutex_);
    end_ = {writer_ ? writer_->bytes_written() : 0, writer_ ? writer_->bytes_in_all() : 0, true, true};
    writer_.reset();  // also frees its memory
    failure_ = std::move(failure);
    ended_ = true;
  }
  changed_.notify_all();
}

// Pauses are short at first, because a small model is saved in less than the longest pause.
void Save::Keeper::pause() {
  pause_ = std::min<std::chrono::microseconds>(longest_pause, pause_ + pause_ / 4 + std::chrono::microseconds(200));
  std::this_thread::sleep_for(pause_);
}

template <class Condition>
void Save::Keeper::wait_until(Condition condition) {
  for (pause_ = {}; !condition(); pause()) look();
}

// ---- this rank's files ----

void Save::Keeper::write() {
  if (!writer_) return;
  const auto poll = [&] {
    look();
    watch_disk();
  };
  writer_->pack(poll);
  {
    const std::lock_guard lock(mutex_);
    packed_ = true;
  }
  changed_.notify_all();
  while (!writer_->is_written()) {
    poll();
    writer_->await_written(look_period);
  }
  note_files();
}

void Save::Keeper::note_files() {
  const std::vector<WrittenShard> written = writer_->result();
  for (size_t i = 0; i < written.size(); ++i) {
    const auto [kind, number] = task_->files[i];
    if (written_files_.size() <= number) written_files_.resize(number + 1);
    ReportedFile &file = written_files_[number][static_cast<size_t>(kind)];
    file.bytes = written[i].bytes;
    file.set_header_sum(written[i].header_sum);
    result_.bytes += written[i].bytes;
  }
  if (!written_files_.empty()) report_.files = written_files_[0];
}

// A slow disk is no error; a disk that takes no bytes has failed.
void Save::Keeper::watch_disk() {
  if (const uint64_t bytes = writer_->bytes_written(); bytes != moved_bytes_)
    moved_bytes_ = bytes, moved_ = Clock::now();
  if (Clock::now() - moved_ > timeout_)
    throw Error(FSDP_SYSTEM,
                format_text("{}/.tmp-{}: the disk has taken nothing for {} ms", task_->order.folder, task_->id,
                            timeout_.count()),
                -1, FSDP_ORIGIN_OS, ETIMEDOUT);
}

// ---- the other ranks ----

SaveReport Save::Keeper::read(uint32_t place) const noexcept {
  SaveReport report;
  const auto word = std::as_writable_bytes(std::span(static_cast<SaveWord *>(&report), 1));
  const bool posted = world_.read_post(team_.world_rank(place), word, report.text.bytes);
  return posted && report.save == number_ ? report : SaveReport{};
}

void Save::Keeper::post(SaveState state) noexcept {
  report_.save = number_, report_.state = state;
  const auto to = first() ? std::nullopt : std::optional(team_.world_rank(0));
  world_.post(std::as_bytes(std::span(static_cast<const SaveWord *>(&report_), 1)), report_.posted(), to);
}

void Save::Keeper::look() {
  given_up_.check();
  if (first()) {
    if (team_.size() > 64 && Clock::now() - looked_at_ranks_ < look_period) return;
    looked_at_ranks_ = Clock::now();
    for (uint32_t place = written_; place < team_.size(); ++place)
      if (has_failed(read(place).state)) fail(FSDP_ABORTED, "{}", failed_elsewhere);
  } else if (const SaveState state = read(0).state; state == SaveState::giving_up || state == SaveState::failed) {
    fail(FSDP_ABORTED, "{}", failed_elsewhere);
  }
  look_at_job();
}

void Save::Keeper::look_at_job() {
  if (Clock::now() - looked_ < job_period) return;
  looked_ = Clock::now();
  world_.check();
  team_.look("a save under way", false);
}

// ---- the first rank ----

std::optional<Error> Save::Keeper::lead(std::optional<Error> failure) {
  if (!failure) failure = capture_error([&] { await_written_by_all(); });
  if (!failure) failure = capture_error([&] { collect_files(); });
  if (!failure) {
    post(SaveState::committing);
    failure = capture_error([&] { commit(); });
    if (!failure) {
      post(SaveState::committed);
      remove_older();
      return std::nullopt;
    }
  }
  report_.set(*failure);
  post(SaveState::giving_up);
  await_all_let_go();
  failure = find_failure(failure);
  // If the disk does not return, the disk thread removes the folder when it does.
  if (disk_->idle() && (!writer_ || writer_->is_written()))
    capture_error([&] { work_on_disk([](SaveFolder &folder) { folder.made.reset(); }); });
  report_.set(*failure);
  post(SaveState::failed);
  return failure;
}

bool Save::Keeper::written_by_all() {
  while (written_ < team_.size() && read(written_).state == SaveState::written) ++written_;
  return written_ == team_.size();
}

// Once a rank has written, it does not matter whether it still lives.
void Save::Keeper::await_written_by_all() {
  try {
    wait_until([&] { return written_by_all(); });
  } catch (const Error &) {
    if (!written_by_all()) throw;
  }
}

// Returns the failure of the lowest rank. Ranks that gave up only because another rank failed do not count.
std::optional<Error> Save::Keeper::find_failure(std::optional<Error> failure) const {
  const bool others = failure->status == FSDP_ABORTED && !given_up_.failed();
  if (!others) return failure->rank >= 0 ? *failure : of_rank(*failure, team_.world_rank(0));
  for (uint32_t place = 1; place < team_.size(); ++place)
    if (const SaveReport report = read(place); has_failed(report.state) && report.error.status != FSDP_ABORTED)
      return of_rank(report.to_error(), team_.world_rank(place));
  for (uint32_t place = 1; place < team_.size(); ++place)
    if (const SaveReport report = read(place); has_failed(report.state))
      return of_rank(report.to_error(), team_.world_rank(place));
  return failure;
}

// Waits until no rank uses the folder, because no rank may write into a folder that is being removed. Ends with the
// job.
void Save::Keeper::await_all_let_go() {
  const auto start = Clock::now();
  capture_error([&] {
    for (pause_ = {};; pause()) {
      bool all = true;
      for (uint32_t place = 1; place < team_.size() && all; ++place) {
        const SaveState state = read(place).state;
        all = state == SaveState::written || has_failed(state);
      }
      if (all || Clock::now() - start > (given_up_.failed() ? patience_ : timeout_)) return;
      look_at_job();
    }
  });
}

// Runs the work on the disk thread; if the disk does not return, the work is given up.
void Save::Keeper::work_on_disk(std::function<void(SaveFolder &)> work) {
  const auto start = Clock::now();
  disk_->begin(std::move(work));
  while (!disk_->idle()) {
    if (Clock::now() - start > (given_up_.failed() ? patience_ : timeout_))
      throw Error(FSDP_SYSTEM,
                  format_text("{}: the disk has not answered for {} ms; whether {} will be there is not known",
                              task_->order.folder, timeout_.count(), task_->name),
                  -1, FSDP_ORIGIN_OS, ETIMEDOUT);
    disk_->await_idle(look_period);
  }
  disk_->result();
}

// Takes sizes and checksums of the files with this number. Returns whether the rank has any.
bool Save::Keeper::take_files(uint32_t place, uint32_t number,
                              const std::map<std::string_view, ManifestFile *> &files) {
  bool any = false;
  const SaveReport report = place ? read(place) : report_;
  if (!has_reported(report, number) && place) return take_unreported(place, number, files);
  for (const ShardKind kind : {ShardKind::weights, ShardKind::optimizer, ShardKind::bytes}) {
    const ReportedFile &reported = report.files[static_cast<size_t>(kind)];
    if (!reported.bytes) continue;
    const std::string name = saved_file_name(kind, team_.world_rank(place), place, number);
    const auto found = files.find(name);
    if (found == files.end())
      fail(FSDP_MISMATCH, "rank {} has written {}, which no rank described; add the model on all ranks of its mesh",
           team_.world_rank(place), name);
    found->second->bytes = reported.bytes;
    found->second->header_sum = reported.header_sum_text();
    any = true;
  }
  return any;
}

bool Save::Keeper::take_unreported(uint32_t place, uint32_t number,
                                   const std::map<std::string_view, ManifestFile *> &files) {
  std::vector<std::string> names;
  for (const ShardKind kind : {ShardKind::weights, ShardKind::optimizer}) {
    std::string name = saved_file_name(kind, team_.world_rank(place), place, number);
    if (files.contains(name)) names.push_back(std::move(name));
  }
  const std::vector<ReportedFile> found = read_files(names);
  for (size_t i = 0; i < names.size(); ++i) {
    ManifestFile &file = *files.at(names[i]);
    file.bytes = found[i].bytes;
    file.header_sum = found[i].header_sum_text();
  }
  return !names.empty();
}

// Asks the ranks to report their files with this number, and waits for all reports. Once a rank has written, it does
// not matter whether it still lives: take_files() reads the files of a rank that has not reported them.
void Save::Keeper::await_shown(uint32_t number) {
  report_.files = number < written_files_.size() ? written_files_[number] : decltype(report_.files){};
  report_.file_number = number & 0xffffff;
  post(SaveState::collecting);
  uint32_t place = 1;
  bool failed = false;
  const auto interrupted = capture_error([&] {
    wait_until([&] {
      for (; place < team_.size() && !failed; ++place) {
        const SaveReport report = read(place);
        failed = has_failed(report.state);
        if (!failed && !has_reported(report, number)) return false;
      }
      return true;
    });
  });
  if (failed) fail(FSDP_ABORTED, "{}", failed_elsewhere);
  if (interrupted && given_up_.failed()) throw Error(*interrupted);
}

ReportedFile read_reported(int checkpoint, const std::string &name, const std::string &shown) {
  const auto [folder, leaf] = find_file(checkpoint, name, shown);
  const ShardReader reader(folder.get(), leaf, shown);
  ReportedFile file;
  file.bytes = reader.file_bytes();
  file.set_header_sum(reader.header_sum());
  return file;
}

// Reads sizes and checksums of files whose rank has written them and cannot report any more.
std::vector<ReportedFile> Save::Keeper::read_files(const std::vector<std::string> &names) {
  auto found = std::make_shared<std::vector<ReportedFile>>();
  work_on_disk([names, found](SaveFolder &folder) {
    for (const std::string &name : names)
      found->push_back(read_reported(folder.made->fd(), name, folder.made->shown(name)));
  });
  return *found;
}

// Every file must have bytes; a file without bytes means that a rank has not written what another rank described.
void Save::Keeper::collect_files() {
  std::map<std::string_view, ManifestFile *> files;
  for (ManifestFile &file : task_->manifest.files) files[file.name] = &file;
  const auto lacking = [&] { return std::ranges::find(task_->manifest.files, 0u, &ManifestFile::bytes); };
  bool any = true;
  for (uint32_t number = 0; any && (number == 0 || lacking() != task_->manifest.files.end()); ++number) {
    if (number) await_shown(number);
    any = false;
    for (uint32_t place = 0; place < team_.size(); ++place) any |= take_files(place, number, files);
  }
  if (const auto file = lacking(); file != task_->manifest.files.end())
    fail(FSDP_MISMATCH, "no rank has written {}: a model is to be added on all ranks of its mesh", file->name);
}

// The disk thread may outlive this object, so it gets copies of everything that it needs.
void Save::Keeper::commit() {
  const Manifest &manifest = task_->manifest;
  work_on_disk(
      [text = write_manifest(manifest), name = task_->name, replace = task_->order.choice.replace](SaveFolder &folder) {
        parse_manifest(text, folder.made->shown(manifest_name));
        folder.made->commit(name, text, replace);
        folder.made.reset();  // reset on this thread, because it may have files to remove
      });
}

// The checkpoint exists. Later errors do not change that, and become a warning.
void Save::Keeper::remove_older() {
  if (task_->order.choice.keep == 0) return;
  const auto failed = capture_error([&] {
    work_on_disk([choice = task_->order.choice](SaveFolder &folder) { remove_all_but(choice, *folder.folder); });
  });
  if (failed) result_.warning = format_text("older ones could not be removed: {}", failed->message);
}

// This rank's next save replaces its post, so all ranks must first have read how this save has ended. A rank that posts
// for another save has read it.
void Save::Keeper::await_heard() {
  const auto start = Clock::now();
  uint32_t place = 1;
  capture_error([&] {
    for (pause_ = {}; place < team_.size(); pause()) {
      for (; place < team_.size(); ++place) {
        SaveWord report;
        if (!world_.read_post(team_.world_rank(place), std::as_writable_bytes(std::span(&report, 1)), {})) break;
        if (report.save == number_ && report.state != SaveState::heard && report.state != SaveState::left) break;
      }
      if (Clock::now() - start > (given_up_.failed() ? patience_ : timeout_)) return;
      look_at_job();
    }
  });
}

// ---- the others ----

std::optional<Error> Save::Keeper::follow(std::optional<Error> failure) {
  if (failure) report_.set(*failure);
  post(failure ? SaveState::failed : SaveState::written);
  std::optional<SaveReport> end;
  std::optional<Error> lost = capture_error([&] {
    for (pause_ = {}; !(end = read_end()); pause()) {
      given_up_.check();
      look_at_job();
    }
  });
  if (lost) end = await_first(*lost);
  heard_ = end.has_value();
  if (end) return end->state == SaveState::committed ? std::nullopt : std::optional(end->to_error());
  if (!failure) report_.set(*lost), post(SaveState::failed);
  if (read(0).state != SaveState::committing) return failure && failure->status != FSDP_ABORTED ? failure : lost;
  lost->message = format_text("whether {} was committed is not known: {}", task_->name, lost->message);
  return lost;
}

// The job is lost. But if all ranks have written, the first rank still commits as long as it lives.
std::optional<SaveReport> Save::Keeper::await_first(const Error &lost) {
  const auto start = Clock::now();
  const uint32_t first_rank = team_.world_rank(0);
  const bool lives =
      lost.rank != static_cast<int32_t>(first_rank) && std::ranges::find(lost.ranks, first_rank) == lost.ranks.end();
  std::optional<SaveReport> end;
  for (pause_ = {}; !(end = read_end()) && lives && !given_up_.failed() && Clock::now() - start < timeout_;) pause();
  return end;
}

// Reports the files with the number that the first rank has posted.
void Save::Keeper::show_files(uint32_t number) noexcept {
  report_.files = number < written_files_.size() ? written_files_[number] : decltype(report_.files){};
  report_.file_number = number & 0xffffff;
  post(SaveState::written);
}

// The first rank's last report.
std::optional<SaveReport> Save::Keeper::read_end() noexcept {
  const SaveReport report = read(0);
  if (report.state == SaveState::collecting && report_.state == SaveState::written &&
      report.file_number != report_.file_number)
    show_files(report.file_number);
  if (report.state == SaveState::committed || report.state == SaveState::failed) return report;
  return std::nullopt;
}

}  // namespace fsdp::checkpoint
