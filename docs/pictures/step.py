#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws step.svg: what one rank does and holds during a training step. `step.py --check` says whether the file is the drawing."""
import sys
from pathlib import Path

WIDTH, LEFT = 960, 118
UNIT = 46  # of time
TOP, ROW, GAP = 34, 34, 10
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #24292f }
  .small { font-size: 12px } .label { text-anchor: end } .middle { text-anchor: middle }
  .line { stroke: #8c959f; stroke-width: 1; fill: none } .dash { stroke-dasharray: 4 4 }
  .math { fill: #d0d7de } .gather { fill: #54aeff } .reduce { fill: #4ac26b } .update { fill: #d4a72c }
  .shard { fill: #a475f9 } .full { fill: #54aeff } .grad { fill: #4ac26b }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .line { stroke: #6e7681 } .math { fill: #484f58 }
    .gather, .full { fill: #1f6feb } .reduce, .grad { fill: #238636 } .update { fill: #9e6a03 } .shard { fill: #6639ba }
  }
"""
# (begin, end, text) in units of time, of three groups.
MATH = [(1, 3, "F0"), (3, 5, "F1"), (5, 7, "F2"), (7, 9.5, "B2"), (9.5, 12, "B1"), (12, 14.5, "B0")]
UPDATE = [(15.5, 17, "AdamW"), (17, 18, "publish")]
GATHERS = [(0, 1, "0"), (1, 2, "1"), (3, 4, "2"), (7, 8, "1"), (9.5, 10.5, "0")]
REDUCES = [(9.5, 11.2, "2"), (12, 13.7, "1"), (14.5, 15.5, "0")]
# Full weights from the gather to the end of the group's math; full gradients from the math to the end of the reduce.
FULL = [(0, 3), (1, 5), (3, 9.5), (7, 12), (9.5, 14.5)]
GRADS = [(7, 11.2), (9.5, 13.7), (12, 15.5)]


def x(time):
    return LEFT + time * UNIT


def bars(rows, y, height, kind):
    for begin, end, text in rows:
        yield f'<rect class="{kind}" x="{x(begin):.0f}" y="{y}" width="{(end - begin) * UNIT - 2:.0f}" height="{height}" rx="3"/>'
        yield f'<text class="middle" x="{x((begin + end) / 2) - 1:.0f}" y="{y + height / 2 + 5:.0f}">{text}</text>'


def counts(spans):
    """(begin, end, how many) of overlapping spans."""
    times = sorted({time for span in spans for time in span})
    for begin, end in zip(times, times[1:]):
        yield begin, end, sum(first <= begin and end <= last for first, last in spans)


def memory(base, unit):
    yield f'<rect class="shard" x="{x(0):.0f}" y="{base - unit}" width="{18 * UNIT}" height="{unit}"/>'
    heights = {}
    for kind, spans in (("full", FULL), ("grad", GRADS)):
        for begin, end, count in counts(spans):
            # Split where the other kind begins or ends, so that both stack.
            cuts = sorted({begin, end, *(t for span in FULL + GRADS for t in span if begin < t < end)})
            for first, last in zip(cuts, cuts[1:]):
                below = heights.get(first, 0) if kind == "grad" else 0
                if kind == "full":
                    heights[first] = count
                for level in range(count):
                    top = base - unit - (below + level + 1) * unit
                    yield f'<rect class="{kind}" x="{x(first):.1f}" y="{top}" width="{(last - first) * UNIT + 0.5:.1f}" height="{unit - 2}"/>'


def draw():
    rows = ["your math", "gather", "reduce"]
    ys = [TOP + i * (ROW + GAP) for i in range(3)]
    base = ys[2] + ROW + 150
    parts = []
    for begin, end, text in ((1, 7, "forward"), (7, 14.5, "backward"), (15.5, 18, "update")):
        parts.append(f'<text class="small middle" x="{x((begin + end) / 2):.0f}" y="{TOP - 12}">{text}</text>')
    for name, y in zip(rows, ys):
        parts.append(f'<text class="label" x="{LEFT - 14}" y="{y + ROW / 2 + 5:.0f}">{name}</text>')
    parts += bars(MATH, ys[0], ROW, "math")
    parts += bars(UPDATE, ys[0], ROW, "update")
    parts += bars(GATHERS, ys[1], ROW, "gather")
    parts += bars(REDUCES, ys[2], ROW, "reduce")
    unit = 22
    parts += memory(base, unit)
    for text, height in (("one rank", 5.2), ("holds", 4.4)):
        parts.append(f'<text class="label" x="{LEFT - 14}" y="{base - height * unit:.0f}">{text}</text>')
    parts.append(f'<path class="line" d="M{x(0):.0f} {base} H{x(18):.0f}"/>')
    for time in (7, 15.5):
        parts.append(f'<path class="line dash" d="M{x(time):.0f} {TOP - 6} V{base}"/>')
    legend = [("shard", "1/N of weights, gradients, AdamW states: always"), ("full", "full weights: 2 groups at most"),
              ("grad", "full gradients: 2 groups at most")]
    at = LEFT
    for kind, text in legend:
        parts.append(f'<rect class="{kind}" x="{at}" y="{base + 16}" width="14" height="14" rx="2"/>')
        parts.append(f'<text class="small" x="{at + 20}" y="{base + 27}">{text}</text>')
        at += 46 + len(text) * 6.3
    height = base + 42
    body = "\n".join("  " + part for part in parts)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">\n'
            f"  <title>What one rank does and holds during a training step of three groups</title>\n"
            f"  <style>{STYLE}  </style>\n{body}\n</svg>\n")


def main():
    path = Path(__file__).with_suffix(".svg")
    if sys.argv[1:] == ["--check"]:
        if path.is_file() and path.read_text(encoding="utf-8") == draw():
            return 0
        print(f"{path.name} is not what {Path(__file__).name} draws: run it")
        return 1
    path.write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
