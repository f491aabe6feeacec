# SPDX-License-Identifier: Apache-2.0
# The interpreter in C, which Meson builds. usage: see ../README.md
set -u
program=$FSDP_BUILD/bindings/conformance/c/conformance
if [ "$1" = prepare ]; then
  [ -x "$program" ] && exit 0
  echo "$program was not built (meson setup -Dtests=enabled)"
  exit 77
fi
exec "$program" "$@"
