// SPDX-License-Identifier: Apache-2.0
// What the flight records of a job's ranks say together, for people.
#pragma once

#include <string>
#include <vector>

namespace tools {

// Prints which rank diverged first and where, and how each rank ended. Returns the exit status: 0 if that or a culprit
// could be named, or all ranks agree; 1 if they failed and nothing tells why; 2 if a file is not what it should be.
int report_flights(const std::vector<std::string> &files);

}  // namespace tools
