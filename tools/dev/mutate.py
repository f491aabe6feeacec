#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks the library one line at a time, and says which broken lines no test notices.

usage: tools/dev/mutate.py map [--suite S]... [--more]   which tests run which lines, by a build with coverage (30 minutes)
       tools/dev/mutate.py run --sample N --seed S [--room engine]... [--jobs J] [--budget SECONDS]
       tools/dev/mutate.py run --patch FILE        one mutant of your own, as a unified diff
       tools/dev/mutate.py run --must-die          those of must_die.json, of which none may survive, by the tests named there
       tools/dev/mutate.py report [--seed S]

Everything is kept in build-mutate/: a copy of the tracked files for each job, the map, and results.jsonl, from which a run that
was ended goes on. A mutant counts as killed when a test that runs its line fails, crashes, or takes more than three times
as long as without it, two times of at most three; as equal when the compiler makes the same code of it; as equivalent when
tools/dev/equivalent_mutants.json says why. The last line is "N mutants, N killed, N survived".
"""
import argparse
import concurrent.futures
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import mutants  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "build-mutate"
MAP = STATE / "map.json"
RESULTS = STATE / "results.jsonl"
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.json"
MUST_DIE = Path(__file__).parent / "must_die.json"
ROOMS = ["abi", "base", "checkpoint", "device", "engine", "layout", "membership", "memory", "trace", "transport"]
# The standard library's checks of indices: CI's sanitizers have them, too.
SETUP = ["-Dtests=enabled", "-Dexamples=enabled", "-Ddebug=false", "-Dwerror=false", "-Dcpp_args=-D_GLIBCXX_ASSERTIONS"]
AT_ONCE = 4  # tests of one mutant: most wait for most of their time
# Tests are compiled in units, and the library file by file: a mutant compiles one.
UNITS = ["-Dunity=on", "-Dunity_size=12"]
BY_FILE = ("lib/meson.build", b"override_options: 'unity_size=@0@'.format(unit_size)", b"override_options: 'unity=off'")
# Measure times, or take minutes for what others prove.
LEFT_OUT = re.compile("fsdp-perf|benchmark|steady|network_|^tree$|header|abi-frozen|train_gpt_cuda|hardening|nvtx|installed")


class Tree:
    """A copy of the tracked files with a build of its own."""

    def __init__(self, name, *options, by_file=False):
        self.path, self.build = STATE / name, STATE / name / "build"
        self.options, self.by_file = [*SETUP, *UNITS, *options], by_file

    def text(self, name):
        text = (ROOT / name).read_bytes()
        if self.by_file and name == BY_FILE[0]:
            assert BY_FILE[1] in text
            text = text.replace(*BY_FILE[1:])
        return text

    def update(self):
        asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
        for name in map(os.fsdecode, filter(None, files)):
            source, copy = ROOT / name, self.path / name
            if source.is_file() and not (copy.is_file() and copy.read_bytes() == self.text(name)):
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(self.text(name))
                shutil.copymode(source, copy)
        if not (self.build / "build.ninja").exists():
            subprocess.run(["meson", "setup", *self.options, str(self.build), str(self.path)], check=True, stdout=subprocess.DEVNULL)
        return self

    def make(self, *targets, jobs=None):
        command = ["ninja", "-C", str(self.build), *([f"-j{jobs}"] if jobs else []), *targets]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)

    def tests(self):
        asked = ["meson", "introspect", "--tests", str(self.build)]
        found = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
        # Meson runs them in the build's folder.
        return {f"{t['suite'][0].split(':')[-1]}/{t['name']}": {**t, "workdir": t["workdir"] or str(self.build)}
                for t in found if not LEFT_OUT.search(t["name"])}

    def targets(self):
        """File name of what is built -> ninja's name for it, by the id that tests depend on."""
        asked = ["meson", "introspect", "--targets", str(self.build)]
        found = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
        return {t["id"]: [os.path.relpath(f, self.build) for f in t["filename"]] for t in found}

    def library(self):
        return next(files[0] for id, files in self.targets().items() if id.endswith("@@fsdp@sha"))


