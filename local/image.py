"""The training image for nodes that are containers: built from the shipped Dockerfile, its files mounted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from local import containers

NAME = "localhost/holdfast-training"
_BUILD = Path(__file__).with_name("image.sh")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class NoContainers(Exception):
    """Nodes cannot be containers on this machine; the text says why, and what would help."""


@dataclass(frozen=True)
class Image:
    """What a node of the image runs: its files, and what its configuration says of command and environment."""

    root: str
    command: list[str]
    environment: dict[str, str]


@contextmanager
def mounted() -> Iterator[Image]:
    """The image is built, from the layers that are there as far as they hold, and mounted. Raises NoContainers."""
    if why := containers.lacking():
        raise NoContainers(f"{why}; NODES=processes does without")
    if subprocess.run([_BUILD], check=False).returncode:
        raise NoContainers("the image could not be built; the lines above say where")
    container = _buildah("from", NAME)
    try:
        config = json.loads(_buildah("inspect", container))["OCIv1"]["config"]
        yield Image(
            root=_buildah("mount", container),
            command=[*config.get("Entrypoint", []), *config.get("Cmd", [])],
            environment={"PATH": _PATH} | dict(pair.split("=", 1) for pair in config.get("Env", [])),
        )
    finally:
        _buildah("umount", container)
        _buildah("rm", container)


def _buildah(*arguments: str) -> str:
    answer = subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise NoContainers(f"buildah {' '.join(arguments)}: {answer.stderr.strip()}")
    return answer.stdout.strip()
