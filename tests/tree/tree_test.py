#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the rules that docs/architecture.md gives for the source tree. usage: tree_test.py [ROOT]

Every rule is also run on a small bad tree, so that a rule which no longer finds anything fails.
"""
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "dev"))
import plain_words  # noqa: E402

# room: the rooms whose headers it may include, besides its own and the public header
ARROWS = {
    "base": set(),
    "layout": {"base"},
    "checkpoint": {"transport", "layout", "memory", "base"},
    "memory": {"layout", "base"},
    "device": {"base"},
    "membership": {"base"},
    "transport": {"membership", "device", "base"},
    "trace": {"base"},
    "engine": {"checkpoint", "layout", "memory", "device", "membership", "transport", "trace", "base"},
    "abi": {"engine", "checkpoint", "layout", "memory", "device", "membership", "transport", "trace", "base"},
}
# Pure functions of their arguments: no threads, no operating system.
PURE = ("lib/layout/", "lib/memory/", "lib/checkpoint/format/", "lib/checkpoint/plan/")
IMPURE = re.compile(
    r"<(thread|mutex|shared_mutex|atomic|condition_variable|future|chrono|random|fstream|unistd\.h|pthread\.h|sys/.*"
    r"|linux/.*|poll\.h|fcntl\.h|signal\.h)>")
# A backend is named in its own folder and in its room's factory.
BACKENDS = re.compile(r"(device|transport)/(host|cuda|shm|message/tcp|message/ucx|nccl|hierarchy|staging)/")
# Other folders that may name one, and why: shm moves host memory, so it sums with the host's kernels, and messages are
# summed alike (call, channel). cuda's lanes are streams of the host, and it casts on the host what the GPU cannot reach.
# perf measures kernels that no stream is asked for yet (quantize).
BACKEND_FRIENDS = {("lib/device/cuda/", "device/host/"), ("lib/transport/shm/", "device/host/"),
                   ("lib/transport/call/", "device/host/"), ("lib/transport/message/channel/", "device/host/"),
                   ("tools/perf/", "device/host/")}
LONGEST, LONG = 600, 300
COLUMNS = 120
# Names of other projects that look like ours.
FOREIGN_NAMES = {"fsdp_unit_modules"}
SOURCE_TREES = ["include", "lib", "tools", "examples", "tests", "bindings"]
SUFFIXES = {".hpp", ".h", ".c", ".cpp", ".cu", ".sh", ".py"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"][^>"]+[>"])', re.M)


def source_files(root, *trees):
    for tree in trees or SOURCE_TREES:
        for path in sorted((root / tree).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path, path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def without_comments(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)


def library_includes(root):
    """(file, room, what it includes) of every #include in lib/."""
    for path, name, text in source_files(root, "lib"):
        room = name.split("/")[1]
        for include in INCLUDE.findall(text):
            yield name, room, include


def arrows(root):
    for name, room, include in library_includes(root):
        target = include.strip('<>"').split("/")[0]
        if include[0] == "<" or "/" not in include or target == room:
            continue
        if room not in ARROWS:
            yield f"{name}: no rule for the room {room}"
        elif target in ARROWS and target not in ARROWS[room]:
            yield f"{name} includes {include}: {room} may use {', '.join(sorted(ARROWS[room])) or 'nothing'}"


# Each folder of the engine may include those before it.
ENGINE_FOLDERS = ["context", "runtime", "weights", "gradients", "model"]


def engine_arrows(root):
    for name, room, include in library_includes(root):
        source, target = name.split("/")[2:], include.strip('<>"').split("/")
        if room != "engine" or target[0] != "engine":
            continue
        if source[0] not in ENGINE_FOLDERS or target[1] not in ENGINE_FOLDERS:
            yield f"{name} includes {include}: the engine's folders are {', '.join(ENGINE_FOLDERS)}"
        elif ENGINE_FOLDERS.index(target[1]) > ENGINE_FOLDERS.index(source[0]):
            yield f"{name} includes {include}: {target[1]} comes after {source[0]}"


def includes_resolve(root):
    for name, room, include in library_includes(root):
        if include[0] == '"' and include != '"fsdp.h"' and not (root / "lib" / include.strip('"')).is_file():
            yield f"{name} includes {include}: no such file under lib/ (name it from there)"


