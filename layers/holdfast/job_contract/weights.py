"""How weights lie in a bucket, for the door that pins them and the agent that brings them."""

from __future__ import annotations

SUMS_FILE = "SHA256SUMS"
SUMS_LIMIT_BYTES = 1 << 20
