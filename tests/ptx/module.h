// SPDX-License-Identifier: Apache-2.0
// PTX, as nvcc wrote it, in a form that can be run: what parse() makes of the text, and run_kernel() executes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ptx {

// What is wrong with a kernel: it has an operation that is not written here, or uses an address that is not its own.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

constexpr unsigned lanes = 32;  // threads of a warp, which share their instructions
using Mask = uint32_t;

struct Warp;
struct Instruction;
using Run = void (*)(const Instruction &, Warp &);

enum class Kind { plain, branch, barrier, leave };
enum class Space { global, parameter, shared, local };

// A register is named by the offset of its first lane in the warp's registers. A number in the text is a register, too,
// which is filled once.
struct Instruction {
  Kind kind = Kind::plain;
  Run run = nullptr;
  std::array<uint32_t, 4> to{}, from{};
  uint32_t guard = 0;  // a predicate's register
  bool guarded = false, guard_negated = false;
  uint32_t target = 0;  // of a branch
  Space space = Space::global;
  uint8_t count = 1, bytes = 0, register_bytes = 0;  // of accesses: of a vector, of each element, of its register
  bool sign_extends = false;
  int64_t offset = 0;
  uint32_t line = 0;
};

struct Register {
  uint32_t at = 0, bytes = 0;  // of one lane; 0: a predicate, which takes one
};

struct Constant {
  Register to;
  uint64_t value;
};

// A constant in global memory, which all kernels of a text may read.
class GlobalConstant {
 public:
  explicit GlobalConstant(std::vector<std::byte> bytes);
  ~GlobalConstant();
  GlobalConstant(const GlobalConstant &) = delete;
  GlobalConstant &operator=(const GlobalConstant &) = delete;
  const std::byte *data() const { return bytes_.data(); }

 private:
  std::vector<std::byte> bytes_;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Constant> constants;
  std::vector<std::shared_ptr<const GlobalConstant>> globals;  // whose addresses are among the constants
  std::vector<uint64_t> parameters;                            // the size of each
  std::vector<uint64_t> parameter_offsets;
  uint64_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
  uint32_t register_bytes = 0;  // of a warp
  // Its number in the block, and the number of the block.
  Register thread, block;
};

using Module = std::map<std::string, Kernel, std::less<>>;

// Every kernel of a text. Throws Fault with the line for what it does not know.
Module parse(std::string_view text, const std::string &file);

}  // namespace ptx
