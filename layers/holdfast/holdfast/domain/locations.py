"""Where in a bucket a team may point: one check, by containment after normalising, for every address of a request."""

from __future__ import annotations

import re
from urllib.parse import unquote

from holdfast.domain.errors import Rejected

MOUNTS = "/mnt/"
"""What a node mounts of file systems lies under it; the rest of the node is not a place for data."""

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
        raise Rejected(
            "bucket_not_ours", f"{field} is in bucket {named!r}; it has to lie in the stack's own, {bucket!r}"
        )
    own = f"teams/{team}/"
    if not key.startswith(own):
        raise Rejected(
            "path_outside_team", f"{field} is {uri!r}, outside s3://{named}/{own}; name what is there, of team {team}"
        )
    return key


def dataset_place(uri: str, field: str, *, bucket: str | None, team: str | None) -> str:
    """Return the address of a dataset's folder without a slash at its end. Raises Rejected.

    In the stack's own bucket it lies under teams/<team>/datasets/; `team` None = of any team. Which other buckets
    may be read is the adapter's to say, and the role's.
    """
    if uri.startswith("file://"):
        return f"file://{_mounted(uri, field)}"
    named, key = split_uri(uri, field)
    key = key.removesuffix("/")
    parts = key.split("/")
    if named == bucket and (parts[:1] != ["teams"] or parts[2:3] != ["datasets"] or len(parts) < 4):
        raise Rejected(
            "path_outside_team",
            f"{field} is {uri!r}; in the stack's bucket datasets lie under teams/{team or '<team>'}/datasets/",
        )
    if named == bucket and team is not None and parts[1] != team:
        raise Rejected(
            "path_outside_team", f"{field} is {uri!r}, which is of another team; name a dataset of team {team}"
        )
    return f"s3://{named}/{key}"


def _mounted(uri: str, field: str) -> str:
    path = uri.removeprefix("file://").removesuffix("/")
    parts = path.split("/")[1:]
    plain = unquote(path) == path and "\\" not in path and path.isprintable() and not {"", ".", ".."} & set(parts)
    if not plain or not path.startswith(MOUNTS):
        raise Rejected(
            "bad_location",
            f"{field} is {uri!r}; a mounted folder is file://{MOUNTS}..., written plainly, without '.', '..', '//', "
            "'\\' or percent signs",
        )
    return path