def run_test(test, limit_s, environment=None):
    """(whether it passed, seconds)"""
    environment = {**os.environ, **test["env"], "GTEST_FAIL_FAST": "1", "MALLOC_PERTURB_": "165", **(environment or {})}
    started = time.monotonic()
    child = subprocess.Popen(test["cmd"], env=environment, cwd=test["workdir"], stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
    hangs = False
    try:
        output = child.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        output, hangs = "", True
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
    passed = not hangs and child.returncode in (0, 77) and "\nnot ok" not in "\n" + output
    return passed, time.monotonic() - started


def fails_twice(test, limit_s):
    """(how a test fails two times of three or "", seconds). One failure alone may be due to a busy machine."""
    took, failures = 0.0, 0
    for attempt in range(3):
        passed, seconds = run_test(test, limit_s)
        took += seconds
        failures += not passed
        if not failures:
            break
        if failures == 2:
            return ("hangs" if seconds >= limit_s else "fails"), took
    return "", took


def covered_lines(tree, counters):
    """({file: lines that were run}, {file: lines that have code}), from the coverage data that a test left in a
    folder."""
    data = [p for p in counters.rglob("*.gcda") if "/lib/" in str(p)]
    run, have = {}, {}
    for counter in data:  # gcov wants the compiler's notes beside them
        notes = Path("/" + str(counter.relative_to(counters))).with_suffix(".gcno")
        if not counter.with_suffix(".gcno").exists():
            counter.with_suffix(".gcno").symlink_to(notes)
    for at in range(0, len(data), 32):
        command = ["gcov", "--json-format", "--stdout", *map(str, data[at:at + 32])]
        out = subprocess.run(command, capture_output=True, text=True, cwd=tree.build).stdout
        for text in out.splitlines():
            for file in json.loads(text)["files"]:
                name = os.path.normpath(tree.build / file["file"])
                if not name.startswith(f"{tree.path}/lib/"):
                    continue
                name = os.path.relpath(name, tree.path)
                for line in file["lines"]:
                    have.setdefault(name, set()).add(line["line_number"])
                    if line["count"]:
                        run.setdefault(name, set()).add(line["line_number"])
    return run, have


def cover(tree, name, test):
    counters = STATE / "counters" / name.replace("/", "_")
    shutil.rmtree(counters, ignore_errors=True)
    passed, took = run_test(test, 900, {"GCOV_PREFIX": str(counters)})
    run, have = covered_lines(tree, counters)
    shutil.rmtree(counters, ignore_errors=True)
    return name, passed, took, run, have


def make_map(arguments):
    tree = Tree("coverage", "-Db_coverage=true", "-Doptimization=0").update()
    made = tree.make("all", "library-tests")
    if made.returncode:
        sys.exit(made.stdout[-4000:])
    known = json.loads(MAP.read_text()) if MAP.exists() and arguments.more else {"lines": {}, "code": {}, "seconds": {}, "texts": {}}
    tests = {name: test for name, test in sorted(tree.tests().items())
             if name not in known["seconds"] and (not arguments.suite or name.split("/")[0] in arguments.suite)}
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = [pool.submit(cover, tree, name, test) for name, test in tests.items()]
        for number, (name, passed, took, run, have) in enumerate((w.result() for w in concurrent.futures.as_completed(waiting)), 1):
            print(f"{number}/{len(tests)} {name}: {took:.1f} s, {sum(map(len, run.values()))} lines{'' if passed else ', FAILED'}", flush=True)
            for file, numbers in have.items():
                known["code"][file] = sorted(numbers | set(known["code"].get(file, [])))
                known["texts"].setdefault(file, (tree.path / file).read_text())
            if not passed:
                continue
            known["seconds"][name] = took
            for file, numbers in run.items():
                for line in numbers:
                    known["lines"].setdefault(file, {}).setdefault(str(line), []).append(name)
            MAP.write_text(json.dumps(known))


class Covering:
    """The map, for files that may have changed a little since: lines are found again by their text."""

    def __init__(self):
        if not MAP.exists():
            sys.exit("mutate.py: there is no map yet; `tools/dev/mutate.py map` makes it")
        self.map = json.loads(MAP.read_text())

    def __call__(self, mutant):
        text = self.map["texts"].get(mutant.file, "").splitlines()
        at = [n for n, line in enumerate(text, 1) if line == mutant.before]
        if not at:
            return sorted(self.map["seconds"], key=self.map["seconds"].get)
        number = min(at, key=lambda n: abs(n - mutant.line))
        lines = self.map["lines"].get(mutant.file, {})
        found = next((lines[str(n)] for n in range(number, max(0, number - 4), -1) if str(n) in lines), None)
        if found is None:  # a killed process reports no lines: all tests that run any line of the file
            found = {name for names in lines.values() for name in names}
        return sorted(found, key=lambda name: self.map["seconds"].get(name, 1e9))

    def files(self, rooms):
        return sorted(f for f in self.map["code"] if f.split("/")[1] in rooms and f.endswith(".cpp") and (ROOT / f).exists())

    def executable(self, file):
        """The lines of today's file that were compiled to code when the map was made."""
        old, now = self.map["texts"][file].splitlines(), (ROOT / file).read_text().splitlines()
        code = {old[n - 1] for n in self.map["code"][file] if n <= len(old)}
        return {n for n, line in enumerate(now, 1) if line in code}


def draw(covering, arguments):
    found = []
    for file in covering.files(arguments.room or ROOMS):
        found += mutants.of_text(file, (ROOT / file).read_text(), covering.executable(file))
    random.Random(arguments.seed).shuffle(found)
    # A line with many mutants is drawn no more often than others: one mutant of each line is taken.
    once, first = set(), []
    for mutant in found:
        place = (mutant.file, mutant.line)
        if place not in once:
            once.add(place)
            first.append(mutant)
    return first


class Job:
    def __init__(self, tree, covering, budget_s):
        self.budget_s = budget_s
        self.tree, self.covering, self.targets = tree, covering, tree.targets()
        self.tests, self.library = tree.tests(), tree.library()

    def objects(self, file):
        stem = file.removeprefix("lib/").replace("/", "_")
        return [p for p in self.tree.build.rglob(stem + ".o") if "fsdp_objects" in str(p)]

    def build_for(self, names):
        wanted = sorted({f for name in names for d in self.tests[name]["depends"] for f in self.targets.get(d, [])})
        return self.tree.make(self.library, *wanted, jobs=2)

    def try_one(self, mutant):
        source = self.tree.path / mutant.file
        text = source.read_text()
        lines = text.splitlines(keepends=True)
        if lines[mutant.line - 1].rstrip("\n") != mutant.before:
            return {"result": "moved"}
        before = [p.read_bytes() for p in self.objects(mutant.file)]
        lines[mutant.line - 1] = mutant.after + "\n"
        try:
            source.write_text("".join(lines))
            return self.judge(mutant, before)
        finally:
            source.write_text(text)

    def limit(self, name):
        return 3 * self.covering.map["seconds"].get(name, 60) + 5

    def judge(self, mutant, before):
        made = self.tree.make("lib/libfsdp_objects.a", jobs=2)
        if made.returncode:
            return {"result": "does not compile"}
        if before and before == [p.read_bytes() for p in self.objects(mutant.file)]:
            return {"result": "equal"}
        names = [n for n in self.covering(mutant) if n in self.tests]
        asked, took = 0, 0.0
        # The programs of the quickest tests first: most mutants die there, and the others need no linking.
        for at in range(0, len(names), 8):
            some = names[at:at + 8]
            made = self.build_for(some)
            if made.returncode:
                return {"result": "killed", "by": "the build", "tests": asked}
            with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
                found = list(pool.map(lambda name: (name, *fails_twice(self.tests[name], self.limit(name))), some))
            asked, took = asked + len(some), took + sum(seconds for _, _, seconds in found)
            for name, how, _ in found:
                if how:
                    return {"result": "killed", "by": f"{name} ({how})", "tests": asked, "seconds": round(took)}
            if took > self.budget_s:  # a remaining test might kill the mutant, which still counts as survived
                break
        return {"result": "survived", "tests": f"{asked} of {len(names)}", "seconds": round(took)}


def known():
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def reasons():
    return json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}


