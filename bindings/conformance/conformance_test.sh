#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the scenarios in every installed language, as TAP. usage: conformance_test.sh SOURCE_ROOT BUILD_ROOT
set -u
cd "$1" || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
number=0
report() {
  number=$((number + 1))
  echo "$1 $number - $2"
}

# The expected values are those that the reference computes, and the file has all of these values.
if python3 bindings/conformance/reference.py --check >"$work/reference" 2>&1; then
  report ok 'scenarios.txt is what reference.py writes'
else
  report 'not ok' 'scenarios.txt is what reference.py writes'
  sed 's/^/# /' "$work/reference"
fi

sh bindings/conformance/run.sh "$2" >"$work/run" 2>&1
status=$?
sed 's/^/# /' "$work/run"
[ $status -eq 0 ] && report ok 'all languages agree' || report 'not ok' 'all languages agree'
for script in bindings/conformance/languages/*.sh; do
  language=$(basename "$script" .sh)
  why=$(sed -n "s/^$language: skipped: //p" "$work/run")
  [ -n "$why" ] && report ok "$language # SKIP $why" && continue
  grep -q "^$language  *[0-9]* scenarios" "$work/run" && report ok "$language" || report 'not ok' "$language"
done

# The interpreters notice a wrong value in the file.
sed '0,/-> [0-9a-f]\{8\}/s//-> 00000000/' bindings/conformance/scenarios.txt >"$work/wrong.txt"
mkdir -p "$work/saved/1" "$work/saved/2" "$work/saved/4"
if FSDP_BUILD=$2 sh bindings/conformance/languages/c.sh threads "$work/saved" "$work/saved" "$work/wrong.txt" \
  >/dev/null 2>"$work/told"; then
  report 'not ok' 'a wrong value is noticed'
else
  grep -q '00000000' "$work/told" && report ok 'a wrong value is noticed' || report 'not ok' 'a wrong value is told'
fi
echo "1..$number"
