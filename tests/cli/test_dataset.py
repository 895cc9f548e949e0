"""Claims about `holdfast dataset prepare` and `verify`: text becomes tokens, or an error says where it is wrong."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from holdfast.messages.control_request import RegisterDataset, read_control
from holdfast_cli.errors import UserError
from holdfast_cli.main import app
from holdfast_cli.prepare import BYTE_END, ByteTokenizer, FileTokenizer, prepare
from job_contract.dataset import DatasetIndex, open_index
from tests.cli.cloud import Cloud, holdfast

QUESTION = {"prompt": "2+2=", "completion": "4"}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-pair tokenizer of the real library, trained here."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        ["the cat sat on the mat", "the dog"] * 20,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False),
    )
    trained.enable_truncation(4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained.save(str(path))
    return path


def lines(path: Path, *bodies: Any) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def prepared(folder: Path, *inputs: Path, tokenizer: Any = None, shard_tokens: int = 1000) -> DatasetIndex:
    return prepare(
        inputs,
        folder,
        tokenizer=tokenizer or ByteTokenizer(),
        licence="CC0-1.0",
        source="here",
        shard_tokens=shard_tokens,
    )


def tokens_of(folder: Path) -> list[int]:
    index = open_index((folder / "index.json").read_bytes())
    code = {"uint8": "B", "uint16": "H", "uint32": "I"}[index.dtype]
    return [token for shard in index.shards for token in array(code, (folder / shard.file).read_bytes())]


def weights_of(folder: Path) -> list[int]:
    index = open_index((folder / "index.json").read_bytes())
    return [
        weight
        for shard in index.shards
        for weight in ((folder / shard.weights.file).read_bytes() if shard.weights else b"\1" * shard.tokens)
    ]


def starts_of(folder: Path) -> list[list[int]]:
    index = open_index((folder / "index.json").read_bytes())
    return [list(array("Q", (folder / shard.documents.file).read_bytes())) for shard in index.shards]


def test_a_text_file_is_one_document_of_bytes_closed_by_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aé")
    index = prepared(tmp_path / "out", tmp_path / "a.txt")
    assert tokens_of(tmp_path / "out") == [*"aé".encode(), BYTE_END]
    assert (index.dtype, index.vocab, index.licence, index.masked) == ("uint16", 260, "CC0-1.0", False)


def test_only_the_answer_is_learned_and_its_end(tmp_path: Path) -> None:
    prepared(tmp_path / "out", lines(tmp_path / "a.jsonl", QUESTION, {"text": "ab"}))
    assert tokens_of(tmp_path / "out") == [*b"2+2=4", BYTE_END, *b"ab", BYTE_END]
    assert weights_of(tmp_path / "out") == [0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_of_messages_only_what_the_assistant_wrote_is_learned(tmp_path: Path) -> None:
    prepared(tmp_path / "out", lines(tmp_path / "a.jsonl", CHAT))
    learned = [
        token for token, weight in zip(tokens_of(tmp_path / "out"), weights_of(tmp_path / "out"), strict=True) if weight
    ]
    assert bytes(tokens_of(tmp_path / "out")[:-1]) == b"<|user|>\nhi\n<|assistant|>\nyo\n"
    assert learned == [*b"yo\n", BYTE_END]


def test_documents_cross_shards_of_one_size_and_their_beginnings_are_kept(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", {"text": "abcdef"}, QUESTION, {"text": "g"})
    index = prepared(tmp_path / "out", source, shard_tokens=5)
    assert [shard.tokens for shard in index.shards] == [5, 5, 5]
    assert tokens_of(tmp_path / "out") == [*b"abcdef", BYTE_END, *b"2+2=4", BYTE_END, *b"g", BYTE_END]
    assert starts_of(tmp_path / "out") == [[0], [2], [3]]
    assert weights_of(tmp_path / "out") == [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert [shard.weights is not None for shard in index.shards] == [False, True, True]


def test_parquet_rows_are_the_same_documents_as_lines_and_other_columns_are_not_read(tmp_path: Path) -> None:
    rows = [{**QUESTION, "image": b"\0" * 100}, {"prompt": "a", "completion": "b", "image": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    prepared(tmp_path / "rows", tmp_path / "a.parquet")
    prepared(tmp_path / "lines", lines(tmp_path / "a.jsonl", QUESTION, {"prompt": "a", "completion": "b"}))
    same = ["shard-00000.bin", "shard-00000.documents", "shard-00000.weights"]
    for name in same:
        assert (tmp_path / "rows" / name).read_bytes() == (tmp_path / "lines" / name).read_bytes()


def test_parquet_messages_are_read_too(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([CHAT]), tmp_path / "a.parquet")
    prepared(tmp_path / "out", tmp_path / "a.parquet")
    assert b"<|assistant|>\nyo" in bytes(tokens_of(tmp_path / "out")[:-1])


def test_a_tokenizer_of_the_real_library_makes_its_own_tokens_whole(tmp_path: Path, tokenizer_json: Path) -> None:
    text = "the cat sat on the mat </s> and on the dog"
    (tmp_path / "a.txt").write_text(text)
    index = prepared(tmp_path / "out", tmp_path / "a.txt", tokenizer=FileTokenizer(tokenizer_json, None))
    whole = Tokenizer.from_file(str(tokenizer_json))
    tokens = tokens_of(tmp_path / "out")
    assert whole.decode(tokens[:-1], skip_special_tokens=False).replace(" ", "") == "Ġ".join(text.split()).replace(
        " ", ""
    )
    assert len(tokens) < len(text)
    # What a document spells is text; the end token stands once, at the end.
    assert [place for place, token in enumerate(tokens) if token == index.tokenizer.end] == [len(tokens) - 1]
    assert (index.tokenizer.kind, index.vocab) == ("huggingface", whole.get_vocab_size())


def test_the_same_input_makes_the_same_bytes_and_another_order_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.md", "deep/c.txt"):
        (folder / name).write_text(name * 50)
    (folder / "not-text.bin").write_bytes(b"\xff")
    first, second = prepared(tmp_path / "1", folder), prepared(tmp_path / "2", folder)
    assert first == second
    assert {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "2").iterdir()
    }
    other = prepared(tmp_path / "3", folder / "deep/c.txt", folder / "a.md", folder / "b.txt")
    assert other.sha256 != first.sha256
    assert other.tokens == first.tokens


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": }\n', "a.jsonl:2: not a line of JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n[1]\n', "a.jsonl:3: list is no object"),
        ("a.jsonl", b'{"body": "a"}\n', "a.jsonl:1: its fields are body"),
        ("a.jsonl", b'{"text": "a", "prompt": "b", "completion": "c"}\n', "of one form only"),
        ("a.jsonl", b'{"prompt": "b"}\n', "a.jsonl:1: completion is null, no text"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: text is 5, no text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "lone surrogate"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl:1: not a line of JSON"),
        ("a.jsonl", b'{"messages": []}\n', "a.jsonl:1: messages is no list"),
        ("a.jsonl", b'{"messages": [{"role": "king", "content": "a"}]}\n', "no role of system, user"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "content is null"),
        ("a.txt", b"ab\xffc", "a.txt: byte 2 is no UTF-8"),
        ("a.txt", b"", "there is not one token"),
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
    ],
)
def test_what_cannot_be_read_is_named_and_leaves_nothing(tmp_path: Path, name: str, raw: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError) as caught:
        prepared(tmp_path / "out", tmp_path / name)
    assert said in str(caught.value)
    assert os.listdir(tmp_path) == [name]


def test_a_folder_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    prepared(tmp_path / "out", tmp_path / "a.txt")
    with pytest.raises(UserError, match="is there already"):
        prepared(tmp_path / "out", tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("text", "end", "said"),
    [("{}", None, "is no tokenizer.json"), (None, "<|nope|>", "name one of its tokens with --end-token")],
)
def test_a_tokenizer_that_cannot_be_used_is_named(
    tmp_path: Path, tokenizer_json: Path, text: str | None, end: str | None, said: str
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text or tokenizer_json.read_text())
    with pytest.raises(UserError, match=said):
        FileTokenizer(path, end)


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")

    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(
            [tmp_path / "a.txt"],
            tmp_path / "out",
            tokenizer=ByteTokenizer(),
            licence="",
            source="",
            shard_tokens=10,
            tell=interrupt,
        )
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_verbs_print_the_digest_and_find_one_flipped_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    out = str(tmp_path / "out")
    run = CliRunner().invoke
    made = run(app, ["dataset", "prepare", str(tmp_path / "a.txt"), "--output", out, "--licence", "CC0-1.0", "--json"])
    facts = json.loads(made.stdout)
    assert (made.exit_code, facts["tokens"], facts["source"]) == (0, 6, "a.txt")
    assert run(app, ["dataset", "verify", out, "--digest", facts["digest"]]).exit_code == 0
    assert run(app, ["dataset", "verify", out, "--digest", "0" * 64]).exit_code == 2
    (tmp_path / "out/shard-00000.bin").write_bytes(b"\0" * 12)
    found = run(app, ["dataset", "verify", out])
    assert found.exit_code == 2
    assert "shard-00000.bin: 12 bytes, sha256" in found.stderr


def test_register_sends_a_wish_that_the_door_reads(cloud: Cloud) -> None:
    words = ["--name", "web", "--version", "3", "--digest", "d" * 64]
    done = holdfast("dataset", "register", "s3://corpora/web", *words)
    assert done.exit_code == 0, done.output
    [wish] = cloud.sent("ControlQueueUrl")
    read = read_control(json.dumps(wish))
    assert isinstance(read, RegisterDataset)
    assert (read.name, read.version, read.uri, read.digest, read.requested_by) == (
        "web",
        3,
        "s3://corpora/web",
        "d" * 64,
        "ops",
    )
    assert "holdfast dataset show web@3" in done.stdout


@pytest.mark.parametrize(
    ("uri", "name"), [("https://x/y", "web"), ("s3://corpora/web", "Web!"), ("s3://corpora/web", "-web")]
)
def test_a_wish_that_the_door_would_refuse_is_not_sent(cloud: Cloud, uri: str, name: str) -> None:
    assert holdfast("dataset", "register", uri, f"--name={name}", "--version", "3").exit_code == 2
    assert cloud.sent("ControlQueueUrl") == []


def test_registered_datasets_are_listed_and_shown(cloud: Cloud) -> None:
    assert "no dataset is registered" in holdfast("dataset", "list").stdout
    known = {"uri": "s3://corpora/web", "digest": "d" * 64, "licence": "CC0-1.0"}
    cloud.store.put_dataset({"name": "web", "version": 3, "tokens": 1234567, **known})
    cloud.store.put_dataset({"name": "far", "version": 1, **known})
    listed = json.loads(holdfast("dataset", "list", "--json").stdout)
    assert [(one["dataset"], one.get("tokens")) for one in listed] == [("far@1", None), ("web@3", 1234567)]
    assert "1,234,567" in holdfast("dataset", "list").stdout
    assert "d" * 64 in holdfast("dataset", "show", "web@3").stdout
    for nothing in ("web@4", "web"):
        missing = holdfast("dataset", "show", nothing)
        assert (missing.exit_code, missing.stderr.startswith("holdfast: ")) == (2, True)