def purity(root):
    for name, room, include in library_includes(root):
        if name.startswith(PURE) and IMPURE.fullmatch(include):
            yield f"{name} includes {include}: it knows no threads and no operating system"


def backend_names(root):
    for path, name, text in source_files(root, "lib", "tools", "examples"):
        for include in INCLUDE.findall(text):
            match = BACKENDS.match(include[1:])
            if not match or any(name.startswith(who) and match[0] == what for who, what in BACKEND_FRIENDS):
                continue
            if not name.startswith("lib/" + match[0]) and name != f"lib/{match[1]}/factory.cpp":
                yield f"{name} includes {include}: only {match[0]} and {match[1]}/factory.cpp may"


def one_boundary(root):
    for path, name, text in source_files(root, "lib"):
        if not name.startswith("lib/abi/") and 'extern "C"' in without_comments(text):
            yield f'{name} has extern "C": only lib/abi may'


SETTINGS_FILE = "lib/base/settings.cpp"


def one_list_of_settings(root):
    """Each variable FSDP_* that the library reads is in the list, and each of the list is read and documented."""
    path = root / SETTINGS_FILE
    listed = set(re.findall(r'\{"(FSDP_\w+)"', path.read_text(encoding="utf-8"))) if path.is_file() else set()
    read = set()
    for path, name, text in source_files(root, "lib"):
        if name == SETTINGS_FILE:
            continue
        code = without_comments(text)
        for variable in re.findall(r'\bgetenv\(\s*"(FSDP_\w+)"', code):
            yield f"{name} reads {variable} by itself: setting() of base/settings.h does that"
        read |= set(re.findall(r'"(FSDP_\w+)"', code))
        for variable in re.findall(r'\b(?:setting|variable)\(\s*"(FSDP_\w+)"', code):
            if variable not in listed:
                yield f"{name} reads {variable}, which {SETTINGS_FILE} does not list"
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((root / "docs").rglob("*.md")))
    for variable in sorted(listed):
        if variable not in read:
            yield f"{SETTINGS_FILE} lists {variable}, which nothing reads"
        if variable not in text:
            yield f"{SETTINGS_FILE} lists {variable}, of which docs/ says nothing"


def users_see_the_header_only(root):
    for path, name, text in source_files(root, "tools", "examples"):
        if name.startswith(("tools/perf/", "tools/ckpt/")):
            continue  # it measures, or reads and writes, what is below the header: docs/decisions.md
        for include in INCLUDE.findall(text):
            room, slash, _ = include.strip('<>"').partition("/")
            if slash and room in ARROWS and not (path.parent / include.strip('"')).exists():
                yield f"{name} includes {include}: programs use fsdp.h only"


def file_length(root):
    for path, name, text in source_files(root):
        lines = text.count("\n")
        # The header, those that releases had, and what is written from it.
        if lines > LONGEST and not name.endswith(("fsdp.h", "libfsdp/_abi.py")):
            yield f"{name} has {lines} lines, more than {LONGEST}"


def line_length(root):
    for path, name, text in source_files(root):
        if path.suffix in {".sh", ".py"} or "/frozen/" in name:  # a release's client is as it was
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > COLUMNS:
                yield f"{name}:{number} has {len(line)} columns, more than {COLUMNS} (clang-format -i {name})"


# Objects are named in comments: "the rank that waits", not "who waits".
RIDDLES = re.compile(r"\b([Ww]hoever|[Nn]obody|[Ss]omebody|[Ee]verybody|Who)\b")


def plain_comments(root):
    for path, name, text in source_files(root):
        if "/frozen/" in name:  # a release's client is as it was
            continue
        for number, line in enumerate(text.splitlines(), 1):
            comment = re.search(r"(?:^|\s)//(.*)", line)
            if comment and (word := RIDDLES.search(comment[1])):
                yield f'{name}:{number} says "{word[1]}": name the rank, thread, process or call'


# tools/dev/plain_words.py counts them, and --list shows them. A number only ever goes down.
HIDING_WORDS, LONG_SENTENCES = 2, 10


