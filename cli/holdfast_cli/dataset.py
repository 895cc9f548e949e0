"""`holdfast dataset`: make a dataset of your own text, prove it, and give it a name."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.messages.control_request import SCHEMA, read_control
from holdfast_cli import show
from holdfast_cli.errors import UserError, told
from holdfast_cli.options import AsJson, By, StackName
from holdfast_cli.prepare import ByteTokenizer, FileTokenizer, Progress, prepare
from holdfast_cli.stack import Stack
from job_contract.dataset import INDEX_FILE, BadIndex, DatasetIndex, open_index

SHARD_TOKENS = 1 << 26
SOURCE_CHARACTERS = 200
TELL_EVERY_S = 2.0
REGISTERED_WITHIN_S, POLL_S = 60.0, 1.0

dataset = typer.Typer(help="Datasets: shards of tokens, under an index that proves them.", no_args_is_help=True)


@dataset.command("prepare")
@told
def prepare_verb(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Text files, JSON lines (.jsonl), Parquet (.parquet), or folders of them. A line or row has text, or "
            "prompt and completion, or messages; of the last two only the answers are learned.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="The folder to make; it must not be there.")],
    licence: Annotated[str, typer.Option(help="The licence of the text, such as CC-BY-4.0; stands in the index.")],
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json; without it a token is a byte.")] = None,
    end_token: Annotated[str | None, typer.Option(help="The token of the tokenizer that ends a document.")] = None,
    source: Annotated[str | None, typer.Option(help="Where the text is from; the names of the inputs.")] = None,
    shard_tokens: Annotated[int, typer.Option(min=2, help="Tokens in a shard.")] = SHARD_TOKENS,
    as_json: AsJson = False,
) -> None:
    """Make a dataset of text: the same input makes the same bytes, and an error leaves nothing behind."""
    if end_token is not None and tokenizer is None:
        raise UserError("--end-token is a token of --tokenizer; name that file too, or leave it out")
    index = prepare(
        inputs,
        output,
        tokenizer=FileTokenizer(tokenizer, end_token) if tokenizer else ByteTokenizer(),
        licence=licence,
        source=source or ", ".join(path.name for path in inputs)[:SOURCE_CHARACTERS],
        shard_tokens=shard_tokens,
        tell=_teller(),
    )
    _show(index, str(output), as_json)
    if not as_json:
        print(f"next       aws s3 cp --recursive {output} s3://BUCKET/PREFIX/")


@dataset.command()
@told
def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A dataset's folder.")],
    digest: Annotated[str | None, typer.Option(help="The digest that its index should have.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every file of a dataset and compare it with the index; exit code 2 when one differs."""
    index = _index_in(folder, digest)
    damaged = []
    for stored in index.files:
        try:
            with (folder / stored.file).open("rb") as stream:
                found = (hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell())
        except OSError as error:
            damaged.append(f"{stored.file}: {error.strerror}")
            continue
        if found != (stored.sha256, stored.bytes):
            damaged.append(f"{stored.file}: {found[1]} bytes, sha256 {found[0][:12]}; the index says {stored.bytes}, "
                           f"{stored.sha256[:12]}")  # fmt: skip
    if damaged:
        raise UserError("\n".join([f"{folder}: {len(damaged)} files are not what the index says:", *damaged[:20]]))
    _show(index, str(folder), as_json)


