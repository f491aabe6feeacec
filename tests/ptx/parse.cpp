// SPDX-License-Identifier: Apache-2.0
// nvcc writes one statement a line. The parser refuses any other form, and names the line.
#include <algorithm>
#include <charconv>
#include <optional>

#include "ptx/operations.h"

namespace ptx {
namespace {

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r");
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") + 1 - first);
}

bool starts(std::string_view text, std::string_view with) { return text.substr(0, with.size()) == with; }

// Returns the next word. The rest remains in `text`.
std::string_view take_word(std::string_view &text) {
  text = trim(text);
  const auto end = std::min(text.find_first_of(" \t"), text.size());
  const std::string_view word = text.substr(0, end);
  text = trim(text.substr(end));
  return word;
}

// Splits the text at commas outside of brackets.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t first = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && (text[i] == '{' || text[i] == '[')) ++depth;
    if (i < text.size() && (text[i] == '}' || text[i] == ']')) --depth;
    if (i < text.size() && (depth > 0 || text[i] != ',')) continue;
    if (const auto part = trim(text.substr(first, i - first)); !part.empty()) parts.push_back(part);
    first = i + 1;
  }
  return parts;
}

std::optional<uint64_t> number_of(std::string_view text) {
  uint64_t value = 0;
  const auto whole = [&](std::string_view digits, int base) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
    return error == std::errc() && end == digits.data() + digits.size();
  };
  if (!text.empty() && text.back() == 'U') text.remove_suffix(1);
  if (starts(text, "0f") || starts(text, "0d") || starts(text, "0x"))
    return whole(text.substr(2), 16) ? std::optional(value) : std::nullopt;
  const bool negative = starts(text, "-");
  if (!whole(text.substr(negative ? 1 : 0), 10)) return std::nullopt;
  return negative ? 0 - value : value;
}

uint32_t bytes_of_type(std::string_view type) {
  const auto digit = type.find_first_of("0123456789");
  const auto bits = digit == type.npos ? std::nullopt : number_of(type.substr(digit));
  return bits ? static_cast<uint32_t>(*bits / 8) : 0;
}

class Parser {
 public:
  Parser(std::string_view text, const std::string &file) : text_(text), file_(file) {}
  Module parse();

 private:
  struct Named {
    Register first;
    uint32_t count;
  };

  [[noreturn]] void refuse(const std::string &why) const {
    throw Fault(file_ + ":" + std::to_string(line_) + ": " + why + ": " + std::string(statement_));
  }
  void take_line(std::string_view line);
  void take_block(std::string_view statements);
  void declare_constant(std::string_view words);
  void begin_kernel(std::string_view line);
  void end_kernel();
  void declare_parameter(std::string_view words);
  void declare_registers(std::string_view words);
  void declare_memory(std::string_view words, uint64_t &end);
  void take_instruction(std::string_view text);
  void take_guard(std::string_view &text, Instruction &instruction);
  void take_branch(std::string_view label, Instruction &instruction);
  void take_access(std::string_view opcode, const std::vector<std::string_view> &operands, Instruction &instruction);
  void take_address(std::string_view text, Instruction &instruction);
  std::string name_operation(std::string_view opcode, std::vector<std::string_view> &operands) const;
  void take_operation(std::string_view opcode, std::vector<std::string_view> operands, Instruction &instruction);
  std::optional<uint64_t> symbol(std::string_view name);
  Register allocate(uint32_t bytes, uint32_t count);
  Register constant(uint64_t value, uint32_t bytes);
  Register find_register(std::string_view name) const;
  Register source(std::string_view operand, uint32_t bytes);

  std::string_view text_, statement_;
  std::string file_;
  uint32_t line_ = 0;
  Module module_;
  bool in_kernel_ = false;
  Kernel kernel_;
  std::map<std::string, Named, std::less<>> registers_;
  std::map<std::string, uint64_t, std::less<>> symbols_;
  std::map<std::string, std::shared_ptr<const GlobalConstant>, std::less<>> globals_;
  std::map<std::string, uint32_t, std::less<>> labels_;
  std::vector<std::pair<size_t, std::string>> branches_;
  std::map<std::pair<uint64_t, uint32_t>, Register> constants_;
};

Module Parser::parse() {
  for (size_t at = 0; at < text_.size();) {
    const size_t end = std::min(text_.find('\n', at), text_.size());
    ++line_;
    std::string_view line = text_.substr(at, end - at);
    line = trim(line.substr(0, line.find("//")));
    statement_ = line;
    if (!line.empty()) take_line(line);
    at = end + 1;
  }
  if (in_kernel_) refuse("the kernel has no end");
  return std::move(module_);
}

