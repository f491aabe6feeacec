// SPDX-License-Identifier: Apache-2.0
// Runs libFuzzer on the bytes of a stream of the rendezvous. Any bytes are frames of messages, or give a reason why
// they are not. A parsed message is written back as exactly the bytes that it came from. At the end messages of each
// kind have been parsed, because a parser that refuses everything would prove nothing.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "membership/join/message.h"
#include "transport/names.h"

namespace {

using namespace fsdp::transport;

uint64_t inputs;
std::array<uint64_t, std::variant_size_v<decltype(message::Parsed::message)>> understood;  // by alternative

// Judges only long runs: a single message that is played again shows too little.
void look_back() {
  for (size_t i = 1; inputs > 10'000 && i < understood.size(); ++i)
    if (!understood[i]) {
      std::fprintf(stderr, "message_fuzzer: of %llu inputs none had a message of alternative %zu of message::Parsed\n",
                   static_cast<unsigned long long>(inputs), i);
      std::_Exit(1);
    }
}

void require(bool condition) {
  if (!condition) std::abort();
}

// Reads the entries one by one and builds the body from them, because writing the kept body would prove nothing.
std::vector<std::byte> write_entries_again(const message::Entries &entries) {
  message::Entries again(entries.first_rank());
  message::EntryReader reader(entries.body());
  for (message::RosterEntry entry; reader.next(entry);) again.add(entry);
  require(reader.problem().empty());
  return message::write(again);
}

// Writes a parsed message as bytes again.
std::vector<std::byte> write_again(const message::Parsed &parsed) {
  std::vector<std::byte> bytes;
  std::visit(
      [&](const auto &value) {
        using Kind = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Kind, message::Entries>)
          bytes = write_entries_again(value);
        else if constexpr (!std::is_same_v<Kind, std::monostate>)
          bytes = message::write(value);
      },
      parsed.message);
  return bytes;
}

// Returns how many bytes the frame had. 0 means that the stream would end here.
size_t take_frame(std::span<const std::byte> bytes) {
  FrameHead head;
  if (bytes.size() < FrameHead::size_bytes) return 0;
  if (!read_head(bytes.first<FrameHead::size_bytes>(), message::longest, head).empty()) return 0;
  require(head.body_bytes <= message::longest);
  const auto rest = bytes.subspan(FrameHead::size_bytes);
  if (rest.size() < head.body_bytes) return 0;
  const auto parsed = message::parse(head.kind, rest.first(head.body_bytes));
  require(parsed.problem.empty() != std::holds_alternative<std::monostate>(parsed.message));
  ++understood[parsed.message.index()];
  const size_t size = FrameHead::size_bytes + head.body_bytes;
  if (parsed.problem.empty()) {
    const auto again = write_again(parsed);
    require(std::equal(again.begin(), again.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size)));
  }
  return size;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) { return std::atexit(look_back); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  ++inputs;
  std::span<const std::byte> bytes(reinterpret_cast<const std::byte *>(data), size);
  while (const size_t taken = take_frame(bytes)) bytes = bytes.subspan(taken);
  return 0;
}
