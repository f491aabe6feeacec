// SPDX-License-Identifier: Apache-2.0
// Prints for people what the flight records of a job's ranks say together.
#pragma once

#include <string>
#include <vector>

namespace tools {

// Prints where the calls of the ranks first differ, and how each rank ended. Returns the exit status: 0 if it names
// that place or a rank to blame, or if all ranks agree; 1 if ranks failed and the records do not show why; 2 if a file
// is not a flight record of this job.
int report_flights(const std::vector<std::string> &files);

}  // namespace tools
