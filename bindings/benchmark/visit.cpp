// SPDX-License-Identifier: Apache-2.0
//
// What a visit of a group costs over fsdp.hpp; visit.c says what it is.
//
//   visit_cpp index    views by their numbers
//   visit_cpp name     views by their names
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fsdp.hpp>

namespace {

constexpr int views = 12, visits = 20000, rounds = 9;
float sum = 0;

double time_visits(fsdp::Group &group, const std::vector<std::string> &names, bool by_name) {
  const auto began = std::chrono::steady_clock::now();
  for (int visit = 0; visit < visits; ++visit) {
    const fsdp::Weights weights = group.unshard(fsdp::Phase::forward);
    for (std::size_t p = 0; p < views; ++p) sum += (by_name ? weights.get<float>(names[p]) : weights.get<float>(p))[0];
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
  return took.count() / visits;
}

}  // namespace

int main(int count, char **arguments) {
  const bool by_name = count > 1 && std::string(arguments[1]) == "name";
  fsdp::Context context = std::move(fsdp::Context::local(1)[0]);
  fsdp::Model model(context);
  std::vector<std::string> names;
  std::vector<fsdp::Param> params;
  for (int p = 0; p < views; ++p) {
    names.push_back("w" + std::to_string(p));
    params.emplace_back(names.back(), std::vector<std::uint64_t>{64, 64});
  }
  fsdp::Group group = model.create_group("layer", params);
  model.seal();
  model.publish_weights();
  std::vector<double> times;
  time_visits(group, names, by_name);
  for (int round = 0; round < rounds; ++round) times.push_back(time_visits(group, names, by_name));
  std::sort(times.begin(), times.end());
  std::printf("%.1f\n", times[rounds / 2]);
  return sum == 0 ? 0 : 1;  // the weights were never loaded
}
