"""Text becomes a dataset: documents out of files, tokens out of documents, shards out of tokens.

A document is a list of parts; each part is text and whether the model learns to write it. Of a document with a prompt,
only the answer is learned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from holdfast_cli.errors import UserError
from job_contract.dataset import DatasetIndex, TokenizerFacts
from job_contract.dataset_writer import DatasetWriter

JSON_LINES, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
# What a folder is searched for; a file that is named itself may have any other name, and is text then.
SEARCHED = (".txt", ".md", *JSON_LINES, *PARQUET)
ROLES = ("system", "user", "assistant", "tool")
LEARNED_ROLE = "assistant"
BYTE_END = 256
# 256 byte values, the end of a document, and three to spare: what the bundled presets have.
BYTE_VOCAB = 260
# Names by which tokenizers call the token that ends a text.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
BATCH_DOCUMENTS = 256
PARQUET_ROWS = 1024


@dataclass(frozen=True)
class Part:
    """A piece of a document, and whether its tokens are targets."""

    text: str
    learned: bool = True


@dataclass(frozen=True)
class Document:
    """Where a document came from, for errors, and its parts."""

    origin: str
    parts: tuple[Part, ...]


class Tokenizer(Protocol):
    """Turns texts into tokens; `facts` says in the index how."""

    vocab: int
    facts: TokenizerFacts

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]: ...


class ByteTokenizer:
    """A token is a byte of UTF-8."""

    vocab, facts = BYTE_VOCAB, TokenizerFacts(kind="bytes", end=BYTE_END)

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [list(text.encode()) for text in texts]


class FileTokenizer:
    """The tokenizer in a tokenizer.json of the Hugging Face tokenizers library."""

    def __init__(self, path: Path, end: str | None) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise UserError("--tokenizer needs the library tokenizers; pip install 'holdfast[data]'") from error
        try:
            raw = path.read_bytes()
            self._tokenizer = Loaded.from_buffer(raw)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}; name a tokenizer.json") from error
        except Exception as error:
            raise UserError(f"{path} is no tokenizer.json: {error}") from error
        # Both may be stored in the file, and would cut or fill up documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Text is data: a document that spells a special token does not become it.
        self._tokenizer.encode_special_tokens = True
        self.vocab = self._tokenizer.get_vocab_size(with_added_tokens=True)
        known = [token for token in ((end,) if end else END_TOKENS) if self._tokenizer.token_to_id(token) is not None]
        if len(known) != 1:
            tried = f"{end!r} is not in {path.name}" if end else f"{path.name} has {len(known)} of {END_TOKENS}"
            raise UserError(f"which token ends a document? {tried}; name one of its tokens with --end-token")
        # Ids need not be dense: the highest counts.
        self.vocab = max(self.vocab, 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values()))
        self.facts = TokenizerFacts(
            kind="huggingface", sha256=hashlib.sha256(raw).hexdigest(), end=self._tokenizer.token_to_id(known[0])
        )

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]


@dataclass
class Progress:
    """How far a preparation is."""

    files: int
    file: int = 0
    documents: int = 0
    tokens: int = 0
    shards: int = 0


def prepare(
    inputs: Sequence[Path],
    output: Path,
    *,
    tokenizer: Tokenizer,
    licence: str,
    source: str,
    shard_tokens: int,
    tell: Callable[[Progress], None] = lambda _: None,
) -> DatasetIndex:
    """Return the index of the dataset that lies in `output`, whole. The same input makes the same bytes.

    Raises UserError, with file and line, for what cannot be read; nothing lies in `output` then.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is there already; choose another --output, or remove it")
    files = files_of(inputs)
    progress = Progress(files=len(files))
    try:
        with DatasetWriter(
            output,
            vocab=tokenizer.vocab,
            tokenizer=tokenizer.facts,
            source=source,
            licence=licence,
            shard_tokens=shard_tokens,
        ) as writer:
            for number, path in enumerate(files, 1):
                for batch in _batched(documents_of(path), BATCH_DOCUMENTS):
                    for tokens, weights in _tokens(batch, tokenizer):
                        writer.add(tokens, weights)
                    progress.file, progress.documents = number, writer.documents
                    progress.tokens, progress.shards = writer.tokens, len(writer.shards)
                    tell(progress)
            return writer.close()
    except ValueError as error:
        raise UserError(f"{', '.join(map(str, inputs))}: {error}") from error
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error}") from error