def run(arguments):
    covering = Named() if arguments.must_die else Covering()
    if arguments.patch:
        drawn, label = [parse_patch(arguments.patch)], f"patch {arguments.patch}"
    elif arguments.must_die:
        drawn, label = listed(), "must die"
    else:
        drawn, label = draw(covering, arguments), f"seed {arguments.seed}"
    chosen = arguments.patch or arguments.must_die
    wanted = len(drawn) if chosen else arguments.sample
    done = {r["key"]: r for r in known() if r["run"] == label and not chosen}
    jobs = queue.Queue()
    for j in range(arguments.jobs):
        tree = Tree(f"tree{j}", "-Doptimization=g", by_file=True).update()
        print(f"building the library in {tree.path}; programs follow when they are asked for", flush=True)
        made = tree.make(tree.library(), "lib/libfsdp_objects.a")
        if made.returncode:
            sys.exit(made.stdout[-4000:])
        jobs.put(Job(tree, covering, arguments.budget))
    counted = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool, open(RESULTS, "a") as results:

        def work(mutant):
            if mutant.key in done:
                return mutant, done[mutant.key], False
            if mutant.key in reasons():
                return mutant, {"result": "equivalent", "why": reasons()[mutant.key]}, True
            job = jobs.get()
            try:
                return mutant, job.try_one(mutant), True
            finally:
                jobs.put(job)

        waiting, rest = set(), iter(drawn)
        while True:
            # A mutant that no test kills takes long, so the next ones do not wait for it.
            while counted + len(waiting) < wanted and len(waiting) < arguments.jobs and (mutant := next(rest, None)):
                waiting.add(pool.submit(work, mutant))
            if not waiting:
                break
            ended, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for mutant, outcome, is_new in (future.result() for future in ended):
                if is_new:
                    row = {"run": label, "key": mutant.key, "file": mutant.file, "line": mutant.line, "kind": mutant.kind,
                           "before": mutant.before, "after": mutant.after, **outcome}
                    results.write(json.dumps(row) + "\n")
                    results.flush()
                counted += outcome["result"] in ("killed", "survived", "equivalent")
                by = outcome.get("by", outcome.get("why", ""))
                print(f"{counted}/{wanted} {outcome['result']}: {mutant.diff()}\n  {by} [{outcome.get('tests', 0)} tests, {outcome.get('seconds', 0)} s]", flush=True)
    report(argparse.Namespace(run=label))


