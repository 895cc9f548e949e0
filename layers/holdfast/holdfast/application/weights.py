"""Which weights a request means: what is there when it is accepted is pinned by digest, for every attempt."""

from __future__ import annotations

import hashlib

from holdfast.application.ports import RequestFiles
from holdfast.domain.errors import Rejected
from holdfast.messages.job_request import Training
from job_contract.checkpoint_layout import MANIFEST_FILE, Manifest, read_manifest
from job_contract.spec import ModelSpec
from job_contract.version import ContractError, build
from job_contract.weights import MANIFEST_LIMIT_BYTES, SUMS_FILE, SUMS_LIMIT_BYTES, SaveOf, save_of

NOT_THERE = "is not there or may not be read"
WAYS_OUT = {
    SUMS_FILE: "make it with sha256sum * > SHA256SUMS in the weights' folder, and upload it",
    MANIFEST_FILE: "the save was never committed or is deleted; `holdfast checkpoints JOB` shows those there are",
}


def weights_sha256(training: Training, files: RequestFiles) -> str | None:
    """Return the digest of what names the weights' files, None where they do not lie in a bucket.

    It is the sha256 of a folder's SHA256SUMS, or a save's own digest. Raises Rejected when there is none that can be
    used, or it is of another model.
    """
    place = training.init_from
    if place is None or not place.startswith("s3://"):
        return None
    save = save_of(place)
    if save is None:
        return hashlib.sha256(_read(place, SUMS_FILE, SUMS_LIMIT_BYTES, files)).hexdigest()
    manifest = _manifest(save, _read(place, MANIFEST_FILE, MANIFEST_LIMIT_BYTES, files))
    _refuse_another_model(training, manifest)
    return manifest.sha256


def _read(place: str, name: str, limit_bytes: int, files: RequestFiles) -> bytes:
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    key = f"{prefix.rstrip('/')}/{name}"
    try:
        return files.read(bucket, key, limit_bytes=limit_bytes)
    except Rejected as refusal:
        where = f"training.init_from: s3://{bucket}/{key}"
        if refusal.code == "reference_too_large":
            raise Rejected("weights_damaged", f"{where} has more than {limit_bytes} bytes") from refusal
        if refusal.code in ("reference_not_found", "reference_not_readable"):
            raise Rejected("weights_not_found", f"{where} {NOT_THERE}; {WAYS_OUT[name]}") from refusal
        raise


def _manifest(save: SaveOf, raw: bytes) -> Manifest:
    try:
        manifest = read_manifest(raw)
    except ContractError as error:
        raise Rejected("weights_damaged", f"training.init_from: {error}; name an older save") from error
    if (manifest.job, manifest.save) != (save.job, save.save):
        raise Rejected(
            "weights_damaged",
            f"training.init_from: {MANIFEST_FILE} of {save.save} belongs to job {manifest.job}, save {manifest.save}; "
            "name the save of that job",
        )
    return manifest


def _refuse_another_model(training: Training, manifest: Manifest) -> None:
    config = manifest.facts.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise Rejected(
            "weights_do_not_fit",
            f"training.init_from: {manifest.save} was not made by the bundled trainer; export its weights to a folder",
        )
    if config.get("lora") is not None or training.trainable == "lora":
        raise Rejected(
            "weights_do_not_fit",
            f"training.init_from: {manifest.save} is a save, and neither are adapters a start nor is a save their "
            "base; `python -m trainer.export` makes a folder of it that both can be",
        )
    saved, asked = build(ModelSpec, config["model"]), training.model.as_spec()
    wrong = [
        f"{name} is {getattr(saved, name)}, training.model has {value}"
        for name, value in vars(asked).items()
        if name != "dropout" and getattr(saved, name) != value
    ]
    if wrong:
        raise Rejected(
            "weights_do_not_fit", f"training.init_from: {manifest.save}: {'; '.join(wrong)}; correct training.model"
        )
