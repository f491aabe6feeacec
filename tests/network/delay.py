#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A long cable: a device in each of two network namespaces. What enters at one leaves at the other this many
milliseconds later. It stands in for netem, which not every kernel has. Says "ready" once both devices are there, and
ends with its
standard input. usage: delay.py NAMESPACE DEVICE NAMESPACE DEVICE MILLISECONDS"""
import collections
import ctypes
import fcntl
import os
import selectors
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def open_end(namespace, device):
    space = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(space, CLONE_NEWNET):
        sys.exit(f"setns {namespace}: {os.strerror(ctypes.get_errno())}")
    os.close(space)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return end


def carry(ends, seconds):
    selector = selectors.DefaultSelector()
    for end in (*ends, sys.stdin.fileno()):
        selector.register(end, selectors.EVENT_READ)
    under_way = collections.deque()  # entries are (due time, descriptor, frame)
    while True:
        wait = max(0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in selector.select(wait):
            if key.fd not in ends:
                return
            try:
                while True:
                    under_way.append((time.monotonic() + seconds, ends[1 - ends.index(key.fd)], os.read(key.fd, 65536)))
            except OSError:  # no more at the moment, or the device is down
                pass
        while under_way and under_way[0][0] <= time.monotonic():
            _, to, frame = under_way.popleft()
            try:
                os.write(to, frame)
            except OSError:  # drops it, as a cable without an end would
                pass


if __name__ == "__main__":
    cable = [open_end(sys.argv[1], sys.argv[2]), open_end(sys.argv[3], sys.argv[4])]
    print("ready", flush=True)
    carry(cable, float(sys.argv[5]) / 1000)