def parse_patch(file):
    text = Path(file).read_text().splitlines()
    name = next(line[6:] for line in text if line.startswith("--- a/"))
    before = next(line[1:] for line in text if line.startswith("-") and not line.startswith("---"))
    after = next(line[1:] for line in text if line.startswith("+") and not line.startswith("+++"))
    lines = (ROOT / name).read_text().splitlines()
    return mutants.Mutant(name, lines.index(before) + 1, "patch", before, after)


def listed():
    found = []
    for one in json.loads(MUST_DIE.read_text()):
        lines = (ROOT / one["file"]).read_text().splitlines()
        if one["before"] not in lines:
            sys.exit(f"mutate.py: {one['file']} has no line like that any more ({one['what']}):\n{one['before']}")
        found.append(mutants.Mutant(one["file"], lines.index(one["before"]) + 1, one["what"], one["before"], one["after"]))
    return found


class Named:
    """In place of the map: the tests that each line of must_die.json names."""

    def __init__(self):
        self.map = {"seconds": {}}
        self.names = {(one["file"], one["before"]): one["tests"] for one in json.loads(MUST_DIE.read_text())}

    def __call__(self, mutant):
        names = self.names[mutant.file, mutant.before]
        return [f"{suite}/{name}" for name in names for suite in ("engine", "simulated", "unit")]


def report(arguments):
    label = getattr(arguments, "run", None) or f"seed {arguments.seed}"
    rows = {r["key"]: r for r in known() if r["run"] == label}
    last = [r for r in rows.values() if r["result"] in ("killed", "survived", "equivalent")]
    argued = reasons()
    survived = [r for r in last if r["result"] == "survived" and r["key"] not in argued]
    for row in survived:
        print(f"survived: {row['file']}:{row['line']} ({row['kind']})\n-{row['before']}\n+{row['after']}")
    equivalent = [r for r in last if r["key"] in argued or r["result"] == "equivalent"]
    for row in equivalent:
        print(f"equivalent: {row['file']}:{row['line']}: {argued.get(row['key'], row.get('why'))}")
    killed = sum(r["result"] == "killed" for r in last)
    print(f"{len(equivalent)} equivalent, {sum(r['result'] == 'equal' for r in rows.values())} of the same code, "
          f"{sum(r['result'] == 'does not compile' for r in rows.values())} that do not compile")
    print(f"{killed + len(survived)} mutants, {killed} killed, {len(survived)} survived")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    mapping = commands.add_parser("map")
    mapping.add_argument("--jobs", type=int, default=4)
    mapping.add_argument("--suite", action="append", help="tests of these alone")
    mapping.add_argument("--more", action="store_true", help="keep the map there is, and add the tests that it lacks")
    mapping.set_defaults(do=make_map)
    running = commands.add_parser("run")
    running.add_argument("--sample", type=int, default=60)
    running.add_argument("--seed", type=int, default=1)
    running.add_argument("--room", action="append", choices=ROOMS)
    running.add_argument("--jobs", type=int, default=1)
    running.add_argument("--budget", type=float, default=float("inf"), help="seconds of tests after which a mutant counts as survived")
    running.add_argument("--patch")
    running.add_argument("--must-die", action="store_true")
    running.set_defaults(do=run)
    reporting = commands.add_parser("report")
    reporting.add_argument("--seed", type=int, default=1)
    reporting.set_defaults(do=report)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