void Parser::take_line(std::string_view line) {
  for (const char *word : {".version", ".target", ".address_size", ".pragma", ".maxntid", ")"})
    if (starts(line, word)) return;
  if (line == "{") return;
  if (starts(line, "{")) return take_block(line.substr(1, line.size() - 2));
  if (line.find(".entry ") != line.npos) return begin_kernel(line);
  if (!in_kernel_ && starts(line, ".global ")) return declare_constant(line.substr(8));
  if (!in_kernel_) refuse("unknown outside of a kernel");
  if (line == "}") return end_kernel();
  if (line.back() == ':') {
    labels_[std::string(line.substr(0, line.size() - 1))] = static_cast<uint32_t>(kernel_.code.size());
    return;
  }
  if (line.back() == ';' || line.back() == ',') line = trim(line.substr(0, line.size() - 1));
  std::string_view rest = line;
  const std::string_view first = take_word(rest);
  if (first == ".param") return declare_parameter(rest);
  if (first == ".reg") return declare_registers(rest);
  if (first == ".shared") return declare_memory(rest, kernel_.shared_bytes);
  if (first == ".local") return declare_memory(rest, kernel_.local_bytes);
  take_instruction(line);
}

// Parses " .reg .b32 tmp; mov.b64 {tmp, %r11}, %rd34; ", which has a register of its own.
void Parser::take_block(std::string_view statements) {
  for (size_t end = statements.find(';'); end != statements.npos; end = statements.find(';')) {
    take_line(trim(statements.substr(0, end)));
    statements.remove_prefix(end + 1);
  }
  if (!trim(statements).empty()) refuse("a statement without an end");
}

// Parses ".align 4 .b8 NAME[2] = {51, 191};".
void Parser::declare_constant(std::string_view words) {
  const auto begin = words.find('{'), end = words.find('}'), bracket = words.find('[');
  if (begin == words.npos || end == words.npos || bracket == words.npos) refuse("a constant without numbers");
  const auto type = words.find(".b8 ");
  if (type == words.npos || bracket < type) refuse("a constant of other than bytes");
  std::vector<std::byte> bytes;
  for (const std::string_view one : split(words.substr(begin + 1, end - begin - 1))) {
    const auto value = number_of(one);
    if (!value || *value > 255) refuse("no byte: " + std::string(one));
    bytes.push_back(static_cast<std::byte>(*value));
  }
  if (number_of(words.substr(bracket + 1, words.find(']') - bracket - 1)) != bytes.size())
    refuse("a part of a constant");
  const std::string_view name = trim(words.substr(type + 4, bracket - type - 4));
  globals_[std::string(name)] = std::make_shared<GlobalConstant>(std::move(bytes));
}

void Parser::begin_kernel(std::string_view line) {
  if (in_kernel_) refuse("a kernel in a kernel");
  in_kernel_ = true;
  kernel_ = {};
  registers_.clear(), symbols_.clear(), labels_.clear(), branches_.clear(), constants_.clear();
  const auto name = line.find(".entry ") + 7;
  kernel_.name = std::string(trim(line.substr(name, line.find('(') - name)));
  kernel_.thread = allocate(4, 1), kernel_.block = allocate(4, 1);
  registers_["%tid.x"] = {kernel_.thread, 1};
  registers_["%ctaid.x"] = {kernel_.block, 1};
}

void Parser::end_kernel() {
  for (const auto &[instruction, label] : branches_) {
    const auto found = labels_.find(label);
    if (found == labels_.end()) refuse("no label " + label + " in " + kernel_.name);
    kernel_.code[instruction].target = found->second;
  }
  Instruction end;
  end.kind = Kind::leave;
  kernel_.code.push_back(end);
  in_kernel_ = false;
  module_[kernel_.name] = std::move(kernel_);
}

// Parses ".align 8 .b8 NAME[56]" or ".u64 NAME". Some have ".ptr .align 1" before the name.
void Parser::declare_parameter(std::string_view words) {
  uint32_t align = 0, bytes = 0;
  while (starts(words, ".")) {
    const std::string_view word = take_word(words);
    if (word == ".align")
      align = static_cast<uint32_t>(number_of(take_word(words)).value_or(0));
    else if (word != ".ptr")
      bytes = bytes_of_type(word);
  }
  if (const auto bracket = words.find('['); bracket != words.npos) {
    const auto count = number_of(words.substr(bracket + 1, words.find(']') - bracket - 1));
    if (!count) refuse("no size");
    bytes *= static_cast<uint32_t>(*count);
    words = words.substr(0, bracket);
  } else {
    align = bytes;
  }
  if (bytes == 0 || align == 0) refuse("a parameter without a size");
  uint64_t &end = kernel_.parameter_bytes;
  end = (end + align - 1) / align * align;
  symbols_[std::string(words)] = end;
  kernel_.parameter_offsets.push_back(end);
  kernel_.parameters.push_back(bytes);
  end += bytes;
}

