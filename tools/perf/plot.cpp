// SPDX-License-Identifier: Apache-2.0
// A picture of the run: how many times as fast as the reference, against size, both on logarithmic axes.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <stdexcept>

#include "perf/report.h"

namespace perf {
namespace {

constexpr double width = 900, height = 520, left = 60, right = 300, top = 50, bottom = 60;
constexpr const char *colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                   "#e69f00", "#56b4e9", "#000000", "#999999"};

struct Axis {
  double low, high;   // powers of two
  double begin, end;  // on the page
  double at(double value) const { return begin + (std::log2(value) - low) / (high - low) * (end - begin); }
};

using Curves = std::map<std::string, std::vector<std::pair<double, double>>>;

Curves collect(const std::vector<Line> &lines) {
  Curves curves;
  for (const Line &line : lines)
    if (line.ratio > 0 && line.bytes > 0)
      curves[fmt::format("{} {} {}", line.operation, line.variant, line.dtype)].emplace_back(
          static_cast<double>(line.bytes), line.ratio);
  return curves;
}

// Whole powers of two around all values.
Axis fit(const Curves &curves, bool horizontal) {
  double low = 1e300, high = -1e300;
  for (const auto &[name, points] : curves)
    for (const auto &[bytes, ratio] : points) {
      const double value = std::log2(horizontal ? bytes : ratio);
      low = std::min(low, std::floor(value));
      high = std::max(high, std::ceil(value));
    }
  if (low > high) low = 0, high = 1;
  if (low == high) ++high;
  return horizontal ? Axis{low, high, left, width - right} : Axis{low, high, height - bottom, top};
}

std::string escape(const std::string &text) {
  std::string out;
  for (const char c : text) out += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  return out;
}

std::string text(double x, double y, const char *anchor, const std::string &what) {
  return fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='{}'>{}</text>\n", x, y, anchor, escape(what));
}

std::string draw_grid(const Axis &x, const Axis &y) {
  std::string out;
  for (double power = x.low; power <= x.high; power += 2) {
    const double at = x.at(std::exp2(power));
    out += fmt::format("<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2}' stroke='#ddd'/>\n", at, top, height - bottom);
    out += text(at, height - bottom + 18, "middle", format_size(static_cast<uint64_t>(std::exp2(power))));
  }
  for (double power = y.low; power <= y.high; ++power) {
    const double at = y.at(std::exp2(power));
    out += fmt::format("<line x1='{1}' x2='{2}' y1='{0:.1f}' y2='{0:.1f}' stroke='{3}'/>\n", at, left, width - right,
                       power == 0 ? "#444" : "#ddd");
    out += text(left - 6, at + 4, "end", fmt::format("{:g}", std::exp2(power)));
  }
  return out;
}

}  // namespace

void write_plot(const std::string &file, const std::vector<Line> &lines, const std::string &machine) {
  const Curves curves = collect(lines);
  const Axis x = fit(curves, true), y = fit(curves, false);
  std::string out = fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' width='{0}' height='{1}' viewBox='0 0 {0} {1}' font-family='sans-serif' "
      "font-size='11'>\n<rect width='100%' height='100%' fill='white'/>\n",
      width, height);
  out += text(left, 20, "start", "fsdp-perf: times as fast as the reference of the same run (1: equal), against size");
  out += text(left, 36, "start", machine) + draw_grid(x, y);
  size_t number = 0;
  for (const auto &[name, points] : curves) {
    const char *colour = colours[number % std::size(colours)];
    // Colours repeat, so later curves are dashed.
    const char *dash = number >= std::size(colours) ? " stroke-dasharray='5 3'" : "";
    std::string line;
    for (const auto &[bytes, ratio] : points) line += fmt::format("{:.1f},{:.1f} ", x.at(bytes), y.at(ratio));
    out += fmt::format("<polyline fill='none' stroke='{}' stroke-width='1.8'{} points='{}'/>\n", colour, dash, line);
    const double row = top + 8 + 15 * static_cast<double>(number++);
    out += fmt::format("<line x1='{0}' x2='{1}' y1='{2}' y2='{2}' stroke='{3}' stroke-width='2'{4}/>\n",
                       width - right + 12, width - right + 36, row - 4, colour, dash);
    out += text(width - right + 42, row, "start", name);
  }
  std::ofstream stream(file);
  stream << out << "</svg>\n";
  if (!stream.flush()) throw std::runtime_error(fmt::format("cannot write {}", file));
}

}  // namespace perf
