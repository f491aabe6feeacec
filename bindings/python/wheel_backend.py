# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel (PEP 517): the package, libfsdp.so, and what it needs that no system promises.

    pip wheel bindings/python --no-deps

builds the library with Meson in build-wheel/, for the host device (CUDA and NCCL are never inside): libstdc++, libgcc
and OpenSSL's HMAC are linked statically. The platform of the wheel is what the libraries ask of glibc:
py3-none-manylinux_2_36_x86_64, say. With FSDP_WHEEL_LIBRARY=/path/to/libfsdp.so that library is taken instead; where it
needs others that it does not find beside itself, the wheel is for this system alone (linux_x86_64).
"""

import base64
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Libraries that every system has (PEP 600); others are put beside libfsdp.so.
PROMISED = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux.*")
MESON = [
    "-Dtests=disabled",
    "-Dexamples=disabled",
    "-Dcuda=disabled",
    "-Ddebug=false",
    # The kernels have -O2 in any build. The rest is 50 ns slower a call than with -O2, in half of the compiler's time.
    "-Doptimization=1",
    "-Dprefer_static=true",
    "-Dcpp_link_args=['-static-libstdc++','-static-libgcc','-Wl,-rpath,$ORIGIN']",
]


def run(*command):
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def read_version():
    return re.search(r"version: '([\d.]+)'", (ROOT / "meson.build").read_text())[1]


def build_library():
    if given := os.environ.get("FSDP_WHEEL_LIBRARY"):
        return pathlib.Path(given).resolve()
    build = ROOT / "build-wheel"
    if not (build / "build.ninja").exists():
        run("meson", "setup", build, ROOT, *MESON)
    target = f"lib/libfsdp.so.{read_version()}"
    run(
        "ninja",
        "-C",
        build,
        *(["-j", os.environ["FSDP_WHEEL_JOBS"]] if "FSDP_WHEEL_JOBS" in os.environ else []),
        target,
    )
    return build / target


def needed_libraries(library):
    """The libraries that it is linked against and no system promises, each with the path that the linker finds."""
    names = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", library))
    found = dict(re.findall(r"(\S+) => (\S+)", run("ldd", library)))
    return {name: found[name] for name in names if not PROMISED.fullmatch(name)}


def finds_beside(library):
    """Whether it looks for other libraries in its own folder."""
    return "$ORIGIN" in run("readelf", "-d", library)


def stripped(library, folder, name):
    """A copy of the library with this name, without symbols that no program links against."""
    copy = pathlib.Path(folder) / name
    shutil.copyfile(library, copy)
    run("strip", "--strip-unneeded", copy)
    return copy


def platform_of(libraries, is_whole):
    versions = [
        tuple(map(int, version.split(b".")))
        for library in libraries
        for version in re.findall(rb"GLIBC_(\d+\.\d+)\0", library.read_bytes())
    ]
    machine = sysconfig.get_platform().rpartition("-")[2]
    if not is_whole:
        return f"linux_{machine}"
    return "manylinux_{}_{}_{}".format(*max(versions), machine)


def metadata():
    lines = [
        "Metadata-Version: 2.1",
        "Name: libfsdp",
        f"Version: {read_version()}",
        "Summary: Fully sharded data parallel training as a library",
        "License: Apache-2.0",
        "Requires-Python: >=3.9",
        "Description-Content-Type: text/markdown",
        "",
        (HERE / "README.md").read_text(),
    ]
    return "\n".join(lines)


class Wheel:
    """The zip file, with its RECORD."""

    def __init__(self, path, info):
        self.file, self.info, self.record = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED), info, []

    def add(self, name, data):
        data = data.encode() if isinstance(data, str) else data
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self.record.append(f"{name},sha256={digest},{len(data)}")
        entry = zipfile.ZipInfo(name)  # of a fixed date: the same files give the same wheel
        entry.compress_type, entry.external_attr = (
            zipfile.ZIP_DEFLATED,
            (0o755 if name.endswith((".so", ".1")) else 0o644) << 16,
        )
        self.file.writestr(entry, data)

    def close(self):
        self.file.writestr(
            zipfile.ZipInfo(f"{self.info}/RECORD"), "\n".join([*self.record, f"{self.info}/RECORD,,", ""])
        )
        self.file.close()


def write_metadata(add, info, platform):
    add(f"{info}/METADATA", metadata())
    add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: libfsdp\nRoot-Is-Purelib: false\nTag: py3-none-{platform}\n")


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """What pip wants to know before it builds: the platform is not known yet, and not asked."""
    info = f"libfsdp-{read_version()}.dist-info"
    folder = pathlib.Path(metadata_directory)
    (folder / info).mkdir()
    write_metadata(lambda name, text: (folder / name).write_text(text), info, "any")
    return info


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    info = f"libfsdp-{read_version()}.dist-info"
    with tempfile.TemporaryDirectory() as folder:
        built = build_library()
        libraries = [stripped(built, folder, "libfsdp.so")]
        needed = needed_libraries(built)
        if finds_beside(built):
            libraries += [stripped(path, folder, name) for name, path in needed.items()]
        platform = platform_of(libraries, not needed or finds_beside(built))
        name = f"libfsdp-{read_version()}-py3-none-{platform}.whl"
        wheel = Wheel(pathlib.Path(wheel_directory) / name, info)
        for path in sorted((HERE / "libfsdp").rglob("*.py")):
            wheel.add(path.relative_to(HERE).as_posix(), path.read_bytes())
        for path in libraries:
            wheel.add(f"libfsdp/{path.name}", path.read_bytes())
    write_metadata(wheel.add, info, platform)
    wheel.add(f"{info}/LICENSE", (ROOT / "LICENSE").read_bytes())
    wheel.close()
    return name


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("libfsdp has no source distribution: the wheel is built from a checkout")
