#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds every span of less than a second in the tests, and wants each to have been looked at. usage: short_spans_test.py [ROOT]

A test that takes such a span for "it comes", or for "it does not come", fails on a machine that is busy, or passes on a library that is
broken. It is to wait for the event with a limit far above it, or for the opposite event. What may stay stands in short_spans.txt, with
the reason: a pause that makes one side of an edge late (the test passes however long it takes), a limit of the library that a test gives
and sees at work, a simulated device that takes a while.

A step of a loop that looks for an event needs no entry: a sleep in a `while`, or in a `for` that looks for a second or more.
"""
import re
import sys
import tempfile
from pathlib import Path

LIST = Path("tests/tree/short_spans.txt")
LANGUAGES = {".cpp": "c", ".h": "c", ".hpp": "c", ".c": "c", ".py": "python", ".sh": "shell", ".rs": "rust", ".jl": "julia"}
NO_TESTS = ("tests/benchmark/", "tests/abi/frozen/", "tests/gpu/kernels/", "tests/gpu/launch_bench.cpp", "tests/tree/", "tests/fuzz/corpus/")
NUMBER = r"(\d[\d']*(?:\.\d+)?|\.\d+)"
UNITS = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9, "s": 1, "seconds": 1,
         "millis": 1e-3, "micros": 1e-6, "nanos": 1e-9, "secs": 1, "secs_f64": 1}
# In each language: a pattern with the groups `number` and `unit`, or a unit of its own.
PATTERNS = {
    "c": [(rf"(?<![\w.'])(?P<number>{NUMBER})(?P<unit>ms|us|ns|s)\b", None),
          (rf"\b(?P<unit>milliseconds|microseconds|nanoseconds|seconds|Microseconds)[({{]\s*(?P<number>{NUMBER})\s*[)}}]", None),
          (rf"\bpause_ms\(\s*(?P<number>{NUMBER})\s*\)", "ms"), (rf"\b(?:pause_us|usleep)\(\s*(?P<number>{NUMBER})\s*\)", "us"),
          (rf"\bpoll\([^();]*,\s*(?P<number>{NUMBER})\)", "ms"),
          (rf"\b\w*_ms\b\s*(?:=|==|<|>|<=|>=)\s*(?P<number>{NUMBER})", "ms"),
          (rf"\b(?!\w*delay_us)\w*_us\b\s*=\s*(?P<number>{NUMBER})", "us"),
          (rf"(?:now\(\)|began|begin|start|since|seconds_since\(\w+\)|took|seconds)\s*(?:-\s*[\w.]+)?\s*(?:,|<|>|<=|>=)\s*"
           rf"(?P<number>0?\.\d+)\b", "s"),
          (r"\w_ns\b[^;,]{0,20}?[<>=]=?\s*(?P<number>\d[\d']{6,})", "ns"),
          (rf"\bnow_ns\(\)\s*(?:[-+]\s*[\w.]+)?\s*(?:<|>|<=|>=|\+)\s*(?:int64_t\{{)?(?P<number>{NUMBER})", "ns")],
    "python": [(rf"\b(?:sleep|settimeout|wait|join|poll)\(\s*(?P<number>{NUMBER})\s*\)", "s"),
               (rf"\b\w*(?:timeout|limit|within|patience|seconds)\s*=\s*(?P<number>{NUMBER})\b", "s"),
               (rf"\b\w*_ms\s*=\s*(?P<number>{NUMBER})\b", "ms"),
               (rf"\bassertLess\(.*,\s*(?P<number>0?\.\d+)\)", "s"),
               (rf"monotonic\(\)\s*(?:[-+]\s*\w+)?\s*(?:<|>|<=|>=|\+)\s*(?P<number>{NUMBER})\b", "s")],
    "shell": [(rf"\b(?:sleep|timeout)\s+(?P<number>{NUMBER})\b", "s")],
    "rust": [(rf"\bfrom_(?P<unit>millis|micros|nanos|secs|secs_f64)\(\s*(?P<number>{NUMBER})\s*\)", None)],
    "julia": [(rf"\b(?:took|elapsed|seconds)\)*\s*<\s*(?P<number>0?\.\d+)", "s"),
              (rf"\bsleep\(\s*(?P<number>{NUMBER})\s*\)", "s"), (rf"\b\w*(?:timeout|limit)\w*\s*=\s*(?P<number>0?\.\d+)", "s"),
              (rf"\b\w*_ms\s*=\s*(?P<number>{NUMBER})\b", "ms")],
}
LOOP = re.compile(r"\b(while|until|for)\b|\bdo( \{)?$")
longest_step = 0.1
SLEEP = re.compile(r"\b(?:sleep_for|pause_ms|pause_us|usleep|sleep)\b")
COUNTED = re.compile(r"<=?\s*(\d[\d']*)")


def value_of(text):
    return float(text.replace("'", ""))


def without_texts(line, language):
    """The code of a line: no comment, and no text but that of a shell, whose programs stand in texts."""
    if language == "shell":
        return re.sub(r"(^|\s)#.*", "", line)
    line = re.sub(r'"(?:[^"\\]|\\.)*"', '""', line)
    return re.sub(r"#.*" if language in ("python", "julia") else r"//.*|/\*.*?\*/", "", line)


def heads_above(lines, index):
    """What encloses a line, from the inside: each line above it that is indented less than all that came before."""
    depth = len(lines[index]) - len(lines[index].lstrip())
    for line in reversed(lines[:index]):
        own = len(line) - len(line.lstrip())
        if line.strip() and own < depth:
            depth = own
            yield line
            if own == 0 or re.search(r"^(TEST|void|int|bool|def|static)|\) (const )?(override )?\{$|\[.*\]\(?", line.strip()) and \
                    not LOOP.search(line):
                return


def is_step(lines, index, span):
    """A sleep of a loop that looks for an event: in the loop's own line or body. A loop that counts looks for a second or more."""
    line = lines[index]
    if not SLEEP.search(line) or span > longest_step:
        return False
    head = line if LOOP.search(line) else next((head for head in heads_above(lines, index) if LOOP.search(head)), "")
    if re.search(r"\bin (range|seq)|\$\(seq", head):
        counts = re.findall(r"(?:range\(|seq )(?:[\d ,]*\D)?(\d+)", head)
    else:
        counts = COUNTED.findall(head) if re.search(r"\bfor\b", head) else []
    each = 1 if "now()" in head else span  # seconds, or steps
    return bool(head) and (not counts or max(map(value_of, counts)) * each >= 1)


