// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/convert/copied_files.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "checkpoint/files/aligned_bytes.h"
#include "checkpoint/files/folder_tree.h"
#include "checkpoint/files/in_file.h"
#include "checkpoint/files/out_file.h"

namespace fsdp::checkpoint {
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

}  // namespace fsdp::checkpoint
