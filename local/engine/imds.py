"""The instance metadata service, version 2, of one node: a loopback port of its own.

Answers follow the recorded ones: 401 without a valid token, 404 for a document that does not exist (yet).
"""

import json
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

_NOT_FOUND = (
    '<?xml version="1.0" encoding="iso-8859-1"?><html><head><title>404 - Not Found</title></head>'
    "<body><h1>404 - Not Found</h1></body></html>"
)
_UNAUTHORIZED = "<html>401 - Unauthorized</html>"
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_MAX_TTL_S = 21600


@dataclass(kw_only=True)
class Metadata:
    """What one instance knows of itself; notices appear in it while it runs."""

    instance_id: str
    instance_type: str
    life_cycle: str
    zone: str
    region: str
    account: str
    launched_at: float
    tags: dict[str, str]
    local_ip: str = "127.0.0.1"
    instance_action: dict | None = None
    rebalance: dict | None = None
    maintenance: list[dict] = field(default_factory=list)

    def document(self, path: str) -> str | None:
        """The text under /latest/, None when there is none."""
        if path == "dynamic/instance-identity/document":
            return json.dumps(self._identity(), indent=2)
        if not path.startswith("meta-data/"):
            return None
        name = path.removeprefix("meta-data/").rstrip("/")
        if name.startswith("tags/instance/"):
            return self.tags.get(name.removeprefix("tags/instance/"))
        return self._named(name)

    def _named(self, name: str) -> str | None:
        texts = {
            "instance-id": self.instance_id,
            "instance-type": self.instance_type,
            "instance-life-cycle": self.life_cycle,
            "local-ipv4": self.local_ip,
            "placement/availability-zone": self.zone,
            "placement/region": self.region,
            "tags/instance": "\n".join(sorted(self.tags)),
            "spot/instance-action": self.instance_action and json.dumps(self.instance_action),
            "spot/termination-time": self.instance_action and self.instance_action["time"],
            "events/recommendations/rebalance": self.rebalance and json.dumps(self.rebalance),
            "events/maintenance/scheduled": json.dumps(self.maintenance),
        }
        return texts.get(name)

    def _identity(self) -> dict:
        return {
            "accountId": self.account,
            "architecture": "x86_64",
            "availabilityZone": self.zone,
            "imageId": "ami-0123456789abcdef0",
            "instanceId": self.instance_id,
            "instanceType": self.instance_type,
            "pendingTime": iso(self.launched_at),
            "privateIp": self.local_ip,
            "region": self.region,
            "version": "2017-09-30",
        }


def iso(epoch_s: float) -> str:
    """2026-11-30T17:22:05Z, the form of the metadata documents."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch_s))


class MetadataServer:
    """Serves one Metadata until `close`, on a loopback port of its own or where `listener` listens."""

    def __init__(self, metadata: Metadata, listener: socket.socket | None = None) -> None:
        self._server = _Server(("127.0.0.1", 0), _handler(metadata), bind_and_activate=listener is None)
        if listener is not None:
            self._server.socket.close()
            self._server.socket = listener
            self._server.server_address = listener.getsockname()
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="imds", daemon=True).start()

    @property
    def endpoint(self) -> str:
        return "http://{}:{}/".format(*self._server.server_address[:2])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        """A node that was killed in the middle of a request is no error of the service."""


def _handler(metadata: Metadata) -> type[BaseHTTPRequestHandler]:
    tokens: dict[str, float] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_PUT(self) -> None:
            ttl = self.headers.get(_TTL_HEADER, "")
            if self.path != "/latest/api/token" or not ttl.isdigit() or not 1 <= int(ttl) <= _MAX_TTL_S:
                return self._answer(400, "<html>400 - Bad Request</html>")
            token = secrets.token_urlsafe(32)
            tokens[token] = time.monotonic() + int(ttl)
            return self._answer(200, token, {_TTL_HEADER: ttl})

        def do_GET(self) -> None:
            if tokens.get(self.headers.get("X-aws-ec2-metadata-token", ""), 0.0) < time.monotonic():
                return self._answer(401, _UNAUTHORIZED)
            text = metadata.document(unquote(self.path).removeprefix("/latest/"))
            return self._answer(404, _NOT_FOUND) if text is None else self._answer(200, text)

        def _answer(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
            body = text.encode()
            self.send_response(status)
            kind = "text/html" if status >= 400 else "application/json" if text[:1] in "{[" else "text/plain"
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args) -> None:
            """Nothing: nodes poll every few seconds."""

    return Handler
