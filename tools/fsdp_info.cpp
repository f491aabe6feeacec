// SPDX-License-Identifier: Apache-2.0
// fsdp-info: what this build of the library contains.
#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "cli.h"
#include "handles.h"

int main(int argc, char **argv) {
  try {
    CLI::App app{"Print the library's version, options, backends and instruction set as \"key: value\" lines.",
                 "fsdp-info"};
    app.set_version_flag("--version", std::string(fsdp_get_version()));
    if (const auto status = tools::parse_command_line(app, argc, argv)) return *status;
    auto text = tools::read_text([](char *buffer, uint64_t *size) { return fsdp_describe_build(buffer, size); });
    while (!text.empty() && text.back() == '\n') text.pop_back();
    fmt::print("{}\n", text);
    return 0;
  } catch (const std::exception &error) {
    fmt::print(stderr, "fsdp-info: {}\n", error.what());
    return 1;
  }
}
