#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# fsdp-perf --op outer between two network namespaces that a bridge connects. As root.
# usage: outer_namespaces.sh FSDP_PERF [RATE] [OPTION...]   RATE as tc understands it, 0: as fast as the kernel copies
set -eu
perf=$1
rate=${2:-0}
shift $(($# > 1 ? 2 : 1))
name=fp$$
clean_up() {
  for i in 0 1; do ip netns del $name-$i 2>/dev/null || true; done
  ip link del $name-b 2>/dev/null || true
}
trap clean_up EXIT
trap 'exit 1' INT TERM
ip link add $name-b type bridge
ip link set $name-b up
for i in 0 1; do
  ip netns add $name-$i
  ip link add $name-v$i type veth peer name net0 netns $name-$i
  ip link set $name-v$i master $name-b up
  ip -n $name-$i addr add 10.213.77.$((i + 1))/24 dev net0
  ip -n $name-$i link set net0 up
  ip -n $name-$i link set lo up
  until ip -n $name-$i -o link show dev net0 | grep -q 'state UP'; do sleep 0.01; done  # before, UCX refuses the device
  [ "$rate" = 0 ] || tc -n $name-$i qdisc add dev net0 root tbf rate "$rate" burst 1m latency 5ms
done
UCX_NET_DEVICES=net0 FSDP_UCX_TCP=trusted "$perf" -n 2 --op outer --netns $name-0,$name-1 --address 10.213.77.1 "$@"
