"""Who this node is, by its own metadata and its own devices."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from agent.imds import Imds

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, kw_only=True)
class Identity:
    """`interface` is the network interface that owns `ip`; gloo and NCCL bind to it."""

    instance: str
    instance_type: str
    zone: str
    region: str
    ip: str
    interface: str
    job: str
    gpus: int = 0
    efa_devices: int = 0


def read_identity(imds: Imds) -> Identity:
    """Raises ImdsUnavailable while metadata, tags included, cannot be read."""
    ip = imds.required("local-ipv4")
    return Identity(
        instance=imds.required("instance-id"),
        instance_type=imds.required("instance-type"),
        zone=imds.required("placement/availability-zone"),
        region=imds.required("placement/region"),
        ip=ip,
        interface=interface_of(ip),
        job=imds.required("tags/instance/holdfast:job"),
        gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        efa_devices=len(list(Path("/dev/infiniband").glob("uverbs*"))),
    )


def interface_of(ip: str) -> str:
    """Return the interface that owns the address; loopback owns all of 127/8. Raises OSError when none does."""
    loopback = ipaddress.ip_address(ip).is_loopback
    for _, name in socket.if_nameindex():
        address = _address_of(name)
        if address == ip or (loopback and address and ipaddress.ip_address(address).is_loopback):
            return name
    raise OSError(f"no network interface of this node has the address {ip}")


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
