"""Which weights a request means: what is there when it is accepted is pinned by digest, for every attempt."""

from __future__ import annotations

import hashlib

from holdfast.application.ports import RequestFiles
from holdfast.domain.errors import Rejected
from job_contract.weights import SUMS_FILE, SUMS_LIMIT_BYTES

NOT_THERE = (
    "is not there or may not be read; make it with sha256sum * > SHA256SUMS in the weights' folder, and upload it"
)
REASONS = {
    "reference_not_found": ("weights_not_found", NOT_THERE),
    "reference_not_readable": ("weights_not_found", NOT_THERE),
    "reference_too_large": ("weights_damaged", f"has more than {SUMS_LIMIT_BYTES} bytes; list the weights' files only"),
}


def weights_sha256(init_from: str | None, files: RequestFiles) -> str | None:
    """Return the digest of the list that names the weights' files, None where they do not lie in a bucket.

    Raises Rejected when there is no such list.
    """
    if init_from is None or not init_from.startswith("s3://"):
        return None
    bucket, _, prefix = init_from.removeprefix("s3://").partition("/")
    key = f"{prefix.rstrip('/')}/{SUMS_FILE}"
    try:
        raw = files.read(bucket, key, limit_bytes=SUMS_LIMIT_BYTES)
    except Rejected as refusal:
        if refusal.code not in REASONS:
            raise
        code, why = REASONS[refusal.code]
        raise Rejected(code, f"training.init_from: s3://{bucket}/{key} {why}") from refusal
    return hashlib.sha256(raw).hexdigest()
