# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# Sourced by the shell tests: reports each case in the Test Anything Protocol, which Meson counts.
tap_cases=0
tap_failed=0

# check NAME COMMAND...: the case passes if the command does.
check() {
  tap_name=$1
  shift
  tap_cases=$((tap_cases + 1))
  if "$@"; then
    echo "ok $tap_cases - $tap_name"
  else
    echo "not ok $tap_cases - $tap_name"
    tap_failed=1
  fi
}

skip() {
  tap_cases=$((tap_cases + 1))
  echo "ok $tap_cases - $1 # SKIP $2"
}

finish() {
  echo "1..$tap_cases"
  exit $tap_failed
}

# Changes to an empty folder, $work, which is removed at the end.
enter_scratch() {
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  cd "$work" || exit 1
}

# capture COMMAND...: sets $out, $err and $status, and leaves the files out and err.
# shellcheck disable=SC2034  # read by the caller
capture() {
  "$@" >out 2>err
  status=$?
  out=$(cat out)
  err=$(cat err)
}

# These comparisons print the difference. Each printed line is a comment of the protocol.
explain() {
  printf '%s\n' "$@" | sed 's/^/# /'
}

equal() {
  [ "$1" = "$2" ] && return 0
  explain "expected: $2" "got: $1"
  return 1
}

contains() {
  case $1 in *"$2"*) return 0 ;; esac
  explain "does not contain: $2" "text: $1"
  return 1
}

lacks() {
  case $1 in *"$2"*) explain "contains: $2" "text: $1"; return 1 ;; esac
  return 0
}
