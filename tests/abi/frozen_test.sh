#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: frozen_test.sh SOURCE_ROOT LIBRARY
# Clients of every frozen release (tools/dev/freeze_abi.sh) still work: as compiled then, and compiled now from their
# old source, with the old header and with today's. abidiff finds no change of a call or struct beyond the allowed
# additions.
set -u
root=$(realpath "$1")
library=$(realpath "$2")
# shellcheck source-path=SCRIPTDIR
. "$root/tests/tools/tap.sh"
enter_scratch
LD_LIBRARY_PATH=$(dirname "$library")
export LD_LIBRARY_PATH

# stub OUT FOLDER-OF-HEADER ABI-JSON: makes a library of the same calls, which serves for its types only.
stub() {
  python3 - "$3" >stub.c <<'EOF'
import json, sys
print("#include <fsdp.h>")
for call in json.load(open(sys.argv[1]))["calls"]:
    arguments = ", ".join(f"{a['type']} {a['name']}" for a in call["arguments"]) or "void"
    print(f"{call['returns']} {call['name']}({arguments}) {{ {'' if call['returns'] == 'void' else 'return 0;'} }}")
EOF
  "${CC:-cc}" -g -O0 -w -shared -fPIC -I"$2" stub.c -o "$1"
}
runs() {
  "$1" >log 2>&1 && return 0
  sed 's/^/# /' log
  return 1
}
# compile OUT FOLDER-OF-HEADER CLIENT
compile() { "${CC:-cc}" -std=c99 -O1 -I"$2" "$3" -o "$1" "$library" -lpthread -lm; }
# compare OLD NEW RELEASE-FOLDER: compares two libraries. If RELEASE-FOLDER/allowed exists, it lists later additions to
# structs in abidiff's words. named.sed names fields that were reserved then.
compare() {
  if [ -f "$3/allowed" ]; then set -- "$1" "$2" --suppressions "$3/allowed"; else set -- "$1" "$2"; fi
  abidiff --no-added-syms "$@" >difference
}
alike() {
  compare "$@" && return 0
  sed 's/^/# /' difference
  return 1
}
# differ OLD NEW RELEASE-FOLDER WORDS: abidiff finds a change (status 4, or 8 for the worst), and no error occurred (1,
# 2).
differ() {
  compare "$1" "$2" "$3"
  case $? in 4 | 12) contains "$(cat difference)" "$4" ;; *) return 1 ;; esac
}

stub today.so "$root/include" "$root/bindings/abi/abi.json" || echo '# no stub of the header'
found=0
for folder in "$root"/tests/abi/frozen/*/; do
  release=$(basename "$folder")
  found=$((found + 1))
  program=$folder/client-$(uname -m)
  if [ -f "$program" ]; then check "the program of $release runs" runs "$program"
  else skip "the program of $release runs" "there is none for $(uname -m)"; fi
  check "the source of $release compiles with its header" compile then "$folder" "$folder/client.c"
  check "... and runs" runs ./then
  check "the source of $release compiles with today's header" compile now "$root/include" "$folder/client.c"
  check "... and runs" runs ./now
  if command -v abidiff >/dev/null; then
    mkdir -p named
    sed -f "$(if [ -f "$folder/named.sed" ]; then echo "$folder/named.sed"; else echo /dev/null; fi)" "$folder/fsdp.h" >named/fsdp.h
    check "the types of $release have a stub" stub then.so named "$folder/abi.json"
    check "no call or struct of $release has changed" alike then.so today.so "$folder"
    # This tests the comparison itself: it notices a field that becomes wider, and a call that is gone.
    mkdir -p wider
    sed 's/^  uint32_t rank_count;/  uint64_t rank_count;/' "$folder/fsdp.h" >wider/fsdp.h
    stub wider.so wider "$folder/abi.json"
    check "... which a wider field would show" differ then.so wider.so "$folder" "fsdp_mesh_options"
    python3 -c 'import json, sys
abi = json.load(open(sys.argv[1]))
abi["calls"] = [call for call in abi["calls"] if call["name"] != "fsdp_get_rank"]
json.dump(abi, sys.stdout)' "$folder/abi.json" >fewer.json
    stub fewer.so "$folder" fewer.json
    check "... and a call that is gone" differ then.so fewer.so "$folder" "1 Removed"
  else
    skip "no call or struct of $release has changed" 'abidiff is not installed'
  fi
done
check "a release was frozen" [ "$found" -gt 0 ]
finish
