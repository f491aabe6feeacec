// SPDX-License-Identifier: Apache-2.0
// Planning: the seal of a model of 10,000 parameters in a context that only plans, for jobs of several sizes.
#include "fmt/format.h"
#include "handles.h"
#include "layout/flat_layout.h"
#include "perf/bench.h"

namespace perf {
namespace {

constexpr uint64_t param_count = 10'000;
using Shapes = std::vector<std::vector<uint64_t>>;

// The layers of a transformer 4096 wide, twelve parameters each.
Shapes model_shapes() {
  constexpr uint64_t width = 4096;
  const Shapes layer = {
      {3 * width, width}, {3 * width}, {width, width},     {width}, {width}, {width}, {width}, {width},
      {4 * width, width}, {4 * width}, {width, 4 * width}, {width}};
  Shapes shapes;
  while (shapes.size() < param_count) shapes.push_back(layer[shapes.size() % layer.size()]);
  return shapes;
}

struct Planned {
  double seconds, padding;
};

template <uint64_t per_group>
Planned plan_model(const Shapes &shapes, uint32_t ranks) {
  fsdp_context *context = nullptr;
  tools::check(fsdp_create_plan_context(ranks, 0, nullptr, &context));
  const tools::Context guard(context);
  fsdp_model *model = nullptr;
  tools::check(fsdp_create_model(context, nullptr, &model), context);
  const tools::Model model_guard(model);
  for (uint64_t first = 0; first < shapes.size(); first += per_group) {
    std::vector<fsdp_param> params;
    std::vector<std::string> names;
    for (uint64_t i = first; i < std::min<uint64_t>(first + per_group, shapes.size()); ++i)
      names.push_back(fmt::format("p{}", i));
    for (uint64_t i = 0; i < names.size(); ++i) {
      fsdp_param param = FSDP_PARAM_INIT;
      param.name = names[i].c_str();
      param.shape = shapes[first + i].data();
      param.dimension_count = static_cast<uint32_t>(shapes[first + i].size());
      params.push_back(param);
    }
    fsdp_group *group = nullptr;
    tools::check(fsdp_create_group(model, fmt::format("g{}", first).c_str(), params.data(), params.size(),
                                   sizeof(fsdp_param), nullptr, &group),
                 context);
  }
  const double start = now();
  tools::check(fsdp_seal_model(model), context);
  const double seconds = now() - start;
  fsdp_model_info info = FSDP_MODEL_INFO_INIT;
  tools::check(fsdp_get_model_info(model, &info), context);
  return {seconds, static_cast<double>(info.padding_count) / static_cast<double>(info.element_count)};
}

Planned plan_layout(const Shapes &shapes, uint32_t ranks) {
  std::vector<fsdp::layout::TensorSpec> tensors;
  for (const auto &shape : shapes) tensors.push_back({shape});
  const double start = now();
  const auto layout = fsdp::layout::build_flat_layout(tensors, ranks);
  const double seconds = now() - start;
  return {seconds, static_cast<double>(layout.full_count - layout.used_count) / static_cast<double>(layout.used_count)};
}

template <class Plan>
void report(Bench &bench, const char *variant, uint32_t ranks, Plan &&plan) {
  const Shapes shapes = model_shapes();
  std::vector<double> seconds;
  double padding = 0;
  for (uint32_t i = 0; i < bench.request.pairs; ++i) {
    const Planned planned = plan(shapes, ranks);
    seconds.push_back(planned.seconds);
    padding = planned.padding;
  }
  Measured measured;
  measured.seconds = median(seconds);
  measured.pairs = bench.request.pairs;
  Line line = make_line(bench, "layout", variant, "fp32", 0, measured);
  line.ranks = ranks;
  line.more = {{"parameters", param_count}, {"padding_percent", 100 * padding}};
  bench.report.add(line);
}

}  // namespace

// Local work: one rank does it, the others rest.
void run_layout(Bench &bench) {
  if (bench.rank() == 0)
    for (const uint32_t ranks : {2u, 256u, 16384u}) {
      report(bench, "one bucket", ranks, plan_layout);
      report(bench, "seal, layers", ranks, plan_model<12>);
      report(bench, "seal, a group each", ranks, plan_model<1>);
    }
  bench.lab.meet();
}

}  // namespace perf
