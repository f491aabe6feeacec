// SPDX-License-Identifier: Apache-2.0
#include "run/fault_lines.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>

namespace run {
namespace {

namespace fs = std::filesystem;
constexpr const char *file_name = "fsdp-fault-line.so";

// In a build folder the library lies beside this program. Once installed, the way to it is the same wherever the whole
// was moved to.
std::string find_preload() {
  const fs::path own = fs::read_symlink("/proc/self/exe").parent_path();
  const fs::path installed = own / fs::path(FSDP_PRELOAD_DIRECTORY).lexically_relative(FSDP_BIN_DIRECTORY);
  for (const fs::path &folder : {own, installed}) {
    const std::string path = (folder / file_name).lexically_normal().string();
    if (!fs::exists(path)) continue;
    if (path.find_first_of(" :") == std::string::npos) return path;
    throw std::runtime_error(fmt::format("LD_PRELOAD cannot name '{}'", path));
  }
  throw std::runtime_error(
      fmt::format("there is no {} in '{}' or '{}'", file_name, own.string(), installed.lexically_normal().string()));
}

// Only this user may read it: addresses help to attack a process.
std::string make_directory() {
  std::string path = (fs::temp_directory_path() / "fsdp-run.XXXXXX").string();
  if (!mkdtemp(path.data())) throw std::system_error(errno, std::generic_category(), "making " + path);
  return path;
}

std::string behind(const char *name, const char *separator, const std::string &value) {
  const char *const set = std::getenv(name);
  return set && *set ? set + (separator + value) : value;
}

std::string before(const char *name, const char *separator, const std::string &value) {
  const char *const set = std::getenv(name);
  return set && *set ? value + separator + set : value;
}

}  // namespace

FaultLines::FaultLines() {
  try {
    preload_ = find_preload();
    directory_ = make_directory();
  } catch (const std::exception &error) {
    fmt::print(stderr, "fsdp-run: --debug: faults will not be explained: {}\n", error.what());
  }
}

FaultLines::~FaultLines() {
  std::error_code ignored;
  if (!directory_.empty()) fs::remove_all(directory_, ignored);
}

// AddressSanitizer refuses to start behind another library, because that one could have replaced functions; this one
// replaces none.
void FaultLines::add_to(RankProcess::Environment &environment) const {
  if (directory_.empty()) return;
  environment.emplace_back("FSDP_DEBUG_VIEWS", directory_);
  environment.emplace_back("LD_PRELOAD", behind("LD_PRELOAD", ":", preload_));
  environment.emplace_back("ASAN_OPTIONS", before("ASAN_OPTIONS", ":", "verify_asan_link_order=0"));
}

}  // namespace run