def short_spans(root):
    """(file, number, code) of every line with a span of less than a second that is no step of a loop."""
    for tree in ("tests", "bindings"):
        for path in sorted((root / tree).rglob("*")):
            name = path.relative_to(root).as_posix()
            language = LANGUAGES.get(path.suffix)
            if not language or not path.is_file() or name.startswith(NO_TESTS) or (tree == "bindings" and "test" not in name.lower()):
                continue
            if "/target/" in name:
                continue
            lines = [without_texts(line, language) for line in path.read_text(encoding="utf-8").splitlines()]
            for index, line in enumerate(lines):
                spans = [value_of(found["number"]) * UNITS[unit or found["unit"].lower()]
                         for pattern, unit in PATTERNS[language] for found in re.finditer(pattern, line)]
                short = [span for span in spans if 0 < span < 1]
                if short and not is_step(lines, index, min(short)):
                    yield name, index + 1, " ".join(line.split())


def read_list(text):
    """{(file, code): reason}"""
    reviewed, name, code = {}, "", ""
    for line in text.splitlines():
        if line.startswith("    "):
            reviewed[name, code] = line.strip()
        elif line.startswith("  "):
            code = line.strip()
        elif line and not line.startswith("#"):
            name = line.strip()
    return reviewed


def problems(root):
    reviewed, found = read_list((root / LIST).read_text(encoding="utf-8")), set()
    for name, number, code in short_spans(root):
        found.add((name, code))
        if (name, code) not in reviewed:
            yield f"{name}:{number} takes less than a second, and is not in {LIST}: {code}"
    for name, code in reviewed:
        if (name, code) not in found:
            yield f"{LIST}: {name} has no such line any more: {code}"


# Lines of a test, and whether they are found.
SAMPLES = {
    "EXPECT_FALSE(comes(third, 50ms));": True,
    "if (!done.wait_for(lock, std::chrono::milliseconds(300))) fail();": True,
    "std::this_thread::sleep_for(0.2s);": True,
    "ASSERT_EQ(::poll(&entry, 1, 100), 0);": True,
    "EXPECT_LT(seconds_since(start), 0.5);": True,
    "for (int i = 0; i < 100 && !come; ++i) pause_ms(1);": True,
    "for (int i = 0; i < 30'000 && !come; ++i) pause_ms(1);": False,
    "while (!come) std::this_thread::sleep_for(1ms);": False,
    "EXPECT_TRUE(comes(third, 60s));": False,
    "// a comment of 50ms": False,
}


def finds_samples():
    for sample, expected in SAMPLES.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / LIST).parent.mkdir(parents=True)
            (Path(folder) / LIST).write_text("")
            (Path(folder) / "tests/one_test.cpp").write_text(f"void test() {{\n  {sample}\n}}\n")
            if bool(list(problems(Path(folder)))) != expected:
                yield sample


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[2])
    failed = 0
    for number, (what, lines) in enumerate((("every short span is looked at", list(problems(root))),
                                            ("what is short is found", list(finds_samples()))), 1):
        failed += bool(lines)
        print(f"{'not ok' if lines else 'ok'} {number} - {what}")
        for line in lines:
            print(f"# {line}")
    print("1..2")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
