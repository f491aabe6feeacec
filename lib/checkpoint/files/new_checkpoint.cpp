// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "checkpoint/files/file.h"
#include "checkpoint/files/folder.h"

namespace fsdp::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

void write_text(int folder, const std::string &name, const std::string &shown, const std::string &text) {
  const AlignedBytes buffer(text.size());
  std::memcpy(buffer.bytes().data(), text.data(), text.size());
  std::memset(buffer.bytes().data() + text.size(), 0, buffer.bytes().size() - text.size());
  OutFile file(folder, name, shown);
  file.write(0, buffer.bytes());
  file.finish(text.size());
}

}  // namespace

NewCheckpoint::NewCheckpoint(const Folder &folder, const std::string &name)
    : folder_(folder), id_(make_id()), name_(name) {
  if (name_.empty())
    make_unnamed();
  else
    make_named();
  owns_ = true;
}

void NewCheckpoint::make_named() {
  const std::string shown = folder_.shown(name_);
  ::unlinkat(folder_.fd(), name_.c_str(), AT_REMOVEDIR);  // removes an empty folder of a job that died at this point
  if (::mkdirat(folder_.fd(), name_.c_str(), 0700) != 0) {
    if (errno == EEXIST) fail(FSDP_INVALID_STATE, "{}: there is a checkpoint of that name already", shown);
    fail_errno(errno, format_text("{}: making the folder", shown));
  }
  try {
    fd_ = open_folder(folder_.fd(), name_, shown);
    owner_ = make_owner(fd_.get(), named_owner(id_), shown);
  } catch (...) {
    // The folder may belong to another job by now, so it is not removed if it has contents.
    ::unlinkat(folder_.fd(), name_.c_str(), AT_REMOVEDIR);
    throw;
  }
}

void NewCheckpoint::make_unnamed() {
  const std::string unowned = std::string(unowned_prefix) + id_, shown = folder_.shown(unowned);
  if (::mkdirat(folder_.fd(), unowned.c_str(), 0700) != 0)
    fail_errno(errno, format_text("{}: making the folder", shown));
  try {
    fd_ = open_folder(folder_.fd(), unowned, shown);
    owner_ = make_owner(fd_.get(), id_, shown);
    if (::renameat(folder_.fd(), unowned.c_str(), folder_.fd(), written_name().c_str()) != 0)
      fail_errno(errno, format_text("{}: renaming it to {}", shown, written_name()));
  } catch (...) {
    clear(unowned);
    throw;
  }
}

// If something cannot be removed now, a later job removes it.
void NewCheckpoint::clear(const std::string &name) const noexcept {
  try {
    remove_tree(folder_.fd(), name, folder_.shown(name));
  } catch (const std::exception &) {
  }
}

// If folders are cached, names that another host made appear late.
NewCheckpoint::NewCheckpoint(const Folder &folder, const std::string &id, uint32_t patience_ms,
                             const std::function<void()> &poll, const std::string &name)
    : folder_(folder), id_(id), name_(name) {
  const std::string owner = name_.empty() ? id_ : named_owner(id_);
  const auto end = Clock::now() + std::chrono::milliseconds(patience_ms);
  do {
    fd_ = Fd(::openat(folder_.fd(), written_name().c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!fd_ && errno != ENOENT && errno != ESTALE)
      fail_errno(errno, format_text("{}: cannot be opened as a folder", folder_.shown(written_name())));
    if (fd_ && read_owner(fd_.get()) == owner) return;
    poll();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  } while (Clock::now() < end);
  fail(FSDP_INVALID_STATE, "{}: the folder is not shared: this host does not see {}, which the first rank made there",
       folder_.path(), written_name());
}

NewCheckpoint::~NewCheckpoint() {
  if (owns_) clear(written_name());
}

Fd NewCheckpoint::make_folder(const std::string &name) const {
  if (name.empty()) return open_folder(fd(), ".", shown("."));
  const auto make = [&](const std::string &path) {
    if (::mkdirat(fd(), path.c_str(), 0700) != 0 && errno != EEXIST)
      fail_errno(errno, format_text("{}: making the folder", shown(path)));
  };
  if (const size_t slash = name.find('/'); slash != name.npos) make(name.substr(0, slash));
  make(name);
  return open_folder(fd(), name, shown(name));
}

void NewCheckpoint::put(const std::string &name, const std::string &text) const {
  write_text(fd(), name, shown(name), text);
}

// The manifest is written last, so all files that it lists exist when it does.
void NewCheckpoint::write_manifest_last(const std::string &manifest) {
  sync_tree(fd(), shown("."));
  put(manifest_name, manifest);
  owns_ = false;
}

void NewCheckpoint::commit(const std::string &name, const std::string &manifest, bool replace) {
  if (name_.empty()) {
    put(manifest_name, manifest);
    commit(name, replace);
  } else {
    write_manifest_last(manifest);
    leave(name);
  }
}

void NewCheckpoint::commit(const std::string &name, bool replace) {
  sync_tree(fd(), shown("."));
  give_name(name, replace);
  leave(name);
}

// The owner file is removed only now, because the folder would belong to no job without it. If it stays, it does no
// harm.
void NewCheckpoint::leave(const std::string &name) {
  ::unlinkat(fd(), owner_name, 0);
  try {
    if (!name_.empty()) sync_folder(fd(), shown("."));
    sync_folder(folder_.fd(), folder_.path());
  } catch (Error &error) {
    error.message =
        format_text("{} has its name, but might lose it with the power: {}", folder_.shown(name), error.message);
    throw;
  }
}

// The rename never overwrites an existing checkpoint: it fails, or it exchanges the two names in one step.
void NewCheckpoint::give_name(const std::string &name, bool replace) {
  const std::string from = written_name();
  int result = ::renameat2(folder_.fd(), from.c_str(), folder_.fd(), name.c_str(), RENAME_NOREPLACE);
  if (result != 0 && (errno == EINVAL || errno == ENOSYS))
    result = ::renameat(folder_.fd(), from.c_str(), folder_.fd(), name.c_str());
  if (result == 0) {
    owns_ = false;
    return;
  }
  if (errno != EEXIST && errno != ENOTEMPTY)
    fail_errno(errno, format_text("{}: giving it the name {}", folder_.shown(from), name));
  if (!replace) fail(FSDP_INVALID_STATE, "{}: there is a checkpoint of that name already", folder_.shown(name));
  exchange_names(from, name);
}

void NewCheckpoint::exchange_names(const std::string &from, const std::string &name) {
  if (::renameat2(folder_.fd(), from.c_str(), folder_.fd(), name.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno == EINVAL || errno == ENOSYS)
    fail(FSDP_UNSUPPORTED,
         "{}: this file system cannot exchange it for the new one; remove it first, or save elsewhere",
         folder_.shown(name));
  fail_errno(errno, format_text("{}: exchanging it for {}", folder_.shown(name), from));
}

}  // namespace fsdp::checkpoint
