#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: man_test.sh FOLDER_OF_PAGES TOOL...
# Checks that each tool's page, as man shows it, has every option, command and example of the tool's --help.
set -u
pages=$(realpath "$1")
shift
# shellcheck source-path=SCRIPTDIR source=tap.sh
. "$(dirname "$0")/tap.sh"
tools=$(realpath "$@")
enter_scratch
if ! groff --version >/dev/null 2>&1; then
  skip 'pages are those of the tools' 'no groff here'
  finish
fi

# shows WHAT...: a page's text has each of these.
shows() {
  for word; do
    grep -q -e "$word\\([^[:alnum:]-]\\|\$\\)" page || { echo "# $word is not in the page"; return 1; }
  done
}
# words_of COMMAND...: prints the options and commands of its --help.
words_of() { "$@" --help | sed -n 's/^  \(-[^ ]*\).*/\1/p' | tr ',' '\n' | sed 's/{.*//'; }

for tool in $tools; do
  name=$(basename "$tool")
  capture groff -man -Tascii -P-cbou -ww "$pages/$name.1"
  check "$name.1 is a page" equal "$status $err" '0 '
  mv out page
  # shellcheck disable=SC2046  # one word each
  check '... which has its options' shows $(words_of "$tool")
  check '... and its version' grep -q "^libfsdp $("$tool" --version | sed 's/.* //')  " page
  commands=$("$tool" --help | sed -n '/^[Ss][Uu][Bb][Cc][Oo][Mm][Mm][Aa][Nn][Dd][Ss]:/,/^$/s/^  \([a-z]*\) .*/\1/p')
  for command in $commands; do
    # shellcheck disable=SC2046
    check "... and those of $command" shows "$command" $(words_of "$tool" "$command")
  done
done
finish