def files_of(inputs: Sequence[Path]) -> list[Path]:
    """Return the files to read: those named, and of a folder those of known endings, by name. Raises UserError."""
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            inside = [one for one in path.rglob("*") if one.suffix.lower() in SEARCHED and one.is_file()]
            if not inside:
                raise UserError(f"{path} has no file ending in {', '.join(SEARCHED)}; name the files themselves")
            found += sorted(inside, key=lambda one: one.relative_to(path).as_posix())
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"{path} is not there; name files or folders that exist")
    return found


def documents_of(path: Path) -> Iterator[Document]:
    """Yield the documents of a file by its ending; a text file is one. Raises UserError with the place."""
    ending = path.suffix.lower()
    if ending in JSON_LINES:
        return _lines(path)
    if ending in PARQUET:
        return _rows(path)
    return _text(path)


def _text(path: Path) -> Iterator[Document]:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is no UTF-8; convert the file") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if text:
        yield Document(str(path), (Part(text),))


def _lines(path: Path) -> Iterator[Document]:
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield Document(f"{path}:{number}", _parts(_object(line, f"{path}:{number}"), f"{path}:{number}"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _object(line: bytes, origin: str) -> Mapping[str, Any]:
    try:
        body = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not a line of JSON: {error}") from error
    if not isinstance(body, dict):
        raise UserError(f'{origin}: {type(body).__name__} is no object; each line is one, such as {{"text": "..."}}')
    return body


def _rows(path: Path) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet needs the library pyarrow; pip install 'holdfast[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = [name for form in FORMS for name in form if name in file.schema_arrow.names]
            number = 0
            # Only the named columns are read, whatever else the rows carry.
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=names):
                for row in batch.to_pylist() if names else [{}]:
                    number += 1
                    yield Document(f"{path}:{number}", _parts(row, f"{path}: row {number}"))
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as Parquet: {error}") from error


FORMS = (("text",), ("prompt", "completion"), ("messages",))


def _parts(body: Mapping[str, Any], origin: str) -> tuple[Part, ...]:
    """Return the parts of a line or row; which form it has, its fields say. Raises UserError."""
    forms = [form for form in FORMS if any(body.get(name) is not None for name in form)]
    if len(forms) != 1:
        known = "; or ".join(", ".join(form) for form in FORMS)
        there = ", ".join(sorted(body))[:200] or "none"
        raise UserError(f"{origin}: its fields are {there}; needed are, of one form only: {known}")
    if forms[0] == ("messages",):
        return tuple(part for message in _messages(body["messages"], origin) for part in message)
    texts = [_text_field(body, name, origin) for name in forms[0]]
    return tuple(Part(text, learned=place == len(texts) - 1) for place, text in enumerate(texts))


def _messages(messages: Any, origin: str) -> Iterator[tuple[Part, Part]]:
    """Yield the head and the content of each message; what the assistant wrote is learned."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{origin}: messages is no list of {{role, content}}")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UserError(f"{origin}: a message has no role of {', '.join(ROLES)}")
        role = message["role"]
        yield (
            Part(f"<|{role}|>\n", learned=False),
            Part(_text_field(message, "content", origin) + "\n", learned=role == LEARNED_ROLE),
        )


def _text_field(body: Mapping[str, Any], name: str, origin: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise UserError(f"{origin}: {name} is {json.dumps(value, default=str)[:60]}, no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{origin}: {name} has half a character (a lone surrogate) at {error.start}") from error
    return value


def _tokens(batch: Sequence[Document], tokenizer: Tokenizer) -> Iterator[tuple[Sequence[int], bytes | None]]:
    """Yield tokens and weights of each document, closed by the end token, which is learned as what it closes is."""
    encoded = iter(tokenizer.encode([part.text for document in batch for part in document.parts]))
    end = [] if tokenizer.facts.end is None else [tokenizer.facts.end]
    for document in batch:
        tokens: list[int] = []
        weights = bytearray()
        for part in document.parts:
            ids = next(encoded)
            tokens += ids
            weights += (b"\1" if part.learned else b"\0") * len(ids)
        weights += weights[-1:] * len(end)
        yield tokens + end, bytes(weights) if 0 in weights else None


def _batched(items: Iterable[Document], size: int) -> Iterator[list[Document]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