// Parses ".b32 %r<24>" or ".b64 %SP".
void Parser::declare_registers(std::string_view words) {
  const std::string_view type = take_word(words);
  const uint32_t bytes = type == ".pred" ? 1 : bytes_of_type(type);
  if (bytes == 0) refuse("a register of no size");
  const auto bracket = words.find('<');
  uint32_t count = 1;
  if (bracket != words.npos)
    count = static_cast<uint32_t>(number_of(words.substr(bracket + 1, words.find('>') - bracket - 1)).value_or(0));
  const std::string name(words.substr(0, bracket));
  registers_[bracket == words.npos ? name : name + "<"] = {allocate(bytes, count), count};
}

// Parses ".align 8 .b8 NAME[2176]".
void Parser::declare_memory(std::string_view words, uint64_t &end) {
  uint64_t align = 1;
  if (starts(words, ".align")) {
    take_word(words);
    align = number_of(take_word(words)).value_or(1);
  }
  const uint64_t each = bytes_of_type(take_word(words));
  const auto bracket = words.find('[');
  const auto count =
      bracket == words.npos ? std::nullopt : number_of(words.substr(bracket + 1, words.find(']') - bracket - 1));
  if (each == 0 || !count) refuse("memory of no size");
  end = (end + align - 1) / align * align;
  symbols_[std::string(words.substr(0, bracket))] = end;
  end += each * *count;
}

Register Parser::allocate(uint32_t bytes, uint32_t count) {
  // The size is a multiple of 8, so that all accesses of the host are aligned.
  const Register first{kernel_.register_bytes, bytes};
  kernel_.register_bytes += bytes * lanes * count;
  return first;
}

Register Parser::constant(uint64_t value, uint32_t bytes) {
  Register &to = constants_[{value, bytes}];
  if (to.bytes == 0) {
    to = allocate(bytes, 1);
    kernel_.constants.push_back({to, value});
  }
  return to;
}

Register Parser::find_register(std::string_view name) const {
  if (const auto exact = registers_.find(name); exact != registers_.end()) return exact->second.first;
  const auto digit = std::min(name.find_first_of("0123456789"), name.size());
  const auto found = registers_.find(std::string(name.substr(0, digit)) + "<");
  const auto index = number_of(name.substr(digit));
  if (found == registers_.end() || !index || *index >= found->second.count) refuse("no register " + std::string(name));
  Register one = found->second.first;
  one.at += static_cast<uint32_t>(*index) * one.bytes * lanes;
  return one;
}

std::optional<uint64_t> Parser::symbol(std::string_view name) {
  if (const auto found = symbols_.find(name); found != symbols_.end()) return found->second;
  const auto global = globals_.find(name);
  if (global == globals_.end()) return std::nullopt;
  kernel_.globals.push_back(global->second);
  return reinterpret_cast<uintptr_t>(global->second->data());
}

Register Parser::source(std::string_view operand, uint32_t bytes) {
  if (starts(operand, "%") || operand == "tmp") {
    const Register found = find_register(operand);
    if (found.bytes != bytes) refuse("an operand of another size: " + std::string(operand));
    return found;
  }
  auto value = number_of(operand);
  if (!value) value = symbol(operand);
  if (!value) refuse("an unknown operand: " + std::string(operand));
  return constant(*value, bytes);
}

void Parser::take_guard(std::string_view &text, Instruction &instruction) {
  if (!starts(text, "@")) return;
  std::string_view guard = take_word(text).substr(1);
  instruction.guarded = true;
  instruction.guard_negated = starts(guard, "!");
  if (instruction.guard_negated) guard.remove_prefix(1);
  instruction.guard = source(guard, 1).at;
}

void Parser::take_instruction(std::string_view text) {
  Instruction instruction;
  instruction.line = line_;
  take_guard(text, instruction);
  const std::string_view opcode = take_word(text);
  const auto operands = split(text);
  if (opcode == "bra" || opcode == "bra.uni") {
    instruction.kind = Kind::branch;
    branches_.emplace_back(kernel_.code.size(), std::string(text));
  } else if (opcode == "ret") {
    instruction.kind = Kind::leave;
  } else if (opcode == "bar.sync" && text == "0") {
    instruction.kind = Kind::barrier;
  } else if (opcode == "nanosleep.u32") {
    return;  // a hint
  } else if (opcode == "prefetch.L2") {
    instruction.run = prefetch;
    instruction.bytes = 1;
    take_address(text, instruction);
  } else if (starts(opcode, "ld.") || starts(opcode, "st.") || starts(opcode, "atom.")) {
    take_access(opcode, operands, instruction);
  } else {
    take_operation(opcode, operands, instruction);
  }
  kernel_.code.push_back(instruction);
}

