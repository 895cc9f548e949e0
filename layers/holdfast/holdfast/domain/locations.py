"""Where in a bucket a team may point: one check, by containment after normalising, for every address of a request."""

from __future__ import annotations

import re
from urllib.parse import unquote

from holdfast.domain.errors import Rejected

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def split_uri(uri: str, field: str) -> tuple[str, str]:
    """Return bucket and key of an s3:// address. Raises Rejected for a key that is not in its simplest form.

    S3 keeps keys as they are written, other tools fold `..`, `//` and %2e: what reads differently is refused.
    """
    match = re.fullmatch(r"s3://([^/]+)/(.+)", uri, flags=re.DOTALL)
    if not match or not _BUCKET.fullmatch(match[1]):
        raise Rejected("bad_location", f"{field} is {uri!r}; give s3://bucket/key")
    bucket, key = match.groups()
    parts = key.removesuffix("/").split("/")
    if unquote(key) != key or "\\" in key or not key.isprintable() or {"", ".", ".."} & set(parts):
        raise Rejected(
            "path_outside_team",
            f"{field} is {uri!r}; write the key plainly, without '.', '..', '//', '\\' or percent signs",
        )
    return bucket, key


def team_key(uri: str, field: str, *, bucket: str | None, team: str) -> str:
    """Return the key, which lies in the team's own part of the stack's checkpoint bucket. Raises Rejected.

    `bucket` None = the stack is not known here (a request checked offline); the door knows it.
    """
    named, key = split_uri(uri, field)
    if bucket is not None and named != bucket:
        raise Rejected("bucket_not_ours", f"{field} is in bucket {named!r}; saves of this stack are in {bucket!r}")
    own = f"teams/{team}/"
    if not key.startswith(own):
        raise Rejected(
            "path_outside_team", f"{field} is {uri!r}, outside s3://{named}/{own}; name a save of team {team}"
        )
    return key
