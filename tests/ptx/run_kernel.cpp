// SPDX-License-Identifier: Apache-2.0
#include "ptx/run_kernel.h"

#include <algorithm>
#include <limits>

#include "ptx/warp.h"

namespace ptx {
namespace {

constexpr std::byte garbage{0xa5};  // registers and shared memory have this value before they are written
constexpr uint32_t over = std::numeric_limits<uint32_t>::max();

// A warp, and the position of each of its threads.
class Threads {
 public:
  Threads(Block &block, uint32_t first, uint32_t count);
  void begin_block(uint32_t number);
  // Runs the threads in `which` until each is at a barrier or has ended.
  void run(Mask which);
  Mask all() const { return all_; }
  bool left() const { return left_ == all_; }

 private:
  void gather(Mask which);
  void step(const Instruction &instruction);
  Mask guarded(const Instruction &instruction, Mask which) const;
  void branch(const Instruction &instruction);

  const Kernel &kernel_;
  std::vector<std::byte> registers_, local_;
  Warp warp_;
  Mask all_, left_ = 0, waits_ = 0;
  std::array<uint32_t, lanes> at_{};
  // Threads in step are at `now_`. They stay together until they part or meet others at `next_`.
  uint32_t now_ = 0, next_ = over;
  bool together_ = false;
};

Threads::Threads(Block &block, uint32_t first, uint32_t count)
    : kernel_(block.kernel),
      registers_(block.kernel.register_bytes, garbage),
      local_(block.kernel.local_bytes * lanes, garbage),
      warp_{block, registers_.data(), local_.data(), 0},
      all_(count == lanes ? ~Mask{0} : (Mask{1} << count) - 1) {
  for (const Constant &constant : kernel_.constants)
    for (unsigned lane = 0; lane < lanes; ++lane)
      std::memcpy(registers_.data() + constant.to.at + lane * constant.to.bytes, &constant.value, constant.to.bytes);
  for (unsigned lane = 0; lane < lanes; ++lane) warp_.lane<uint32_t>(kernel_.thread.at)[lane] = first + lane;
}

void Threads::begin_block(uint32_t number) {
  left_ = waits_ = 0;
  at_.fill(0);
  std::fill_n(warp_.lane<uint32_t>(kernel_.block.at), lanes, number);
}

// The threads that are furthest behind go on, so that threads that parted meet again.
void Threads::gather(Mask which) {
  now_ = next_ = over;
  warp_.active = 0;
  each_lane(which, [&](unsigned lane) {
    if (at_[lane] < now_) next_ = now_, now_ = at_[lane], warp_.active = 0;
    if (at_[lane] == now_)
      warp_.active |= Mask{1} << lane;
    else
      next_ = std::min(next_, at_[lane]);
  });
}

Mask Threads::guarded(const Instruction &instruction, Mask which) const {
  if (!instruction.guarded) return which;
  const uint8_t *const guard = warp_.lane<uint8_t>(instruction.guard);
  Mask passes = 0;
  each_lane(which, [&](unsigned lane) { passes |= Mask{(guard[lane] & 1) != instruction.guard_negated} << lane; });
  return passes;
}

void Threads::run(Mask which) {
  waits_ &= ~which;
  for (Mask runs = which & ~left_; runs; runs = which & ~left_ & ~waits_) {
    gather(runs);
    for (together_ = true; together_ && now_ < next_;) step(kernel_.code[now_]);
    if (!together_) continue;
    each_lane(warp_.active, [&](unsigned lane) { at_[lane] = now_; });
  }
}

void Threads::branch(const Instruction &instruction) {
  const Mask takes = guarded(instruction, warp_.active);
  if (takes == 0) {
    ++now_;
  } else if (takes == warp_.active) {
    now_ = instruction.target;
  } else {
    each_lane(warp_.active, [&](unsigned lane) { at_[lane] = takes >> lane & 1 ? instruction.target : now_ + 1; });
    together_ = false;
  }
}

void Threads::step(const Instruction &instruction) {
  if (instruction.kind == Kind::branch) return branch(instruction);
  const Mask all = warp_.active, acts = guarded(instruction, all);
  if (instruction.kind == Kind::plain) {
    warp_.active = acts;
    if (acts) instruction.run(instruction, warp_);
    warp_.active = all;
    ++now_;
    return;
  }
  (instruction.kind == Kind::barrier ? waits_ : left_) |= acts;
  each_lane(all, [&](unsigned lane) { at_[lane] = now_ + 1; });
  together_ = false;
}

std::vector<std::byte> parameters_of(const Kernel &kernel, void *const *arguments) {
  std::vector<std::byte> parameters(kernel.parameter_bytes);
  for (size_t i = 0; i < kernel.parameters.size(); ++i)
    std::memcpy(parameters.data() + kernel.parameter_offsets[i], arguments[i], kernel.parameters[i]);
  return parameters;
}

void run_together(std::vector<Threads> &warps) {
  for (Threads &warp : warps) warp.run(warp.all());
}

void run_alone(std::vector<Threads> &warps, bool last_first) {
  const size_t count = warps.size() * lanes;
  while (!std::all_of(warps.begin(), warps.end(), [](const Threads &warp) { return warp.left(); }))
    for (size_t k = 0; k < count; ++k) {
      const size_t thread = last_first ? count - 1 - k : k;
      Threads &warp = warps[thread / lanes];
      if (const Mask one = warp.all() & Mask{1} << thread % lanes) warp.run(one);
    }
}

}  // namespace

void run_kernel(const Kernel &kernel, uint32_t blocks, uint32_t threads, void *const *arguments) {
  const std::vector<std::byte> parameters = parameters_of(kernel, arguments);
  Block block{kernel, parameters.data(), std::vector<std::byte>(kernel.shared_bytes)};
  std::vector<Threads> warps;
  warps.reserve((threads + lanes - 1) / lanes);
  for (uint32_t first = 0; first < threads; first += lanes)
    warps.emplace_back(block, first, std::min<uint32_t>(lanes, threads - first));
  // The simulated CUDA begins with the first block and this loop with the last, because no block may rely on the order.
  for (uint32_t number = blocks; number-- > 0;) {
    std::fill(block.shared.begin(), block.shared.end(), garbage);
    for (Threads &warp : warps) warp.begin_block(number);
    kernel.shared_bytes > 0 ? run_alone(warps, number % 2 == 1) : run_together(warps);
  }
}

}  // namespace ptx
