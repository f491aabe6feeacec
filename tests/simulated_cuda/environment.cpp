// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/environment.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>

#include "simulated_cuda/hardware_queue.h"

namespace simulated {
namespace {

uint64_t *place_of(Settings &settings, std::string_view name) {
  if (name == "devices") return &settings.devices;
  if (name == "delay_us") return &settings.delay_us;
  if (name == "seed") return &settings.seed;
  if (name == "memory_mib") return &settings.memory_mib;
  if (name == "strict") return &settings.strict;
  if (name == "word_ns") return &settings.word_ns;
  if (name == "stream_room") return &settings.stream_room;
  if (name == "fair_queues") return &settings.fair_queues;
  if (name == "queues") return &settings.queues.emplace();
  return nullptr;
}

bool parse_word(Settings &settings, std::string_view word) {
  const size_t equals = word.find('=');
  if (equals == std::string_view::npos) return false;
  uint64_t *place = place_of(settings, word.substr(0, equals));
  const char *end = word.data() + word.size();
  if (!place) return false;
  const auto [stop, error] = std::from_chars(word.data() + equals + 1, end, *place);
  return error == std::errc{} && stop == end;
}

}  // namespace

std::optional<Settings> parse_settings(std::string_view text) {
  Settings settings;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(','));
    if (!parse_word(settings, word)) return std::nullopt;
    text.remove_prefix(word.size() + (word.size() < text.size()));
  }
  return settings.devices <= 8 ? std::optional(settings) : std::nullopt;
}

Settings environment_settings() {
  const char *text = std::getenv("SIMULATED_CUDA");
  const std::optional<Settings> settings = parse_settings(text ? text : "");
  if (settings) return *settings;
  std::fprintf(stderr, "simulated CUDA: no device, since SIMULATED_CUDA=%s is not understood\n", text);
  Settings none;
  none.devices = 0;
  return none;
}

uint64_t HardwareQueues::of_environment() {
  const char *text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const long long asked = text ? std::strtoll(text, nullptr, 10) : 0;
  return asked < 1 ? usual : std::min(static_cast<uint64_t>(asked), most);
}

}  // namespace simulated
