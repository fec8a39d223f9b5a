"""Two machines made of one: network namespaces with an address each; where those are forbidden, the loopback."""

import os
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

SUBNET = "10.77"


@contextmanager
def two_nodes():
    """Yield the address of node 0 and, for each node, the words that a command on it begins with.

    Without the right to make namespaces the words are empty and the address is the loopback: two launchers then run
    on one machine.
    """
    names = [f"tmpl{os.getpid()}n{i}" for i in range(2)]
    links = [f"t{os.getpid()}v{i}" for i in range(2)]
    addresses = [f"{SUBNET}.{os.getpid() % 250}.{i + 1}" for i in range(2)]
    folders = [Path("/etc/netns") / name for name in names]
    try:
        if shutil.which("ip") is None or not _is_done("ip", "netns", "add", names[0]):
            yield "127.0.0.1", [[], []]
            return
        _do("ip", "netns", "add", names[1])
        _do("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address, folder in zip(names, links, addresses, folders, strict=True):
            _do("ip", "link", "set", link, "netns", name)
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            _do("ip", "-n", name, "link", "set", "lo", "up")
            _do("ip", "-n", name, "link", "set", link, "up")
            folder.mkdir(parents=True)
            # No name server answers in there. The machine's own name is a loopback, as Debian sets it.
            hosts = [f"127.0.1.1 {os.uname().nodename}", *(f"{a} node{i}" for i, a in enumerate(addresses))]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
            (folder / "nsswitch.conf").write_text("hosts: files\n")
        yield addresses[0], [["ip", "netns", "exec", name] for name in names]
    finally:
        for name, folder in zip(names, folders, strict=True):
            _is_done("ip", "netns", "del", name)
            shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """Return a port that is free on this machine."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def _is_done(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
