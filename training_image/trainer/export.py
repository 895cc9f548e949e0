"""A committed save -> weights in Hugging Face's Llama layout: `python -m trainer.export <save folder> <new folder>`.

A process of its own, on any machine with the save's files: it needs no other rank and no GPU, proves each file by the
manifest first, and holds one file of the result in memory at a time. `--adapters` writes the adapters of a LoRA job in
PEFT's layout; without it they are merged into the base, which lies in `--base` unless it came from the seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from job_contract.checkpoint_layout import MANIFEST_FILE, Manifest, read_manifest
from job_contract.spec import ModelSpec
from job_contract.version import ContractError, build
from trainer.checkpoint import METADATA_FILE, LoadPlanner, Refused, VerifiedReader, read_metadata
from trainer.endings import UserError
from trainer.llama import CONFIG_FILE, INDEX_FILE, SUMS_FILE, llama_config, llama_name, sums

FILE_BYTES = 5_000_000_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PREFIX = "parameter."


class Save:
    """A committed save in a folder, every file proved by its manifest. Raises UserError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest: Manifest = read_manifest((folder / MANIFEST_FILE).read_bytes())
            _prove(folder, self.manifest)
            self.metadata: Metadata = read_metadata(folder / METADATA_FILE)
        except (OSError, ContractError, Refused) as error:
            raise UserError(f"{folder} is no whole save: {error}") from error
        self.config: dict[str, Any] = self.manifest.facts["config"]
        self.model: ModelSpec = build(ModelSpec, self.config["model"])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The parameters by name, without the moments."""
        described = self.metadata.state_dict_metadata
        return {name[len(PREFIX) :]: item.size for name, item in described.items() if name.startswith(PREFIX)}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole parameters."""
        shapes = self.shapes
        tensors = {PREFIX + name: torch.empty(shapes[name], dtype=torch.float32) for name in names}
        reader = VerifiedReader(self.folder, self.metadata)
        dcp.load(tensors, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
        return {name[len(PREFIX) :]: tensor for name, tensor in tensors.items()}


def export(save: Save, target: Path, *, dtype: str = "float32", file_bytes: int = FILE_BYTES) -> None:
    """The folder `target` is new, and `AutoModelForCausalLM.from_pretrained` reads it."""
    draft = _draft(target)
    names = [*cut(save.shapes, DTYPES[dtype].itemsize, file_bytes)]
    index: dict[str, str] = {}
    digests: dict[str, str] = {}
    for number, group in enumerate(names, 1):
        file = "model.safetensors" if len(names) == 1 else f"model-{number:05}-of-{len(names):05}.safetensors"
        tensors = {llama_name(name): tensor.to(DTYPES[dtype]) for name, tensor in save.read(group).items()}
        digests[file] = _write(draft / file, tensors)
        index |= dict.fromkeys(tensors, file)
    total = sum(shape.numel() for shape in save.shapes.values()) * DTYPES[dtype].itemsize
    if len(names) > 1:
        _write_json(draft / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": index})
    _write_json(draft / CONFIG_FILE, llama_config(save.model, save.config["sequence_length"], dtype))
    _finish(draft, target, digests)


def cut(shapes: dict[str, torch.Size], item_bytes: int, file_bytes: int) -> Iterator[list[str]]:
    """Yield the names file by file; a tensor that is larger than a file has one of its own."""
    group: list[str] = []
    size_bytes = 0
    for name, shape in shapes.items():
        own = shape.numel() * item_bytes
        if group and size_bytes + own > file_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(name)
        size_bytes += own
    yield group


def _prove(folder: Path, manifest: Manifest) -> None:
    for listed in manifest.files:
        if Path(listed.path).name != listed.path:
            raise ContractError(f"{listed.path!r} is no plain file name")
        with (folder / listed.path).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != listed.sha256:
            raise ContractError(f"{listed.path} has sha256 {found[:12]}, committed was {listed.sha256[:12]}")


def _draft(target: Path) -> Path:
    """Return an empty folder beside the target, which appears only once it is whole."""
    if target.exists():
        raise UserError(f"{target} is there already; name a folder that is not")
    draft = target.with_name(f"{target.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def _write(path: Path, tensors: dict[str, Tensor]) -> str:
    save_file(tensors, path, metadata={"format": "pt"})
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def _finish(draft: Path, target: Path, digests: dict[str, str]) -> None:
    (draft / SUMS_FILE).write_bytes(sums(digests))
    draft.rename(target)


def main(arguments: list[str]) -> int:
    """Export as the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("save", type=Path, help="the folder of a committed save, with its manifest.json")
    parser.add_argument("target", type=Path, help="the folder to write, which must not exist")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights written (float32)")
    asked = parser.parse_args(arguments)
    try:
        save = Save(asked.save)
        export(save, asked.target, dtype=asked.dtype)
    except (UserError, Refused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{asked.target}: {len(save.shapes)} tensors of {save.manifest.save}, {asked.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
