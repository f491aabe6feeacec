#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the scenarios through every installed language, and fails if a result is not the expected one or if languages
# differ.
#
# usage: sh bindings/conformance/run.sh [BUILD_FOLDER]     (default: build-tests, else build)
#
# A line for each language: scenarios, hash of all results, seconds. First each language runs the worlds as threads, and
# saves; then as processes, where it loads what the language before it has saved. FSDP_CONFORMANCE_ONLY="c python" picks
# languages.
set -u
cd "$(dirname "$0")/../.." || exit 1
build=build
[ -d build-tests ] && build=build-tests
FSDP_BUILD=$(cd "${1:-$build}" && pwd) || exit 1
export FSDP_BUILD LD_LIBRARY_PATH="$FSDP_BUILD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
here=bindings/conformance
scenarios=$PWD/$here/scenarios.txt
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failed=0

fail() {
  echo "$1"
  failed=1
}

# $here/languages/LANGUAGE.sh is an interpreter. "prepare" builds it, or ends with 77 and says why the language is not
# there.
languages=
for script in $here/languages/*.sh; do
  language=$(basename "$script" .sh)
  case " ${FSDP_CONFORMANCE_ONLY:-$language} " in *" $language "*) ;; *) continue ;; esac
  sh "$script" prepare >"$work/$language.log" 2>&1
  case $? in
    0) languages="$languages $language" ;;
    77) echo "$language: skipped: $(tail -n 1 "$work/$language.log")" ;;
    *) tail -n 40 "$work/$language.log"; fail "$language: cannot be built" ;;
  esac
done
[ -n "$languages" ] || { echo "no language is there"; exit 1; }

# run_threads LANGUAGE; run_processes LANGUAGE THE_ONE_THAT_HAS_SAVED
run_threads() {
  mkdir -p "$work/$1/threads/1" "$work/$1/threads/2" "$work/$1/threads/4"
  sh "$here/languages/$1.sh" threads "$work/$1/threads" "$work/$1/threads" "$scenarios" >"$work/$1.unsorted" ||
    fail "$1: not as expected as threads"
  LC_ALL=C sort "$work/$1.unsorted" >"$work/$1.threads"
}
run_processes() {
  mkdir -p "$work/$1/processes/1" "$work/$1/processes/2" "$work/$1/processes/4"
  : >"$work/$1.unsorted"
  for world in 1 2 4; do
    "$FSDP_BUILD/tools/fsdp-run" -n $world --no-prefix --timeout 120 -- sh "$here/languages/$1.sh" processes \
      "$work/$1/processes" "$work/$2/threads" "$scenarios" >>"$work/$1.unsorted" ||
      fail "$1: not as expected as $world processes"
  done
  LC_ALL=C sort "$work/$1.unsorted" >"$work/$1.processes"
}

for language in $languages; do
  began=$(date +%s)
  run_threads "$language"
  echo $(($(date +%s) - began)) >"$work/$language.seconds"
done

expected=$(grep -c '^scenario ' "$scenarios")
reference=
saved=${languages##* }
for language in $languages; do
  began=$(date +%s)
  run_processes "$language" "$saved"
  saved=$language
  count=$(cut -d' ' -f1 "$work/$language.threads" | uniq | wc -l)
  hash=$(sha256sum <"$work/$language.threads" | cut -c1-16)
  printf '%-8s %d scenarios  %s  %d s\n' "$language" "$count" "$hash" \
    $(($(date +%s) - began + $(cat "$work/$language.seconds")))
  [ "$count" -eq "$expected" ] || fail "$language: $expected scenarios were expected"
  diff "$work/$language.threads" "$work/$language.processes" || fail "$language: threads (<) and processes (>) differ"
  [ -n "$reference" ] || reference=$language
  diff "$work/$reference.threads" "$work/$language.threads" || fail "$reference (<) and $language (>) differ"
done
exit $failed
