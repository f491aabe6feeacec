// SPDX-License-Identifier: Apache-2.0
// Reads NCCL's own variables, which override the configuration of a communicator, and the variables of this library.
#include <strings.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "simulated_nccl/state.h"

namespace simulated::nccl {
namespace {

constexpr int most_ctas = 64, largest_cluster = 8;

struct Named {
  const char *name;
  Knob knob;
};
constexpr Named named[] = {
    {"version", Knob::version},
    {"round_sums_once", Knob::round_sums_once},
    {"rank_order_sums", Knob::rank_order_sums},
    {"free_alone", Knob::free_alone},
    {"launch_on_caller", Knob::launch_on_caller},
    {"instant_windows", Knob::instant_windows},
    {"multiprocessors", Knob::multiprocessors},
    {"endless_room", Knob::endless_room},
    {"copies_by_policy", Knob::copies_by_policy},
    {"lone_kernels", Knob::lone_kernels},
    {"any_windows", Knob::any_windows},
};

bool set_word(std::string_view word, std::array<int64_t, 40> &knobs) {
  const size_t equals = word.find('=');
  if (equals == std::string_view::npos) return false;
  const auto *found = std::find_if(std::begin(named), std::end(named),
                                   [&](const Named &one) { return word.substr(0, equals) == one.name; });
  if (found == std::end(named)) return false;
  const char *end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data() + equals + 1, end, knobs[static_cast<size_t>(found->knob)]);
  return error == std::errc{} && stop == end;
}

// NCCL reads the number with strtoll, so text that is no number counts as 0.
std::optional<int64_t> read_parameter(const std::string &name) {
  const char *text = std::getenv(("NCCL_" + name).c_str());
  if (!text || !*text) return std::nullopt;
  errno = 0;
  const long long value = std::strtoll(text, nullptr, 0);
  return errno ? std::nullopt : std::optional<int64_t>(value);
}

std::optional<int> read_policy() {
  const char *text = std::getenv("NCCL_CTA_POLICY");
  if (!text || !*text) return std::nullopt;
  char *end = nullptr;
  const long bits = std::strtol(text, &end, 0);
  if (end != text) return static_cast<int>(bits);
  return ::strcasestr(text, "ZERO") ? cta_policy_zero : 0;
}

void take(const char *name, int lowest, int &field) {
  if (const auto value = parameter(name); value && *value >= lowest) field = static_cast<int>(*value);
}

}  // namespace

std::array<int64_t, 40> first_knobs() {
  std::array<int64_t, 40> knobs{};
  const char *text = std::getenv("SIMULATED_NCCL");
  for (std::string_view rest = text ? text : ""; !rest.empty();) {
    const std::string_view word = rest.substr(0, rest.find(','));
    if (!set_word(word, knobs)) {
      std::fprintf(stderr, "simulated NCCL: SIMULATED_NCCL=%s is not understood\n", text);
      std::abort();
    }
    rest.remove_prefix(word.size() + (word.size() < rest.size()));
  }
  return knobs;
}

std::optional<int64_t> parameter(const std::string &name) {
  const auto [found, added] = state().parameters.try_emplace(name);
  if (added) found->second = read_parameter(name);
  return found->second;
}

// Applies defaults, variables and limits in NCCL's order.
void override_by_environment(Config &config) {
  if (config.blocking == undefined) config.blocking = 1;
  if (const auto value = parameter("COMM_BLOCKING"); value == 0 || value == 1)
    config.blocking = static_cast<int>(*value);
  take("CGA_CLUSTER_SIZE", 0, config.cga_cluster_size);
  config.cga_cluster_size = std::min(config.cga_cluster_size, largest_cluster);
  take("MIN_CTAS", 1, config.min_ctas);
  take("MAX_CTAS", 1, config.max_ctas);
  if (const auto value = parameter("COMM_SPLIT_SHARE_RESOURCES")) config.split_share = static_cast<int>(*value);
  if (config.split_share != 1) config.split_share = 0;
  if (const auto policy = read_policy()) config.cta_policy = *policy;
  take("NVLS_NCHANNELS", 1, config.nvls_ctas);
  if (version() >= version_code(2, 26) && parameter("LAUNCH_ORDER_IMPLICIT").value_or(0) != 0)
    config.launch_order_implicit = 1;
  config.min_ctas = std::min(config.min_ctas, most_ctas);
  config.max_ctas = std::min(config.max_ctas, most_ctas);
  if (config.max_ctas != undefined) config.min_ctas = std::min(config.min_ctas, config.max_ctas);
}

}  // namespace simulated::nccl