def words_read_once(root):
    found = [finding[3] for finding in plain_words.findings(root)]
    for kind, most in (("hiding word", HIDING_WORDS), ("long sentence", LONG_SENTENCES)):
        if found.count(kind) > most:
            yield f"{found.count(kind)} of '{kind}' in comments and documents, more than {most} (tools/dev/plain_words.py --list)"


# An include behind a namespace is the seam of two files that were put into one. for_each.h is read by a compiler of the
# GPU first, and includes what the host's needs later.
SEAMS = {"lib/device/cuda/for_each.h"}


def includes_come_first(root):
    for path, name, text in source_files(root, "lib", "tools"):
        opened = re.search(r"^namespace fsdp[\w:]* \{", text, re.M)
        for include in re.finditer(r"^#\s*include\s+\S+", text, re.M) if opened and name not in SEAMS else ():
            if include.start() > opened.start() and "HWY" not in text:  # foreach_target.h reads a kernel's file again
                yield f"{name} has {include[0]} behind a namespace: move it to the top"


def filters_match(root):
    """Each part of a --gtest_filter in a meson.build is in the name of a test."""
    sources = [text for path, _, text in source_files(root, "tests") if path.suffix in {".cpp", ".h"}]
    names = {f"{suite}.{test}" for text in sources
             for suite, test in re.findall(r"^(?:TYPED_)?TEST(?:_[FP])?\((\w+),\s*(\w+)\)", text, re.M)}
    prefixes = set(re.findall(r"INSTANTIATE_TEST_SUITE_P\((\w+)", "\n".join(sources)))
    known = " ".join(names | prefixes)
    for path in sorted((root / "tests").rglob("meson.build")):
        text = path.read_text(encoding="utf-8")
        filters = re.findall(r"--gtest_filter=([^'\"]+)'", text) + re.findall(r"'\w+': '([^'/ ]*[*][^'/ ]*)'", text)
        for part in {part for one in filters for part in re.split(r"[:-]", one) if part and "@" not in part}:
            whole = part.split("/")[-1] if part.split("/")[0].strip("*") in prefixes else part
            in_names = fnmatch.filter(names, whole) if "." in part else all(word in known for word in re.split(r"[*/]+", part))
            if not in_names:
                yield f"{path.relative_to(root).as_posix()} has the filter {part}, which no test's name has"


# Metaphors that had to be learnt. docs/glossary.md has the words for what they meant.
RETIRED = {"Porch", "Door", "Doors", "Entrance", "Vigil", "HostVigil", "Court", "Mirror", "Deputy", "Chore", "Duty", "Lookout", "Threshold"}


def retired_names(root):
    for path, name, text in source_files(root, "lib", "tools"):
        for found in re.findall(r"^\s*(?:class|struct)\s+(\w+)", without_comments(text), re.M):
            if found in RETIRED:
                yield f"{name} has a type {found}: a name of the past, see docs/glossary.md"


def license_lines(root):
    for path, name, text in source_files(root):
        if "SPDX-License-Identifier: Apache-2.0" not in text[:200]:
            yield f"{name}: no SPDX-License-Identifier in its first lines"


def documents(root):
    for path in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")]):
        text = path.read_text(encoding="utf-8")
        yield path, path.relative_to(root).as_posix(), re.sub(r"```.*?```", "", text, flags=re.S), text


def document_width(root):
    """Prose ends at 120 columns; tables and code are as wide as they must be."""
    paths = {path for folder in ("", "docs", "examples", "bindings", "tests") for path in
             ((root / folder).rglob("*.md") if folder else root.glob("*.md"))}
    for path in sorted(path for path in paths if "target" not in path.parts):
        code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code ^= line.lstrip().startswith("```")
            if len(line) > COLUMNS and not code and not line.lstrip().startswith("|") and " " in line.strip("- "):
                yield f"{path.relative_to(root)}:{number} has {len(line)} columns, more than {COLUMNS}"


def anchors(path):
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def document_links(root):
    for path, name, prose, _ in documents(root):
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / target) if target else path
            if not file.exists():
                yield f"{name} links to {link}: no such file"
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                yield f"{name} links to {link}: no such heading"


