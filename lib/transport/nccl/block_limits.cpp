// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/block_limits.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "base/error.h"

namespace fsdp::transport::nccl {
namespace {

constexpr int most_blocks = 64;  // NCCL's channels, to which it would cut more without a word
constexpr int largest_cluster = 8;

int read_number(const char *name, const char *value, int lowest, int highest) {
  if (!value || !*value) return undefined;
  const std::string_view text(value);
  int number = 0;
  const auto [end, error] = std::from_chars(text.begin(), text.end(), number);
  if (error != std::errc{} || end != text.end() || number < lowest || number > highest)
    fail(FSDP_INVALID_ARGUMENT, "{} is '{}': a whole number in [{}, {}] is needed", name, text, lowest, highest);
  return number;
}

}  // namespace

BlockLimits read_block_limits() {
  BlockLimits limits;
  limits.least = read_number("FSDP_NCCL_MIN_CTAS", std::getenv("FSDP_NCCL_MIN_CTAS"), 1, most_blocks);
  limits.most = read_number("FSDP_NCCL_MAX_CTAS", std::getenv("FSDP_NCCL_MAX_CTAS"), 1, most_blocks);
  limits.cluster =
      read_number("FSDP_NCCL_CGA_CLUSTER_SIZE", std::getenv("FSDP_NCCL_CGA_CLUSTER_SIZE"), 0, largest_cluster);
  limits.of_switches = read_number("FSDP_NCCL_NVLS_CTAS", std::getenv("FSDP_NCCL_NVLS_CTAS"), 1, most_blocks);
  if (limits.most != undefined && limits.least > limits.most)
    fail(FSDP_INVALID_ARGUMENT, "FSDP_NCCL_MIN_CTAS is {} and FSDP_NCCL_MAX_CTAS {}, which is less", limits.least,
         limits.most);
  return limits;
}

void check_block_limits(const BlockLimits &limits, const Library &library) {
  if (limits.of_switches == undefined || library.since(Library::blocks_of_switches)) return;
  fail(FSDP_UNSUPPORTED, "FSDP_NCCL_NVLS_CTAS is {}, which needs NCCL {} or later: {} is {}", limits.of_switches,
       version_text(Library::blocks_of_switches), library.path, version_text(library.version));
}

std::string text_of(const BlockLimits &limits) {
  std::string text;
  const auto add = [&](const char *name, int limit) {
    if (limit != undefined) text += format_text("{}{}={}", text.empty() ? "" : ", ", name, limit);
  };
  add("FSDP_NCCL_MIN_CTAS", limits.least);
  add("FSDP_NCCL_MAX_CTAS", limits.most);
  add("FSDP_NCCL_CGA_CLUSTER_SIZE", limits.cluster);
  add("FSDP_NCCL_NVLS_CTAS", limits.of_switches);
  return text;
}

// NCCL compares the two before it fills in what is undefined, so one without the other would be too many.
void apply(const BlockLimits &limits, Config &config) {
  config.min_ctas = limits.least;
  config.max_ctas = limits.least != undefined && limits.most == undefined ? most_blocks : limits.most;
  config.cga_cluster_size = limits.cluster;
  config.nvls_ctas = limits.of_switches;
}

}  // namespace fsdp::transport::nccl
