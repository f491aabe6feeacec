#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests fsdp-run --debug: a fault in the library's memory writes a line that names the group. The process ends as
# without --debug. usage: fault_test.sh FSDP_RUN PRELOADED FAULTING_RANK BIN_DIRECTORY PRELOAD_DIRECTORY
set -u
run=$(realpath "$1")
preloaded=$(realpath "$2")
rank=$(realpath "$3")
bin_directory=$4 preload_directory=$5
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/tap.sh"
enter_scratch
unset FSDP_DEBUG FSDP_DEBUG_VIEWS LD_PRELOAD ASAN_OPTIONS
export TMPDIR="$work"
# shellcheck disable=SC3045  # dash and bash know it
ulimit -c 0

# If the kernel says whether it was a read or a write, the line does too.
case $(uname -m) in x86_64) is_told=1 ;; *) is_told= ;; esac
read_in='an access to' write_into='an access to'
[ -n "$is_told" ] && read_in='a read in' write_into='a write into'

job() { capture "$run" --grace-seconds 0.1 "$@"; }
lines() { grep -c 'fsdp: SIG' err; }

# expect_line NAME TEXT: the previous job ended by SIGSEGV, with one line that has this text.
expect_line() {
  check "$1 ends the rank as before" equal $status 139
  check "... which fsdp-run says as before" contains "$err" "was killed by signal 11"
  check "... and one line explains it" equal "$(lines)" 1
  check "... naming the group" contains "$err" "$2"
}

# The group's name contains a newline, which is shown as "?".
group="group 'layer.3?of two lines' (rank 1, model 1)"
job -n 2 --debug "$rank" read
expect_line "a read of released weights" ": $read_in the weights of $group"
check "... with the address" contains "$err" "[1] fsdp: SIGSEGV at 0x"
[ -z "$is_told" ] || check "... and why" contains "$err" ", which this rank has released (fsdp_reshard"
job -n 2 --debug "$rank" write
expect_line "a write into weights" ": $write_into the weights of $group, which is read-only"
job -n 2 --debug "$rank" late
expect_line "a write into a gradient after its reduce" \
  ": $write_into the gradient of $group, which this rank has given back (fsdp_reduce_grad"
job -n 1 --debug "$rank" window
expect_line "a read of whole weights in the update window" ": $read_in the weights of group 'layer.3?of two lines' (rank 0, model 1), which"
[ -z "$is_told" ] || check "... and why" contains "$err" "cannot be read in the update window"
job -n 2 --debug "$rank" destroyed
expect_line "a read of what a destroyed model had" ": $read_in former memory of $group, whose model has been destroyed"
job -n 1 --debug "$rank" read threads
expect_line "a rank that is a thread" ": $read_in the weights of $group"

for kind in null raise; do
  job -n 1 --debug "$rank" $kind
  check "a fault elsewhere ($kind) ends the rank as before" equal $status 139
  check "... without a line" equal "$(lines)" 0
done
job -n 1 --debug sh -c 'kill -SEGV $$'
check "so does a signal that somebody sends" equal $status 139
job -n 1 --debug "$rank" own
check "a program's own handler stays" equal $status 51
check "... and alone" equal "$err" "[0] the program's own handler
fsdp-run: rank 0 (pid $(sed -n 's/.*(pid \([0-9]*\)).*/\1/p' err)) exited with status 51"
job -n 1 "$rank" late
check "without --debug nothing is preloaded" equal "$status$err" "0"
check "what fsdp-run wrote for it is gone" equal "$(echo fsdp-run.*)" "fsdp-run.*"

# shellcheck disable=SC2016  # the ranks' shells expand the variables
{
  job -n 1 --debug sh -c 'echo $LD_PRELOAD; echo $ASAN_OPTIONS; ls -ld "$FSDP_DEBUG_VIEWS"'
  check "the handler is preloaded" contains "$out" "[0] $preloaded
[0] verify_asan_link_order=0
[0] drwx------"
  cp "$preloaded" other.so
  LD_PRELOAD=$PWD/other.so ASAN_OPTIONS=halt_on_error=1 job -n 1 --debug sh -c 'echo $LD_PRELOAD; echo $ASAN_OPTIONS'
  check "... behind what is there" equal "$out" "[0] $PWD/other.so:$preloaded
[0] verify_asan_link_order=0:halt_on_error=1"
}

if printf 'int main(void) { return 3; }' | cc -fsanitize=address -x c -o with_asan - 2>cc.log; then
  job -n 1 --debug ./with_asan
  check "a program with AddressSanitizer starts" equal $status 3
else
  skip "a program with AddressSanitizer" "the compiler has none"
fi

# This tests the installed layout in another folder.
mkdir -p "root$bin_directory" "root$preload_directory"
cp "$run" "root$bin_directory/fsdp-run"
run=root$bin_directory/fsdp-run
job -n 1 --debug "$rank" late
check "without the handler the job runs all the same" equal $status 139
check "... and fsdp-run says what is missing" contains "$err" "fsdp-run: --debug: faults will not be explained: there is no fsdp-fault-line.so in '"
cp "$preloaded" "root$preload_directory"
job -n 1 --debug "$rank" late
expect_line "an installed fsdp-run" ": $write_into the gradient of group"
mkdir "root/has space"
cp "$run" "$preloaded" "root/has space"
run="root/has space/fsdp-run"
job -n 1 --debug "$rank" late
check "a path that LD_PRELOAD cannot name is told" contains "$err" "LD_PRELOAD cannot name '"
finish
