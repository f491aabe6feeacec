// SPDX-License-Identifier: Apache-2.0
#include "gpu_order.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "device.h"

namespace order {
namespace {

constexpr int nap_ms = 6;                // of a kernel
constexpr uint32_t piece_us = 2000;      // before each piece of work of a library stream
constexpr uint32_t rank_piece_us = 500;  // ... of all streams of the late rank
constexpr uint32_t order_steps = 2, microbatches = 2;

// A number that identifies its place and does not depend on the weights, so that only the library orders gradients
// after gathers.
float grad_value(uint32_t rank, uint32_t step, uint32_t microbatch, size_t group, size_t param, uint64_t i) {
  return static_cast<float>((rank + 1) * 3 + step * 7 + microbatch * 5 + group * 11 + param * 2 + i % 5);
}

class Program {
 public:
  Program(Rank &rank, Seen &seen, bool apart, Late late) : rank_(rank), seen_(seen), late_(late) {
    for (size_t s = 0; s < streams_.size(); ++s)
      if (apart || s == 0) own_.emplace_back();
    for (size_t s = 0; s < streams_.size(); ++s) streams_[s] = own_[apart ? s : 0];
    if (late == Late::rank && rank.rank == 1)
      for (const Stream &stream : own_) simulated::set_stream_delay(stream, rank_piece_us);
  }

  void step(uint32_t step) {
    for (uint32_t m = 0; m < microbatches; ++m) {
      for (size_t g = 0; g < groups(); ++g) visit(g, FSDP_FORWARD, g);
      for (size_t g = groups(); g-- > 0;) {
        visit(g, FSDP_BACKWARD, g + 1);
        give(g, step, m);
      }
      if (late_ == Late::rank && rank_.rank == 1) pause_ms(nap_ms);
    }
    const cudaStream_t first = updater(step), second = updater(step + 1);
    FSDP(fsdp_finish_grads(rank_.model, 0.5, 0, first));
    be_late(Late::updates, second);
    FSDP(fsdp_scale_grads(rank_.model, 0.25, second));
    be_late(Late::updates, first);
    FSDP(fsdp_step_adamw(rank_.model, 0.125, nullptr, first));
  }

  // The gradient that is lent last is in the buffer that the next step first lends to another group. What a discarded
  // step has read does not count. The ranks first meet, because a discard would otherwise fail calls that a rank has
  // still to make.
  void discard_step(uint32_t step) {
    to_ = &given_up_;
    for (size_t g = 0; g < 2; ++g) visit(g, FSDP_FORWARD, g);
    to_ = &seen_.weights;
    for (const size_t g : {3u, 2u}) give(g, step, 0);
    for (const size_t p : {0u, 1u}) write(1, p, writer(1), 1, [](uint64_t) { return 1000.0f; });
    double one = 1;
    FSDP(fsdp_all_reduce_values(rank_.context, nullptr, &one, 1, FSDP_VALUE_SUM));
    FSDP(fsdp_discard_step(rank_.model, updater(step)));
  }

  void end() {
    for (const Stream &stream : own_) CUDA(cudaStreamSynchronize(stream));
    seen_.last = rank_.read_all();
  }

 private:
  size_t groups() const { return rank_.groups.size(); }
  cudaStream_t reader(size_t turn) const { return streams_[turn % 2]; }
  cudaStream_t writer(size_t turn) const { return streams_[2 + turn % 2]; }
  cudaStream_t updater(size_t turn) const { return streams_[4 + turn % 2]; }
  void be_late(Late who, cudaStream_t stream) const {
    if (late_ == who) nap(stream, nap_ms);
    if (late_ == Late::writer && who == Late::writers && stream == writer(1)) nap(stream, 2 * nap_ms);
  }

  // Holds the group, or its pieces one by one on two streams in turn.
  void visit(size_t g, fsdp_phase phase, size_t turn) {
    if (!rank_.setup.by_piece) {
      FSDP(fsdp_unshard(rank_.groups[g], phase, 0, reader(turn)));
      look(g, 0, rank_.def(g).pieces(), phase, reader(turn));
      FSDP(fsdp_reshard(rank_.groups[g], phase, 0, reader(turn)));
      return;
    }
    for (uint32_t i = 0; i < rank_.def(g).pieces(); ++i) {
      const uint32_t piece = phase == FSDP_BACKWARD ? rank_.def(g).pieces() - 1 - i : i;
      FSDP(fsdp_unshard_piece(rank_.groups[g], piece, phase, 0, reader(turn + i)));
      look(g, piece, piece + 1, phase, reader(turn + i));
      FSDP(fsdp_reshard_piece(rank_.groups[g], piece, phase, 0, reader(turn + i)));
    }
  }

  // Records what a kernel reads between unshard and reshard in the pieces [begin, end), for the comparison at the end.
  void look(size_t g, uint32_t begin, uint32_t end, fsdp_phase phase, cudaStream_t stream) {
    be_late(Late::readers, stream);
    for (size_t p = 0; p < rank_.def(g).params.size(); ++p) {
      if (rank_.def(g).params[p].piece < begin || rank_.def(g).params[p].piece >= end) continue;
      fsdp_tensor view = FSDP_TENSOR_INIT;
      FSDP(fsdp_get_param(rank_.groups[g], p, phase, &view));
      auto &to = to_->emplace_back(view.element_count * view.element_size);
      CUDA(simulated::enqueue(stream, [from = view.data, &to] { std::memcpy(to.data(), from, to.size()); }));
    }
  }

