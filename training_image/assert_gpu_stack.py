"""Run while the GPU image is built: CUDA and NCCL are those of torch's wheels, and the EFA plugin can be loaded.

Exits with what is wrong, named, else prints what was found.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
import sys
from pathlib import Path

LIBFABRIC = Path("/opt/amazon/efa/lib/libfabric.so.1")
PLUGINS = Path("/opt/amazon/ofi-nccl/lib")


def faults(
    torch_cuda: str | None, torch_nccl: tuple[int, ...], wheels: dict[str, str], nccl_elsewhere: list[str]
) -> list[str]:
    """Return what is wrong with the CUDA and NCCL that torch sees; nothing when they are those of its wheels."""
    found = []
    if torch_cuda is None:
        found.append("torch is a build without CUDA")
    nccl = [version for name, version in wheels.items() if name.startswith("nvidia-nccl-")]
    if len(nccl) != 1:
        found.append(f"{len(nccl)} wheels bring NCCL, one is needed")
    elif tuple(int(part) for part in nccl[0].split(".")) != torch_nccl:
        found.append(f"torch loads NCCL {'.'.join(map(str, torch_nccl))}, its wheel is {nccl[0]}")
    if nccl_elsewhere:
        found.append(f"a second NCCL lies in {', '.join(nccl_elsewhere)}")
    return found


def main() -> int:
    import torch

    wheels = {one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    elsewhere = [line.split("=>")[1].strip() for line in known.splitlines() if "libnccl.so" in line]
    wrong = faults(torch.version.cuda, torch.cuda.nccl.version(), wheels, elsewhere)
    plugins = sorted(PLUGINS.glob("libnccl-net*.so"))
    if not plugins:
        wrong.append(f"{PLUGINS} holds no plugin of NCCL")
    for library in [LIBFABRIC, *plugins[:1]]:
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            wrong.append(str(error))
    print("\n".join(wrong) or f"CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}, {plugins[0]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
