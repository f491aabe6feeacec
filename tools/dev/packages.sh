# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# For sourcing: need_packages [-y] PACKAGE... makes sure that Debian or Ubuntu packages are installed.
# If nothing is missing, prints nothing. As root, prints the command that installs the missing packages and runs it.
# Otherwise prints the command and asks; with -y it does not ask, and uses sudo. Fails if packages are still missing.
# Without dpkg it says so and succeeds: the build will name what it lacks.

_packages_missing() {
  for _package; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$_package" 2>/dev/null) in
      installed) ;;
      *) printf ' %s' "$_package" ;;
    esac
  done
}

# Asks on the terminal; no terminal means no.
_packages_agreed() {
  [ -t 0 ] || return 1
  printf 'Run it now? [y/N] '
  read -r _answer || return 1
  case $_answer in [yY]*) return 0 ;; *) return 1 ;; esac
}

need_packages() {
  _yes=0
  [ "${1:-}" = -y ] && { _yes=1; shift; }
  if ! command -v dpkg-query >/dev/null 2>&1; then
    echo "This is no Debian or Ubuntu: install by hand what corresponds to: $*"
    return 0
  fi
  _missing=$(_packages_missing "$@")
  [ -z "$_missing" ] && return 0

  _sudo=
  [ "$(id -u)" -eq 0 ] || _sudo='sudo '
  _line="${_sudo}apt-get update && ${_sudo}env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends$_missing"
  echo "Packages are missing:$_missing"
  echo "+ $_line"
  if [ -n "$_sudo" ] && [ $_yes -eq 0 ]; then
    _packages_agreed || { echo 'Not installed: run the line above, or call this script again with -y.' >&2; return 1; }
  fi
  sh -c "$_line" </dev/null || { echo 'The line above failed.' >&2; return 1; }
}