  void write(size_t g, size_t p, cudaStream_t stream, float times, const std::function<float(uint64_t)> &value) {
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    FSDP(fsdp_acquire_grad(rank_.groups[g], p, 0, stream, &grad, &accumulate));
    be_late(Late::writers, stream);
    CUDA(simulated::enqueue(stream, [=, to = static_cast<float *>(grad.data), count = grad.element_count] {
      for (uint64_t i = 0; i < count; ++i) to[i] = (accumulate ? to[i] * times : 0.0f) + value(i);
    }));
  }

  // Writes the parameters on two streams in turn, and the first one once more on the other stream. The order of these
  // two writes matters.
  void give(size_t g, uint32_t step, uint32_t m) {
    const size_t turn = g + step + m;
    for (size_t p = 0; p < rank_.def(g).params.size(); ++p)
      write(g, p, writer(turn + p), 1, [=, r = rank_.rank](uint64_t i) { return grad_value(r, step, m, g, p, i); });
    write(g, 0, writer(turn + 1), 2, [](uint64_t) { return 1.0f; });
    FSDP(fsdp_reduce_grad(rank_.groups[g], m + 1 == microbatches ? FSDP_LAST : 0, reader(0)));
  }

  Rank &rank_;
  Seen &seen_;
  Late late_;
  std::deque<std::vector<std::byte>> given_up_, *to_ = &seen_.weights;
  std::deque<Stream> own_;
  std::array<cudaStream_t, 6> streams_{};
};

}  // namespace

Scenario order_scenario(Layout layout, fsdp_strategy strategy) {
  Scenario setup = graph_scenario(strategy, layout == Layout::one                               ? 1
                                            : layout == Layout::flat || layout == Layout::debug ? 2
                                                                                                : 4);
  setup.groups.clear();
  for (int g = 0; g < 4; ++g) {
    const std::string name = "layer." + std::to_string(g);
    setup.groups.push_back({name, {{name + ".w", {24, 8}}, {name + ".v", {13}}}});
  }
  setup.set_dtype(FSDP_BFLOAT16);
  setup.model.grad_dtype = FSDP_FLOAT32;
  if (layout == Layout::one) setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
  if (layout == Layout::hsdp || layout == Layout::hfsdp) setup.mesh.replicate_size = setup.mesh.shard_size = 2;
  if (layout == Layout::hfsdp) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
  if (layout == Layout::hosts) setup.context.ranks_per_host = 2;
  if (layout == Layout::debug) setup.context.flags = FSDP_CONTEXT_DEBUG;
  return setup;
}

// The seal makes those of gathers and of reduces first, then those on which both go through host memory, and that of
// the outer axis after its ways through host memory.
void LibraryStreams::find() {
  std::vector<cudaStream_t> made;
  for (const cudaStream_t stream : simulated::streams_of_this_thread())
    if (std::find(before_.begin(), before_.end(), stream) == before_.end()) made.push_back(stream);
  REQUIRE(made.size() == 6 || made.size() == 11);
  gathers_ = made[0];
  reduces_ = made[1];
  outer_ = made.size() == 11 ? made[10] : nullptr;
  all_ = made;
}

void LibraryStreams::delay(Late late) const {
  if (late == Late::gathers) simulated::set_stream_delay(gathers_, piece_us);
  if (late == Late::reduces) simulated::set_stream_delay(reduces_, piece_us);
  if (late == Late::outer) simulated::set_stream_delay(outer_, piece_us);
  if (late == Late::rank)
    for (const cudaStream_t stream : all_) simulated::set_stream_delay(stream, rank_piece_us);
}

std::vector<Seen> run_program(const Scenario &setup, bool apart, Late late, bool discards) {
  std::vector<Seen> seen(setup.ranks);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    stream();  // the harness's own
    LibraryStreams library;
    Rank rank(context, setup);
    library.find();
    rank.load();
    if (late != Late::rank || r == 1) library.delay(late);
    Program program(rank, seen[r], apart, late);
    for (uint32_t s = 0; s < order_steps; ++s) {
      if (discards) program.discard_step(s);
      program.step(s);
    }
    program.end();
    FSDP(fsdp_close_context(context));
  });
  return seen;
}

std::string compare(const std::vector<Seen> &expected, const std::vector<Seen> &found) {
  for (size_t r = 0; r < expected.size(); ++r) {
    const auto &a = expected[r].weights, &b = found[r].weights;
    if (a.size() != b.size()) return "rank " + std::to_string(r) + " has read " + std::to_string(b.size()) + " tensors";
    for (size_t i = 0; i < a.size(); ++i)
      if (a[i] != b[i]) return "rank " + std::to_string(r) + " has read something else as number " + std::to_string(i);
    if (!same_bits(expected[r].last, found[r].last))
      return "rank " + std::to_string(r) + " has other weights at the end";
  }
  return {};
}

}  // namespace order
