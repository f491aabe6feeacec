#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Which of its files a test program runs (tests/chosen_files.h): a test that asks for the wrong files must not pass.
# usage: chosen_files_test.sh engine_misuse
set -u
program=$1
number=0 failed=0
check() {
  number=$((number + 1))
  if [ "$2" = "$3" ]; then
    echo "ok $number - $1"
  else
    echo "not ok $number - $1"
    echo "# '$2', not '$3'"
    failed=1
  fi
}

# suites ARGUMENTS...: those of which a test is chosen
suites() { "$program" --gtest_list_tests "$@" | sed -n 's/^\([A-Za-z]*\)\.$/\1/p' | sort | tr '\n' ' '; }
# says ARGUMENTS...: the exit status, and the end of what is said
says() {
  said=$("$program" "$@" 2>&1)
  echo "$?: $(echo "$said" | tail -n 1)"
}

all=$("$program" --gtest_list_tests | grep -c '^  ')
of_room=$("$program" --files=room_test.cpp --gtest_list_tests | grep -c '^  ')
of_both=$("$program" --files=room_test.cpp,misuse_step_test.cpp --gtest_list_tests | grep -c '^  ')
of_step=$("$program" --files=misuse_step_test.cpp --gtest_list_tests | grep -c '^  ')
check 'a file has its tests' "$of_room" "$(grep -c '^TEST' "$(dirname "$0")/engine/room_test.cpp")"
check 'two files have those of both' "$of_both" $((of_room + of_step))
check 'all files have more' "$((all > of_both))" 1
check 'a filter chooses among the files' "$(suites --files=room_test.cpp,misuse_step_test.cpp '--gtest_filter=Room.*')" 'Room '
none='2: no test of the chosen files has a name that the filter lets through'
check 'a filter for tests of another file is an error' "$(says --files=room_test.cpp '--gtest_filter=Misuse*')" "$none"
check 'an empty filter is an error' "$(says --files=room_test.cpp --gtest_filter=)" "$none"
check 'a file that is not there is an error' "$(says --files=gone_test.cpp)" "2: gone_test.cpp: none of this program's tests is in it"
check 'an argument that nobody knows is an error' "$(says --file=room_test.cpp)" \
  "2: unknown argument '--file=room_test.cpp' (known: --files=FILE,... and those of GoogleTest)"
echo "1..$number"
exit $failed