@dataset.command()
@told
def register(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Its folder: s3://bucket/prefix, or file:///mnt/folder.")],
    name: Annotated[str, typer.Option(help="1 to 63 characters a-z, 0-9 and -.")],
    version: Annotated[int, typer.Option(min=1, help="A version is put once, and never changes.")],
    digest: Annotated[str | None, typer.Option(help="The digest that prepare printed; needed for file://.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is known; exit code 1 when it is not.")] = False,
    by: By = None,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Give a dataset a name and a version that requests can use: "data": {"dataset": "NAME@VERSION"}."""
    wish = {"schema": SCHEMA, "action": "register_dataset", "name": name, "version": version, "uri": uri}
    optional = {"digest": digest, "requested_by": by}
    body = json.dumps({**wish, **{key: value for key, value in optional.items() if value is not None}})
    read_control(body)
    target = Stack(stack)
    message_id = target.send("ControlQueueUrl", body)
    if wait:
        _wait_for(target, name, version)
    if as_json:
        show.as_json({"dataset": f"{name}@{version}", "message_id": message_id})
    elif wait:
        print(f"{name}@{version} is registered")
    else:
        print(f"asked for {name}@{version}; `holdfast dataset show {name}@{version}` shows it once it was found whole")


@dataset.command("list")
@told
def list_datasets(as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Show the registered datasets."""
    found = [_facts(item) for item in Stack(stack).table.datasets()]
    if as_json:
        show.as_json(found)
    elif not found:
        print("no dataset is registered; `holdfast dataset register` does it")
    else:
        heads = ("DATASET", "TOKENS", "VOCAB", "LICENCE", "PLACE")
        show.table(heads, [[_cell(one, head) for head in heads] for one in found])


@dataset.command("show")
@told
def show_dataset(
    dataset: Annotated[str, typer.Argument(metavar="NAME@VERSION", help="A registered dataset.")],
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Show where a registered dataset lies, and what its index says."""
    name, _, version = dataset.partition("@")
    if not version.isdecimal():
        raise UserError(f"{dataset!r} names no version; write NAME@VERSION, such as web@3")
    item = Stack(stack).table.dataset(name, int(version))
    if item is None:
        raise UserError(f"there is no dataset {dataset}; `holdfast dataset list` shows those there are")
    facts = _facts(item)
    if as_json:
        show.as_json(facts)
        return
    for key, value in facts.items():
        print(f"{key:14} {show.clean(f'{value:,}' if type(value) is int else str(value))}")


def _wait_for(target: Stack, name: str, version: int) -> None:
    give_up_at = time.monotonic() + REGISTERED_WITHIN_S
    while target.table.dataset(name, version) is None:
        if time.monotonic() > give_up_at:
            typer.echo(
                f"holdfast: {name}@{version} was not registered within {REGISTERED_WITHIN_S:.0f} s; "
                "look for a refusal on the result queue",
                err=True,
            )
            raise typer.Exit(1)
        time.sleep(POLL_S)


def _facts(item: Mapping[str, Any]) -> dict[str, Any]:
    own = {"dataset": f"{item['name']}@{item['version']}", "place": item["uri"]}
    rest = {key: value for key, value in item.items() if key not in ("pk", "sk", "name", "version", "uri")}
    return {**own, **dict(sorted(rest.items()))}


def _cell(facts: Mapping[str, Any], head: str) -> str:
    value = facts.get(head.lower())
    return "?" if value is None else f"{value:,}" if type(value) is int else str(value)


def _index_in(folder: Path, digest: str | None) -> DatasetIndex:
    try:
        return open_index((folder / INDEX_FILE).read_bytes(), digest)
    except OSError as error:
        raise UserError(f"{folder / INDEX_FILE} cannot be read: {error}; name the folder of a dataset") from error
    except BadIndex as error:
        raise UserError(f"{folder}: {error}") from error


def _show(index: DatasetIndex, place: str, as_json: bool) -> None:
    facts = {
        "place": place,
        "digest": index.sha256,
        "tokens": index.tokens,
        "shards": len(index.shards),
        "documents": sum(shard.document_count for shard in index.shards),
        "vocab": index.vocab,
        "dtype": index.dtype,
        "masked": index.masked,
        "tokenizer": index.tokenizer.kind,
        "source": index.source,
        "licence": index.licence,
    }
    if as_json:
        show.as_json(facts)
        return
    for name, value in facts.items():
        print(f"{name:10} {show.clean(f'{value:,}' if type(value) is int else str(value))}")


def _teller() -> Callable[[Progress], None]:
    """Return a function that says how far the preparation is, on standard error, every few seconds."""
    began_at = told_at = time.monotonic()

    def tell(progress: Progress) -> None:
        nonlocal told_at
        now = time.monotonic()
        if now - told_at >= TELL_EVERY_S:
            told_at = now
            rate = progress.tokens / (now - began_at)
            print(
                f"file {progress.file} of {progress.files}, {progress.documents:,} documents, "
                f"{progress.tokens:,} tokens, {progress.shards} shards, {rate:,.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )

    return tell
