// SPDX-License-Identifier: Apache-2.0
#include <fsdp.hpp>

#include <cstdio>

int main() try {
  fsdp::Context context;  // rank and world size from fsdp-run
  fsdp::Model model(context);
  fsdp::Group layer = model.create_group("layer", {fsdp::Param("weight", {4, 8})});
  model.seal();  // plans and allocates everything, compares all ranks
  layer.load_param("weight", std::vector<float>(32));
  model.publish_weights();

  for (int step = 0; step < 100; ++step) {
    fsdp::Weights weights = layer.unshard(fsdp::Phase::backward);
    fsdp::span<const float> w = weights["weight"];
    fsdp::span<float> grad = layer.acquire_grad("weight");
    for (std::size_t i = 0; i < w.size(); ++i) grad[i] = w[i] - 1;  // the loss is sum (w - 1)^2 / 2
    weights.reshard();
    layer.reduce_grad(FSDP_LAST);
    model.finish_grads();
    model.step_adamw(0.1);
  }

  std::printf("w[0] = %.2f\n", static_cast<double>(layer.read_param<float>("weight")[0]));  // close to 1
  context.close();
} catch (const fsdp::Error &error) {
  std::fprintf(stderr, "rank %d is to blame: %s\n", error.rank(), error.what());
  return 1;
}
