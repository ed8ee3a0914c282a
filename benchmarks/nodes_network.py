"""Nodes of the benchmark: network namespaces that a switch joins by links of limited width."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


class Unavailable(Exception):
    """What the machine does not allow; the message says why."""


@dataclass(frozen=True)
class Node:
    """A namespace with an address of its own."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs ``words`` there."""
        return ["ip", "netns", "exec", self.name, *words]


@contextlib.contextmanager
def nodes(count: int, megabits: int) -> Iterator[list[Node]]:
    """So many namespaces, each behind a link of ``megabits`` a second in each direction.

    Raises Unavailable without root or iproute2, or where namespaces are not allowed.
    """
    if os.geteuid() != 0:
        raise Unavailable("namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"no `{tool}` here (Debian: iproute2)")
    mark = f"stk{os.getpid()}"
    switch = f"{mark}-sw"
    with contextlib.ExitStack() as stack:
        _add(stack, switch)
        _run("ip", "-n", switch, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "hub", "up")
        made = []
        for number in range(count):
            node = Node(f"{mark}-n{number}", f"10.83.0.{number + 1}")
            port = f"p{number}"
            _add(stack, node.name)
            veth = f"type veth peer name {port} netns {switch}"
            _run(*f"ip -n {node.name} link add eth0 {veth}".split())
            _run(*f"ip -n {node.name} addr add {node.address}/24 dev eth0".split())
            _run(*f"ip -n {switch} link set {port} master hub up".split())
            for device in ("lo", "eth0"):
                _run(*f"ip -n {node.name} link set {device} up".split())
            _limit(node.name, "eth0", megabits)
            _limit(switch, port, megabits)
            made.append(node)
        yield made


def _add(stack: contextlib.ExitStack, name: str) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)


def _limit(namespace: str, device: str, megabits: int) -> None:
    tc = ["tc", "-n", namespace]
    _run(*tc, *f"qdisc add dev {device} root handle 1: htb default 1".split())
    rate = f"rate {megabits}mbit ceil {megabits}mbit burst 256k cburst 256k"
    _run(*tc, *f"class add dev {device} parent 1: classid 1:1 htb {rate}".split())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}`: {done.stderr.strip()}")
