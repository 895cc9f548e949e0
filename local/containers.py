"""Nodes as containers, without a Docker engine: the files of the training image, process and network namespaces.

Each node has a copy-on-write view of the image (overlayfs), its agent as process 1, and a network namespace with an
interface of its own on a bridge of the cloud. In it are the metadata service at 169.254.169.254 and the cloud at the
loopback port that it has everywhere. The bridge has no address on this machine, so nodes reach each other and nothing
else. Needs root and iproute2.
"""

import ctypes
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

METADATA_ADDRESS = ("169.254.169.254", 80)
_NETWORK = "10.79.{}.{}"
_PREFIX_LENGTH = 16
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
_START = Path(__file__).with_name("container.sh")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Container:
    """Where one node runs: `metadata` and `cloud` are listening sockets inside its namespace."""

    namespace: str
    files: Path
    address: str
    metadata: socket.socket
    cloud: socket.socket
    command: list[str]


class Network:
    """The bridge of one cloud, and the namespaces of its nodes. `remove` ends them all, also from another process."""

    def __init__(self, cloud_id: str, image_root: str, cloud_port: int) -> None:
        self._image_root, self._cloud_port = image_root, cloud_port
        self._bridge = f"hf{cloud_id[:10]}"
        self._number = 0
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")

    def enter(self, directory: Path, command: list[str]) -> Container:
        """A namespace stands for the node whose state is in `directory`; `command` in it runs in the image's files."""
        self._number += 1
        name, address = f"{self._bridge}-{self._number}", _NETWORK.format(*divmod(self._number, 250))
        outside = f"{self._bridge[:9]}v{self._number}"
        _ip("netns", "add", name)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", outside, "master", self._bridge, "up")
        _ip("-n", name, "address", "add", f"{address}/{_PREFIX_LENGTH}", "dev", "eth0")
        _ip("-n", name, "address", "add", f"{METADATA_ADDRESS[0]}/32", "dev", "lo")
        for interface in ("lo", "eth0"):
            _ip("-n", name, "link", "set", interface, "up")
        files = directory.parent.parent / "containers" / directory.name
        start = ["ip", "netns", "exec", name, *_APART, str(_START), self._image_root, str(files)]
        return Container(
            namespace=name,
            files=files,
            address=address,
            metadata=_listen(name, METADATA_ADDRESS),
            cloud=self._forward(name),
            command=[*start, str(directory), *command],
        )

    def leave(self, container: Container) -> None:
        """The namespace and what the node wrote beside its state are gone. Its processes have to be dead."""
        container.cloud.shutdown(socket.SHUT_RDWR)
        container.cloud.close()
        _ip("netns", "delete", container.namespace)
        shutil.rmtree(container.files, ignore_errors=True)

    def _forward(self, name: str) -> socket.socket:
        """The cloud answers on its loopback port in the namespace too, until the socket that is returned is shut."""
        listener = _listen(name, ("127.0.0.1", self._cloud_port))

        def serve() -> None:
            while True:
                try:
                    inside, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=_join, args=(inside, self._cloud_port), daemon=True).start()

        threading.Thread(target=serve, name=f"forward-{name}", daemon=True).start()
        return listener


def remove(cloud_id: str) -> None:
    """No namespace, interface or bridge of the cloud is left. Its processes have to be dead."""
    bridge = f"hf{cloud_id[:10]}"
    for entry in sorted(_NAMESPACES.glob(f"{bridge}-*")):
        _ip("netns", "delete", entry.name)
    if Path("/sys/class/net", bridge).exists():
        _ip("link", "delete", bridge)


def first_process(launcher: int) -> int:
    """Return the id, on this machine, of the process that is number 1 in its container; the launcher's while it has
    none. A signal for the agent goes there: unshare ignores SIGTERM."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return int((children.read_text() if children.exists() else "").partition(" ")[0] or launcher)


def lacking() -> str:
    """Return why nodes cannot be containers here; nothing when they can."""
    if os.geteuid() != 0:
        return "namespaces and mounts need root"
    missing = [tool for tool in ("buildah", "debootstrap", "ip", "unshare") if not shutil.which(tool)]
    return f"missing: {', '.join(missing)} (Debian: apt-get install buildah debootstrap iproute2)" if missing else ""


def _ip(*arguments: str) -> None:
    answer = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {answer.stderr.strip()}")


def _listen(namespace: str, address: tuple[str, int]) -> socket.socket:
    """Return a listening socket inside the namespace. A thread enters it, because it could not leave again."""
    made: list[socket.socket | BaseException] = []

    def enter() -> None:
        try:
            with (_NAMESPACES / namespace).open("rb") as file:
                if _libc.setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"the namespace {namespace} cannot be entered")
            made.append(socket.create_server(address, backlog=64))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


def _join(inside: socket.socket, port: int) -> None:
    """What either end sends reaches the other, until both have said that they are done."""
    with inside, socket.create_connection(("127.0.0.1", port)) as outside:
        other = {inside: outside, outside: inside}
        open_ends = set(other)
        while open_ends:
            for end in select.select(list(open_ends), [], [])[0]:
                try:
                    data = end.recv(1 << 16)
                    if data:
                        other[end].sendall(data)
                        continue
                    other[end].shutdown(socket.SHUT_WR)
                except OSError:
                    return
                open_ends.discard(end)


if __name__ == "__main__":
    print(lacking())
    sys.exit(1 if lacking() else 0)
