// SPDX-License-Identifier: Apache-2.0

#include "membership/liveness/deaths.h"

#include <climits>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/text.h"

namespace fsdp::membership {

namespace {

// The number behind this name at the beginning of a line. A line may be longer than what is read at once; its rest does
// not begin with such a name.
std::optional<int> read_field(const char *path, const char *name) noexcept {
  const std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen(path, "re"), std::fclose);
  if (!file) return {};
  char line[256];
  while (std::fgets(line, sizeof line, file.get())) {
    int number = 0;
    if (std::strncmp(line, name, std::strlen(name)) == 0 && std::sscanf(line + std::strlen(name), "%d", &number) == 1)
      return number;
  }
  return {};
}

}  // namespace

bool is_dumping_core(const Fd &process, const char *proc) noexcept {
  char path[PATH_MAX];
  std::snprintf(path, sizeof path, "%s/self/fdinfo/%d", proc, process.get());
  const std::optional<int> number = read_field(path, "Pid:");
  if (!number || *number <= 0) return false;  // the process was waited for, or is of another namespace
  std::snprintf(path, sizeof path, "%s/%d/status", proc, *number);
  return read_field(path, "CoreDumping:").value_or(0) == 1;
}

void Deaths::find(const Control &control, Links &links, const Pulse &pulse, const RankSet &known) {
  const auto ended = [&](uint32_t rank) {
    const Membership state = control.membership(rank);
    if (state != Membership::left && state != Membership::gone && !known.contains(rank)) ranks_.add(rank);
  };
  links.find_dead(std::ref(ended));  // std::ref avoids an allocation, since waits call this
  pulse.find_late([&](uint32_t rank) {
    if (ranks_.contains(rank) || known.contains(rank) || !links.dumps_core(rank)) return;
    ranks_.add(rank);
    dumping_.add(rank);
  });
}

Accusation Deaths::accuse(const std::string &where, const Control &control) const {
  RankSet ended;
  std::vector<std::string> dumping;
  for (const uint32_t rank : ranks_.list())
    if (dumping_.contains(rank))
      dumping.push_back(name_process(rank, control.process(rank), control.host(rank)));
    else
      ended.add(rank);
  std::string what = ended.empty() ? "" : death_text(ended);
  if (!dumping.empty()) what += (what.empty() ? "" : "; ") + dump_text(dumping);
  return accuse_dead(where, ranks_, what);
}

std::string dump_text(const std::vector<std::string> &names) {
  const bool one = names.size() == 1;
  return format_text("{} {} {} dumping core", one ? "rank" : "ranks", fmt::join(names, ", "), one ? "is" : "are");
}

}  // namespace fsdp::membership
