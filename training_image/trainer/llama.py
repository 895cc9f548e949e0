"""Weights in the layout that Hugging Face has for Llama: names, config.json, safetensors in one file or several.

The rotary embedding of both turns (first half, second half), so no weight is permuted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from job_contract.spec import ModelSpec
from job_contract.version import canonical_json
from trainer.endings import UserError
from trainer.model import NORM_EPS

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SUMS_FILE = "SHA256SUMS"
CHUNK = 16 << 20

# Ours, and the name in transformers 5.24 (models/llama/modeling_llama.py).
OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
INNER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.output": "mlp.down_proj",
}


def llama_name(name: str) -> str:
    """Return what Hugging Face calls a parameter of ours."""
    if name in OUTER:
        return OUTER[name]
    _, layer, inside = name.split(".", 2)
    module, _, parameter = inside.rpartition(".")
    return f"model.layers.{layer}.{INNER[module]}.{parameter}"


def llama_config(model: ModelSpec, sequence_length: int, dtype: str) -> dict[str, Any]:
    """Return the config.json with which transformers 4 and 5 build this very model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.dim // model.heads,
        "intermediate_size": model.ffn_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": sequence_length,
        "rms_norm_eps": NORM_EPS,
        # transformers 5 reads rope_parameters, 4 rope_theta.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


class Weights:
    """The weights in a folder, read tensor by tensor. Raises UserError for whatever does not fit `model`.

    `between` is called before each tensor and each 16 MiB; what it raises ends the reading.
    """

    def __init__(self, folder: Path, model: ModelSpec, *, between: Callable[[], None] = lambda: None) -> None:
        self.folder, self._between = folder, between
        self.tied = _fits(folder, model)
        self._file_of = self._index()

    def digest(self) -> str:
        """Return one sha256 over the names and bytes of all weight files, after comparing them with SHA256SUMS."""
        files = sorted(set(self._file_of.values()))
        found = {name: self._sha256(name) for name in files}
        listed = read_sums(self.folder / SUMS_FILE)
        wrong = [name for name in files if listed and listed.get(name) != found[name]]
        if wrong:
            raise UserError(f"init_from: {wrong[0]} in {self.folder} has not the digest in {SUMS_FILE}; copy it anew")
        return hashlib.sha256(sums(found)).hexdigest()

    def read(self, name: str, whole: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        """Return the part of one of our parameters, whose whole shape must be `whole`; nothing else is read."""
        self._between()
        theirs = llama_name(name)
        if theirs not in self._file_of and name == "head.weight" and self.tied:
            theirs = llama_name("embedding.weight")
        if theirs not in self._file_of:
            raise UserError(f"init_from: {self.folder} holds no {theirs}")
        with self._opened(self._file_of[theirs]) as file:
            tensor = file.get_slice(theirs)
            if tuple(tensor.get_shape()) != whole:
                raise UserError(
                    f"init_from: {theirs} in {self.folder} is {tuple(tensor.get_shape())}, training.model makes it "
                    f"{whole}; correct the sizes of the model"
                )
            return tensor[part] if part else tensor[:]

    def _index(self) -> dict[str, str]:
        index = self.folder / INDEX_FILE
        if index.exists():
            listed: dict[str, str] = _json(index).get("weight_map", {})
            strange = [name for name in listed.values() if Path(name).name != name]
            if strange:
                raise UserError(f"init_from: {index} names {strange[0]!r}, which is no plain file name")
            return listed
        names: dict[str, str] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with self._opened(path.name) as file:
                names |= dict.fromkeys(file.keys(), path.name)
        if not names:
            raise UserError(f"init_from: {self.folder} holds no safetensors file")
        return names

    def _sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        with (self.folder / name).open("rb") as stream:
            while chunk := stream.read(CHUNK):
                self._between()
                digest.update(chunk)
        return digest.hexdigest()

    def _opened(self, name: str) -> Any:
        try:
            return safe_open(self.folder / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"init_from: {name} in {self.folder} cannot be read: {error}") from error


def base_of_seed(fixed: Mapping[str, Any]) -> str:
    """Return the digest of a frozen base that no file holds: seed and sizes of the config make it."""
    return hashlib.sha256(canonical_json({"seed": fixed["seed"], "model": fixed["model"]})).hexdigest()


def sums(digests: dict[str, str]) -> bytes:
    """Return the lines that `sha256sum --check` reads."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())).encode()


def read_sums(path: Path) -> dict[str, str]:
    """Return the digest of each file that SHA256SUMS lists, nothing where there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name.lstrip("*"): digest for digest, _, name in (line.partition(" ") for line in _stripped(lines))}


def _stripped(lines: Iterable[str]) -> Iterable[str]:
    return (" ".join(line.split(maxsplit=1)) for line in lines if line.strip())


def _fits(folder: Path, model: ModelSpec) -> bool:
    """Return whether head and embedding are one. Raises UserError for another architecture or other sizes."""
    config = _json(folder / CONFIG_FILE)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    heads = config.get("num_attention_heads")
    expected = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_size": (config.get("hidden_size"), model.dim),
        "num_hidden_layers": (config.get("num_hidden_layers"), model.layers),
        "num_attention_heads": (heads, model.heads),
        "num_key_value_heads": (config.get("num_key_value_heads", heads), model.kv_heads),
        "head_dim": (config.get("head_dim") or model.dim // model.heads, model.dim // model.heads),
        "intermediate_size": (config.get("intermediate_size"), model.ffn_dim),
        "vocab_size": (config.get("vocab_size"), model.vocab),
        "rms_norm_eps": (config.get("rms_norm_eps", 1e-6), NORM_EPS),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "rope_theta": (theta, model.rope_theta),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
    }
    wrong = [f"{name} is {found!r}, here {here!r}" for name, (found, here) in expected.items() if found != here]
    if wrong:
        raise UserError(f"init_from: {folder} holds another model: {'; '.join(wrong)}; correct training.model")
    return bool(config.get("tie_word_embeddings"))


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"init_from: {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"init_from: {path} is no JSON object")
    return data
