// SPDX-License-Identifier: Apache-2.0
// fsdp-info: what this build of the library contains; one trace from those of several ranks; and what their flight
// records say of a job that failed.
#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "cli.h"
#include "handles.h"
#include "info/flight_report.h"
#include "info/merge_traces.h"

namespace {

void print_build() {
  auto text = tools::read_text([](char *buffer, uint64_t *size) { return fsdp_describe_build(buffer, size); });
  while (!text.empty() && text.back() == '\n') text.pop_back();
  fmt::print("{}\n", text);
}

}  // namespace

int main(int argc, char **argv) {
  try {
    CLI::App app{"Print the library's version, options, backends and instruction set as \"key: value\" lines.",
                 "fsdp-info"};
    app.set_version_flag("--version", std::string(fsdp_get_version()));
    std::string out;
    std::vector<std::string> files;
    CLI::App *trace =
        app.add_subcommand("trace", "Merge the traces of several ranks (fsdp_write_trace) into one file.");
    trace->add_option("OUT", out, "the file to write")->required();
    trace->add_option("FILE", files, "a rank's trace")->required();
    CLI::App *flight = app.add_subcommand(
        "flight",
        "Say which rank diverged first, and where, from the flight records of several ranks (flight-RANK.json).");
    flight->add_option("FILE", files, "a rank's flight record")->required();
    if (const auto status = tools::parse_command_line(app, argc, argv)) return *status;
    if (*flight) return tools::report_flights(files);
    if (*trace)
      tools::merge_traces(out, files);
    else
      print_build();
    return 0;
  } catch (const std::exception &error) {
    fmt::print(stderr, "fsdp-info: {}\n", error.what());
    return 1;
  }
}