def document_files(root):
    """Every file of the project that the documents name in backticks is there: from the root or from lib, with or without its suffix."""
    rooms = "abi|base|checkpoint|device|engine|layout|membership|memory|trace|transport"
    names = re.compile(rf"`((?:lib|tests|tools|docs|examples|include|bindings|{rooms})/[\w./*-]*[\w*])")
    for path, name, prose, _ in documents(root):
        for file in sorted(file for file in set(names.findall(prose)) if not re.search(r"\b[A-Z]{3,}\b", file)):
            if not any(any(base.glob(pattern)) for base in (root, root / "lib") for pattern in (file, file + ".*")):
                yield f"{name} names {file}: no such file"


def document_names(root):
    """Every fsdp_ or FSDP_ name in the documents is in the public header, or a variable that the library, an example or a test reads."""
    names = re.compile(r"\b(?:fsdp|FSDP)_[a-zA-Z]\w*")
    known = set(names.findall((root / "include/fsdp.h").read_text(encoding="utf-8"))) | FOREIGN_NAMES
    for path, name, text in source_files(root, "lib"):
        known.update(re.findall(r'(?:getenv|setting)\("(FSDP_\w+)"\)', text))
    for path in sorted((root / "tests").rglob("*.cpp")):
        known.update(re.findall(r'getenv\("(FSDP_TEST_\w+)"\)', path.read_text(encoding="utf-8")))
    for folder in ("examples", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            known.update(re.findall(r'environ\.get\("(FSDP_\w+)"', path.read_text(encoding="utf-8")))
    for path, name, _, text in documents(root):
        for word in sorted(set(names.findall(text)) - known):
            if not word.endswith("_"):  # a family, as FSDP_ROLE_*
                yield f"{name} names {word}: not in fsdp.h"


def pictures_are_drawn(root):
    """Each picture of the documents is what the script beside it draws."""
    for script in sorted((root / "docs" / "pictures").glob("*.py")):
        result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
        if result.returncode:
            yield f"docs/pictures/{script.name}: {result.stdout.strip() or result.stderr.strip() or 'it fails'}"


def lines_that_must_die(root):
    """tools/dev/mutate.py looks for each of them as a whole line, once: what has moved moves there, too."""
    listed = root / "tools/dev/must_die.json"
    for one in json.loads(listed.read_text()) if listed.exists() else []:
        file = root / one["file"]
        found = file.read_text().splitlines().count(one["before"]) if file.exists() else 0
        if found != 1:
            yield f"tools/dev/must_die.json: {one['file']} has {found} lines, not one: {one['before'].strip()}"


def one_type_a_name(root):
    """No two files of the library define a type of one qualified name: the linker would take the functions of one for the other's."""
    known = {}
    for path, name, text in source_files(root, "lib"):
        scopes = []
        for line in text.splitlines():
            if opened := re.match(r"namespace ([\w:]*) ?\{", line):
                scopes.append(opened[1])
            elif line.startswith("}  // namespace") and scopes:
                scopes.pop()
            elif "" not in scopes and (found := re.match(r"(?:struct|class) (?:alignas\(\w+\) )?(\w+)(?: final)?(?: :[^;]*)? \{", line)):
                full = "::".join([*scopes, found[1]])
                if known.setdefault(full, name) != name:
                    yield f"{name} defines {full}, as {known[full]} does"


ROOMS_OF_ONE_MEANING = ("abi", "base", "checkpoint", "device", "engine", "layout", "membership", "memory", "trace", "transport")


def one_meaning_a_name(root):
    """A type of these rooms shares its name with no other type of the library, but for what both devices have."""
    known = {}
    for path, name, text in source_files(root, "lib"):
        for found in re.findall(r"^ *(?:struct|class|enum class) (?:alignas\(\w+\) )?(\w+)(?: final)?(?: ?:[^:;{][^;{]*)? \{", text, re.M):
            known.setdefault(found, set()).add(name)
    for type_name, files in sorted(known.items()):
        backends = [f.split("/")[2] for f in files if f.startswith(("lib/device/cuda/", "lib/device/host/"))]
        twins = len(backends) == len(files) == len(set(backends))
        if len(files) > 1 and not twins and any(f.split("/")[1] in ROOMS_OF_ONE_MEANING for f in files):
            yield f"{type_name} means several things: {', '.join(sorted(files))}"


HOPED_TO_BE_MISSING = re.compile(r"""(?<!\+ )["'= (]/(nonexistent|nowhere|missing|no[/-]|not[/-]|does[/-])""")


def folders_of_their_own(root):
    """No test wants a file not to be there that a machine may have: what is missing is missing in a folder of the test's own."""
    for path, name, text in source_files(root, "tests", "bindings", "examples"):
        if name == "tests/tree/tree_test.py":
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if HOPED_TO_BE_MISSING.search(line):
                yield f"{name}:{number} names a file outside of its own folder that is to be missing: {line.strip()}"


# A file that breaks the rule.
RULES = {
    arrows: ("lib/layout/bad.h", '#include "device/device.h"\n'),
    engine_arrows: ("lib/engine/context/bad.h", '#include "engine/model/model.h"\n'),
    includes_resolve: ("lib/layout/bad.h", '#include "layout/not_here.h"\n'),
    purity: ("lib/memory/bad.cpp", "#include <thread>\n"),
    backend_names: ("lib/engine/bad.cpp", '#include "device/host/stream.h"\n'),
    one_boundary: ("lib/transport/bad.cpp", 'extern "C" void fsdp_bad();\n'),
    users_see_the_header_only: ("tools/bad.cpp", '#include "engine/context/context.h"\n'),
    file_length: ("tests/bad.cpp", "\n" * (LONGEST + 1)),
    line_length: ("tests/bad.cpp", "// " + "x" * COLUMNS + "\n"),
    one_list_of_settings: ("lib/base/bad.cpp", 'const char *text = std::getenv("FSDP_BAD");\n'),
    folders_of_their_own: ("tests/bad.cpp", '  open("/nonexistent");\n'),
    plain_comments: ("lib/base/bad.h", "// SPDX\n// Whoever waits here sleeps.\n"),
    includes_come_first: ("lib/base/bad.cpp", "namespace fsdp {\n}\n#include <vector>\n"),
    filters_match: ("tests/bad/meson.build", "test('bad', bad, args: '--gtest_filter=Nothing.HasThisName')\n"),
    words_read_once: ("lib/base/bad.h", "// Somebody asks whoever knows. Nobody does.\n"),
    retired_names: ("lib/base/bad.h", "class Porch {\n};\n"),
    license_lines: ("lib/base/bad.h", "// no license here\n"),
    document_width: ("docs/bad.md", "word " * COLUMNS + "\n"),
    document_links: ("docs/bad.md", "[nowhere](no-such-file.md)\n"),
    document_files: ("docs/bad.md", "See `engine/no_such_file.h` and `lib`.\n"),
    document_names: ("docs/bad.md", "Call fsdp_no_such_call.\n"),
    pictures_are_drawn: ("docs/pictures/bad.py", "import sys\nsys.exit(1)\n"),
    lines_that_must_die: ("tools/dev/must_die.json", '[{"file": "lib/gone.cpp", "before": "  gone();"}]'),
    one_type_a_name: ("lib/base/bad.h", "namespace fsdp {\nstruct Twice {\n};\n}  // namespace fsdp\n"),
    one_meaning_a_name: ("lib/trace/bad.h", "struct Owner {\n  enum class Twice : int { a };\n};\n"),
}


def finds_bad_tree(rule):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "include").mkdir()
        (root / "include/fsdp.h").write_text("")
        name, text = RULES[rule]
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        if rule in (one_type_a_name, one_meaning_a_name):
            (root / name).with_name("worse.h").write_text(text)
        return bool(list(rule(root)))


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
    if root.is_file():
        root = root.parents[2]
    number = failed = 0
    for rule in RULES:
        broken = list(rule(root))
        for passed, what in ((not broken, "holds"), (finds_bad_tree(rule), "finds a bad tree")):
            number += 1
            failed += not passed
            print(f"{'ok' if passed else 'not ok'} {number} - {rule.__name__} {what}")
        for line in broken:
            print(f"# {line}")
    for path, name, text in source_files(root, "lib", "tools", "tests", "examples"):
        if text.count("\n") > LONG:
            print(f"# long: {name} has {text.count(chr(10))} lines; consider splitting above {LONG}")
    print(f"1..{number}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
