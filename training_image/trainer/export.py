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
from job_contract.spec import LoraSpec, ModelSpec
from job_contract.verification import Folder, difference
from job_contract.version import ContractError, build
from trainer.checkpoint import METADATA_FILE, LoadPlanner, Refused, VerifiedReader, read_metadata
from trainer.endings import UserError
from trainer.llama import CONFIG_FILE, INDEX_FILE, SUMS_FILE, Weights, base_of_seed, llama_config, llama_name, sums
from trainer.model import Decoder, initial_value

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
        self.lora: LoraSpec | None = build(LoraSpec, self.config["lora"]) if "lora" in self.config else None

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


class Merged:
    """The whole parameters of a LoRA job: base and adapters in one. Raises UserError where the base is another."""

    def __init__(self, save: Save, lora: LoraSpec, base: Path | None) -> None:
        self.save, self.model, self.config, self.lora = save, save.model, save.config, lora
        self.weights = Weights(base, save.model) if base else None
        found = self.weights.digest() if self.weights else base_of_seed(self.config)
        wanted = save.manifest.facts.get("base_sha256")
        if found != wanted:
            raise UserError(f"the adapters belong to a base with the digest {wanted}, this one has {found}; name it")
        with torch.device("meta"):
            whole = Decoder(save.model, 2)
        self.shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole parameters."""
        return {name: self._merged(name, self.shapes[name]) for name in names}

    def _merged(self, name: str, shape: torch.Size) -> Tensor:
        if self.weights:
            base = self.weights.read(name, tuple(shape), ()).float()
        else:
            base = initial_value(name, shape, self.model, self.config["seed"])
        ends = [f"{name.removesuffix('weight')}{end}" for end in ("adapter_out", "adapter_in")]
        if ends[0] not in self.save.shapes:
            return base
        adapters = self.save.read(ends)
        return base + adapters[ends[0]] @ adapters[ends[1]] * (self.lora.alpha / self.lora.rank)


def export(save: Save | Merged, target: Path, *, dtype: str = "float32", file_bytes: int = FILE_BYTES) -> None:
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


def export_adapters(save: Save, lora: LoraSpec, target: Path) -> None:
    """The folder `target` is new and holds the adapters alone, as PEFT names them."""
    draft = _draft(target)
    tensors = {}
    for name, tensor in save.read(save.shapes).items():
        module, _, end = name.rpartition(".")
        theirs = llama_name(f"{module}.weight").removesuffix(".weight")
        side = {"adapter_in": "lora_A", "adapter_out": "lora_B"}[end]
        tensors[f"base_model.model.{theirs}.{side}.weight"] = tensor
    digests = {"adapter_model.safetensors": _write(draft / "adapter_model.safetensors", tensors)}
    told = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets), "lora_dropout": 0.0}
    _write_json(draft / "adapter_config.json", {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", **told})
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
        if reason := difference(listed, Folder(folder).chunks(listed.path)):
            raise ContractError(f"{listed.path}: {reason}")


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
    parser.add_argument("--base", type=Path, help="of a LoRA job: the folder with the weights that it started from")
    parser.add_argument("--adapters", action="store_true", help="of a LoRA job: write the adapters alone")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights written (float32)")
    asked = parser.parse_args(arguments)
    try:
        save = Save(asked.save)
        if save.lora is None and (asked.adapters or asked.base):
            raise UserError(f"{asked.save} holds whole weights; leave --adapters and --base out")
        if save.lora is not None and asked.adapters:
            export_adapters(save, save.lora, asked.target)
        else:
            source = save if save.lora is None else Merged(save, save.lora, asked.base)
            export(source, asked.target, dtype=asked.dtype)
    except (UserError, Refused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{asked.target}: weights of {save.manifest.save}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