// Splits operands of several registers, and returns this parser's own name for the operation.
std::string Parser::name_operation(std::string_view opcode, std::vector<std::string_view> &operands) const {
  std::string name(opcode);
  if (operands.size() != 2) return name;
  if (operands[1] == "%globaltimer") {
    operands.pop_back();
    return name + ".globaltimer";
  }
  for (const size_t k : {0, 1}) {
    if (!starts(operands[k], "{")) continue;
    const auto parts = split(operands[k].substr(1, operands[k].size() - 2));
    operands.erase(operands.begin() + static_cast<std::ptrdiff_t>(k));
    operands.insert(operands.begin() + static_cast<std::ptrdiff_t>(k), parts.begin(), parts.end());
    return name + (k == 0 ? ".split" : ".combine");
  }
  return name;
}

void Parser::take_operation(std::string_view opcode, std::vector<std::string_view> operands, Instruction &instruction) {
  const auto operation = find_operation(name_operation(opcode, operands));
  if (!operation) refuse("an operation that is not known here");
  const size_t written = operation->to.size();
  if (operands.size() != written + operation->from.size()) refuse("not as many operands as the operation has");
  instruction.run = operation->run;
  for (size_t k = 0; k < written; ++k) instruction.to[k] = source(operands[k], operation->to[k]).at;
  for (size_t k = written; k < operands.size(); ++k)
    instruction.from[k - written] = source(operands[k], operation->from[k - written]).at;
}

// Parses "[%rd1+8]", "[NAME+8]" or "[NAME]".
void Parser::take_address(std::string_view text, Instruction &instruction) {
  if (!starts(text, "[") || text.back() != ']') refuse("no address");
  text = text.substr(1, text.size() - 2);
  const auto plus = text.find('+');
  if (plus != text.npos) {
    const auto offset = number_of(text.substr(plus + 1));
    if (!offset) refuse("no offset");
    instruction.offset = static_cast<int64_t>(*offset);
  }
  instruction.from[0] = source(trim(text.substr(0, plus)), instruction.space == Space::shared ? 4 : 8).at;
}

void Parser::take_access(std::string_view opcode, const std::vector<std::string_view> &operands,
                         Instruction &instruction) {
  const bool loads = starts(opcode, "ld."), stores = starts(opcode, "st.");
  const std::pair<const char *, Space> spaces[] = {{".global.", Space::global},
                                                   {".param.", Space::parameter},
                                                   {".shared.", Space::shared},
                                                   {".local.", Space::local}};
  const auto space = std::find_if(std::begin(spaces), std::end(spaces), [&](const auto &one) {
    return starts(opcode.substr(std::min(opcode.find('.'), opcode.size())), one.first);
  });
  if (space == std::end(spaces)) refuse("an access that is not known here");
  instruction.space = space->second;
  const std::string_view type = opcode.substr(opcode.rfind('.') + 1);
  instruction.bytes = static_cast<uint8_t>(bytes_of_type(type));
  if (!loads && !stores) {
    const auto atomic = find_atomic(opcode);
    if (!atomic || operands.size() != 3) refuse("an operation that is not known here");
    instruction.run = *atomic;
    instruction.to[0] = source(operands[0], instruction.bytes).at;
    take_address(operands[1], instruction);
    instruction.from[1] = source(operands[2], instruction.bytes).at;
    return;
  }
  // These words stand between the space and the type. "wb" is the default of caches, and "nc" says that the memory is
  // not written.
  std::string_view form = opcode.substr(2 + std::string_view(space->first).size());
  if (starts(form, stores ? "wb." : "nc.")) form.remove_prefix(3);
  const bool vector = starts(form, "v2.") || starts(form, "v4.");
  if (form.substr(vector ? 3 : 0) != type || operands.size() != 2) refuse("an access that is not known here");
  instruction.run = loads ? load : store;
  instruction.sign_extends = loads && starts(type, "s");
  const std::string_view values = operands[loads ? 0 : 1];
  const auto elements = vector ? split(values.substr(1, values.size() - 2)) : std::vector{values};
  if (elements.size() != (vector ? static_cast<size_t>(form[1] - '0') : 1)) refuse("not as many elements");
  instruction.count = static_cast<uint8_t>(elements.size());
  for (size_t k = 0; k < elements.size(); ++k) {
    const Register element = starts(elements[k], "%") ? find_register(elements[k])
                                                      : constant(number_of(elements[k]).value_or(0), instruction.bytes);
    if (element.bytes < instruction.bytes || (k > 0 && element.bytes != instruction.register_bytes))
      refuse("an operand of another size");
    instruction.register_bytes = static_cast<uint8_t>(element.bytes);
    instruction.to[k] = element.at;
  }
  take_address(operands[loads ? 1 : 0], instruction);
}

}  // namespace

Module parse(std::string_view text, const std::string &file) { return Parser(text, file).parse(); }

}  // namespace ptx
