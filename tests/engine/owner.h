// SPDX-License-Identifier: Apache-2.0
// All handles of one rank, to be destroyed one by one.
#pragma once

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "harness.h"

namespace harness {

enum class Handle { context, model, mesh };
using Order = std::vector<Handle>;

class Owner {
 public:
  Owner(fsdp_context *context, const Scenario &given, bool seal) : context_(context), scenario_(given) {
    FSDP(fsdp_create_mesh(context, nullptr, &mesh_));
    scenario_.model.mesh = mesh_;
    rank_ = std::make_unique<Rank>(context, scenario_, seal);
  }
  ~Owner() {
    for (const Handle handle : {Handle::mesh, Handle::model, Handle::context}) destroy(handle);
    rank_->model = nullptr;
  }
  Rank &rank() { return *rank_; }
  fsdp_context *context() const { return context_; }

  void destroy(Handle handle) {
    if (handle == Handle::context) fsdp_destroy_context(std::exchange(context_, nullptr));
    if (handle == Handle::mesh) fsdp_destroy_mesh(std::exchange(mesh_, nullptr));
    // The pointer stays as it is: another thread may be about to use it in a call.
    if (handle == Handle::model && !std::exchange(model_destroyed_, true)) fsdp_destroy_model(rank_->model);
  }
  // The seconds it took.
  double destroy_all(const Order &order, bool other_thread) {
    double slowest = 0;
    for (const Handle handle : order) {
      const double start = now();
      if (other_thread)
        std::thread([&] { destroy(handle); }).join();
      else
        destroy(handle);
      slowest = std::max(slowest, now() - start);
    }
    return slowest;
  }

 private:
  fsdp_context *context_;
  Scenario scenario_;
  fsdp_mesh *mesh_ = nullptr;
  std::unique_ptr<Rank> rank_;
  bool model_destroyed_ = false;
};

}  // namespace harness
