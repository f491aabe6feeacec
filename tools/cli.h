// SPDX-License-Identifier: Apache-2.0
// What the tools' command lines have in common.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

namespace tools {

// Parses, or returns the status to exit with: 0 after --help, 2 after a usage error that was explained.
inline std::optional<int> parse_command_line(CLI::App &app, int argc, char **argv) {
  app.failure_message([](const CLI::App *failed, const CLI::Error &error) {
    const auto &name = failed->get_name();
    return name + ": " + error.what() + "\n" + name + ": try " + name + " --help\n";
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError &error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return std::nullopt;
}

}  // namespace tools
