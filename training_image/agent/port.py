"""A free port of this node, held until rank 0 takes it over."""

from __future__ import annotations

import socket


class HeldPort:
    """Bound but not listening: nobody else gets the port, and it is free again the moment it is let go."""

    def __init__(self, ip: str) -> None:
        self._ip = ip
        self._socket: socket.socket | None = None

    def hold(self) -> int:
        """Return the port, a new one when none is held. Raises OSError."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.bind((self._ip, 0))
        return int(self._socket.getsockname()[1])

    def release(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
