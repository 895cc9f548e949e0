"""The instance metadata service, version 2: session token, documents, and the notice that this node will be ended."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

DEFAULT_ENDPOINT = "http://169.254.169.254/"
TOKEN_TTL_S = 21600
TIMEOUT_S = 1.0


class ImdsUnavailable(Exception):
    """The service did not answer, or not in a way that it is documented to."""


class Imds:
    """Reads documents under /latest/meta-data/. The token is renewed at 80 % of its life and after a 401."""

    def __init__(self, endpoint: str = DEFAULT_ENDPOINT, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._clock = clock
        self._token, self._renew_at = "", 0.0
        # Metadata is link-local; a proxy from the environment would answer for another machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self, path: str) -> str | None:
        """Return the document, None where the service has none (404). Raises ImdsUnavailable."""
        for fresh in (False, True):
            token = self._valid_token(fresh=fresh)
            try:
                return self._ask("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": token})
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401 or fresh:
                    raise ImdsUnavailable(f"{path}: HTTP {error.code}") from error
        raise ImdsUnavailable(f"{path}: no valid token")

    def required(self, path: str) -> str:
        """Return the document. Raises ImdsUnavailable, also where there is none."""
        text = self.read(path)
        if text is None:
            raise ImdsUnavailable(f"{path} is not in this instance's metadata (tags need InstanceMetadataTags=enabled)")
        return text

    def _valid_token(self, *, fresh: bool) -> str:
        if fresh or not self._token or self._clock() >= self._renew_at:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
            try:
                self._token = self._ask("PUT", "/latest/api/token", ttl)
            except urllib.error.HTTPError as error:
                raise ImdsUnavailable(f"token: HTTP {error.code}") from error
            self._renew_at = self._clock() + 0.8 * TOKEN_TTL_S
        return self._token

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(self._endpoint + path, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError:
            raise
        except (OSError, ValueError) as error:
            raise ImdsUnavailable(f"{method} {path}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The node's own metadata says that it will be ended at `deadline_at`."""

    action: str
    deadline_at: float


def read_notice(imds: Imds) -> Notice | None:
    """Return the spot notice of this node, None while there is none. Raises ImdsUnavailable."""
    text = imds.read("spot/instance-action")
    if text is None:
        return None
    try:
        document = json.loads(text)
        return Notice(action=document["action"], deadline_at=datetime.fromisoformat(document["time"]).timestamp())
    except (ValueError, KeyError, TypeError) as error:
        raise ImdsUnavailable(f"spot/instance-action is not {{action, time}}: {text[:200]!r}") from error


REBALANCE = "rebalance"


def read_warnings(imds: Imds) -> tuple[Notice, ...]:
    """Return what leaves the node at work for now: advice that it may be taken, and maintenance with its date.

    `action` is `rebalance` or EC2's code of the maintenance. Raises ImdsUnavailable.
    """
    return (*_advice(imds), *_maintenance(imds))


def _advice(imds: Imds) -> list[Notice]:
    text = imds.read("events/recommendations/rebalance")
    if text is None:
        return []
    try:
        return [
            Notice(action=REBALANCE, deadline_at=datetime.fromisoformat(json.loads(text)["noticeTime"]).timestamp())
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ImdsUnavailable(f"events/recommendations/rebalance is not {{noticeTime}}: {text[:200]!r}") from error


def _maintenance(imds: Imds) -> list[Notice]:
    text = imds.read("events/maintenance/scheduled")
    try:
        events = [event for event in json.loads(text or "[]") if event["State"] == "active"]
        # Dates look like `14 Dec 2026 15:00:00 GMT`, unlike those of every other document.
        return [
            Notice(action=event["Code"], deadline_at=parsedate_to_datetime(event["NotBefore"]).timestamp())
            for event in events
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ImdsUnavailable(
            f"events/maintenance/scheduled is not a list of events: {(text or '')[:200]!r}"
        ) from error
