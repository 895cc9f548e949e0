"""What a rank gets of a data set: proved shards of its block and the next, or the name of the damaged one."""

import dataclasses
import errno
import json
import mmap
import os

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from agent.cloud import Bucket
from agent.journal import Journal
from agent.shards import InFolder, Shards, place_of
from job_contract.dataset import TokenizerFacts, open_index
from job_contract.dataset_writer import DatasetWriter
from job_contract.node_files import DamagedData, DataNeeds, read_message, write_message
from job_contract.spec import DataSpec, EvaluationSpec

PREFIX = "web/v3"


@pytest.fixture
def dataset(tmp_path, s3):
    """Six shards of 64 tokens, the first two with a mask; in a folder and in the bucket."""
    folder = tmp_path / "prepared"
    facts = TokenizerFacts(kind="bytes")
    with DatasetWriter(folder, vocab=256, tokenizer=facts, source="", licence="", shard_tokens=64) as writer:
        writer.add(bytes(range(128)), bytes([0, 1] * 64))
        writer.add(bytes(range(256)))
        index = writer.close()
    s3.objects |= {f"{PREFIX}/{path.name}": path.read_bytes() for path in folder.iterdir()}
    return folder, index


class Site:
    """One node's side of the data, and a rank that says what it reads."""

    def __init__(self, root, data, place, ranks=(0,)):
        self.run_dir, self.journal = root / "run", Journal(root / "events.jsonl")
        self.ranks, self.number = ranks, 0
        self.shards = Shards(
            data, ranks, run_dir=self.run_dir, root=root, place=place, downloads=2, journal=self.journal
        )

    def reads(self, *shards, rank=0):
        self.number += 1
        write_message(self.run_dir / "data-needs" / f"rank-{rank}.json", DataNeeds(number=self.number, shards=shards))

    def settle(self):
        for _ in range(20):
            if self.shards.round():
                return self.visible()
        raise AssertionError("it never settles")

    def visible(self):
        return sorted(os.listdir(self.shards.visible))

    @property
    def damaged(self):
        return read_message(self.run_dir / "damaged-data.json", DamagedData)

    def notes(self, event):
        lines = map(json.loads, (self.run_dir.parent / "events.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == event]


@pytest.fixture
def site(tmp_path, s3, dataset):
    data = DataSpec(uri=f"s3://corpora/{PREFIX}", index_sha256=dataset[1].sha256)

    def make(ranks=(0,), uri=data.uri, sha256=data.index_sha256):
        data = DataSpec(uri=uri, index_sha256=sha256)
        return Site(tmp_path / "node", data, place_of(uri, Bucket(s3, "saves")), ranks)

    return make


def test_the_index_comes_first_and_then_what_a_rank_reads_and_nothing_else(site, dataset):
    node = site()
    assert node.settle() == ["index.json"]
    node.reads(0, 3)
    assert node.settle() == ["index.json", "shard-00000.bin", "shard-00000.weights", "shard-00003.bin"]
    for name in node.visible():
        assert (node.shards.visible / name).read_bytes() == (dataset[0] / name).read_bytes()
    assert open_index((node.shards.visible / "index.json").read_bytes(), dataset[1].sha256) == dataset[1]


def test_what_is_read_first_comes_first_whichever_rank_reads_it(site, s3):
    node = site(ranks=(0, 1))
    node.reads(2, 3, 4, rank=0)
    node.reads(5, 3, rank=1)
    node.settle()
    brought = [note["file"] for note in node.notes("data_brought")]
    assert set(brought[:2]) == {"shard-00002.bin", "shard-00005.bin"}


def test_old_shards_go_and_a_rank_that_still_reads_one_keeps_it(site):
    node = site()
    node.reads(2)
    node.settle()
    with (node.shards.visible / "shard-00002.bin").open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    node.reads(3)
    assert node.settle() == ["index.json", "shard-00003.bin"]
    assert sorted(os.listdir(node.shards.store)) == ["shard-00003.bin"]
    assert mapped[:] == bytes(range(64))


def test_a_shard_stays_while_one_rank_needs_it_or_has_not_said_what_it_needs(site):
    node = site(ranks=(0, 1))
    node.reads(2, rank=0)
    node.settle()
    node.reads(3, rank=0)
    assert "shard-00002.bin" in node.settle()
    node.reads(2, rank=1)
    assert "shard-00002.bin" in node.settle()
    node.reads(3, rank=1)
    assert "shard-00002.bin" not in node.settle()


DAMAGE = {
    "flipped": lambda body: bytes([body[0] ^ 1]) + body[1:],
    "cut": lambda body: body[:-1],
    "longer": lambda body: body + b"\0",
    "empty": lambda body: b"",
    "zeroed": lambda body: bytes(len(body)),
    "missing": None,
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", ["shard-00000.bin", "shard-00001.weights", "index.json"])
def test_a_damaged_file_is_named_and_never_visible(site, s3, dataset, kind, file):
    damage, key = DAMAGE[kind], f"{PREFIX}/{file}"
    body = (dataset[0] / file).read_bytes()
    if damage is None:
        del s3.objects[key]
    else:
        s3.objects[key] = damage(body)
    node = site()
    node.reads(0, 1)
    node.settle()
    assert node.damaged is not None
    assert node.damaged.file == file
    assert file not in node.visible()
    assert file not in os.listdir(node.shards.store)


def test_a_shard_in_place_of_another_of_equal_size_is_damage(site, s3):
    s3.objects[f"{PREFIX}/shard-00002.bin"] = s3.objects[f"{PREFIX}/shard-00003.bin"]
    node = site()
    node.reads(2)
    node.settle()
    assert "sha256" in node.damaged.reason


def test_another_whole_index_is_not_the_pinned_one(site):
    node = site(sha256="0" * 64)
    node.settle()
    assert (node.damaged.file, "pinned was 0000" in node.damaged.reason) == ("index.json", True)


def test_bytes_that_were_damaged_on_the_way_are_fetched_once_more(site, s3, monkeypatch):
    key, asked = f"{PREFIX}/shard-00002.bin", []
    whole, get = s3.objects[key], s3.get_object

    def once_wrong(**call):
        if call["Key"] == key:
            asked.append(call)
            s3.objects[key] = whole if len(asked) > 1 else bytes(64)
        return get(**call)

    monkeypatch.setattr(s3, "get_object", once_wrong)
    node = site()
    node.reads(2)
    assert "shard-00002.bin" in node.settle()
    assert (len(asked), node.damaged) == (2, None)
    assert len(node.notes("data_differs")) == 1


def test_a_bucket_that_does_not_answer_is_asked_again_and_not_blamed(site, s3):
    s3.fail("get", "shard-00002.bin", "SlowDown", 503, times=3)
    node = site()
    node.reads(2)
    for _ in range(3):
        assert "shard-00002.bin" not in node.settle()
    assert "shard-00002.bin" in node.settle()
    assert (len(node.notes("data_retry")), node.damaged) == (3, None)


def test_a_bucket_that_nodes_may_not_read_is_named_with_the_way_out(site, s3):
    s3.fail("get", "index.json", "AccessDenied", 403)
    node = site()
    node.settle()
    assert "DataBucketArns" in node.damaged.reason


def test_a_full_disk_is_named_with_the_way_out(site, monkeypatch):
    def full(self, stored, into=None):
        raise OSError(errno.ENOSPC, "No space left on device")

    node = site()
    node.settle()
    monkeypatch.setattr(Shards, "_read", full)
    node.reads(2)
    node.settle()
    assert "smaller shards" in node.damaged.reason


def test_a_survivor_brings_nothing_twice_and_proves_what_it_kept(site, s3):
    first = site()
    first.reads(2, 3)
    first.settle()
    (first.shards.store / "shard-00003.bin").unlink()
    (first.shards.store / "shard-00003.bin").write_bytes(bytes(64))
    del s3.objects[f"{PREFIX}/shard-00002.bin"]
    os.rename(first.run_dir, first.run_dir.with_name("past"))
    second = site()
    second.reads(2, 3)
    assert second.settle() == ["index.json", "shard-00002.bin", "shard-00003.bin"]
    assert (second.shards.visible / "shard-00003.bin").read_bytes() == bytes(range(64, 128))
    assert {note["file"]: note["local"] for note in second.notes("data_brought")} == {
        "shard-00002.bin": True,
        "shard-00003.bin": False,
    }


def test_shards_of_another_data_set_take_no_room(site, dataset):
    node = site()
    other = node.shards.store.parent / ("0" * 64)
    other.mkdir()
    site()
    assert not other.exists()


def test_needs_of_shards_that_the_index_does_not_have_are_left_alone(site):
    node = site()
    node.reads(-1, 6, 99)
    assert node.settle() == ["index.json"]
    assert node.damaged is None


def test_a_mounted_folder_is_proved_once_and_read_in_place(site, dataset, monkeypatch):
    read = []
    stream = InFolder.stream
    monkeypatch.setattr(InFolder, "stream", lambda place, file: read.append(file) or stream(place, file))
    node = site(uri=f"file://{dataset[0]}")
    for _ in range(2):
        node.reads(2)
        assert node.settle() == ["index.json", "shard-00002.bin"]
        node.reads(3)
        node.settle()
    assert (node.shards.visible / "shard-00003.bin").readlink() == dataset[0] / "shard-00003.bin"
    assert read == ["index.json", "shard-00002.bin", "shard-00003.bin"]
    assert os.listdir(node.shards.store) == []


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(bytes(64)), os.unlink])
def test_a_damaged_file_of_a_mounted_folder_is_named(site, dataset, change):
    change(dataset[0] / "shard-00002.bin")
    node = site(uri=f"file://{dataset[0]}")
    node.reads(2)
    node.settle()
    assert node.damaged.file == "shard-00002.bin"


def test_a_place_that_is_lost_for_a_while_is_asked_again(site, monkeypatch):
    def lost(self, file):
        raise ReadTimeoutError(endpoint_url="here")

    node = site()
    with monkeypatch.context() as patch:
        patch.setattr("agent.shards.InBucket.stream", lost)
        assert node.settle() == []
    assert node.settle() == ["index.json"]
    assert node.damaged is None


def test_an_error_that_says_nothing_of_the_data_is_no_damage(site, monkeypatch):
    def odd(self, file):
        raise ClientError({"Error": {"Code": "InternalError"}, "ResponseMetadata": {"HTTPStatusCode": 500}}, "Get")

    node = site()
    monkeypatch.setattr("agent.shards.InBucket.stream", odd)
    node.settle()
    assert node.damaged is None


def test_the_node_says_which_file_of_the_data_was_damaged(start_node, play, s3, dataset):
    s3.objects[f"{PREFIX}/index.json"] = b"{}"
    spec = play.spec("needs-data")
    data = DataSpec(uri=f"s3://corpora/{PREFIX}", index_sha256=dataset[1].sha256)
    node = start_node()
    spec = dataclasses.replace(spec, training=dataclasses.replace(spec.training, data=data))
    node.orders.value = play.seen("run", 1, spec=spec)
    report = node.wait_for("failed")
    assert report.failure == "user_error"
    assert report.reason.startswith("data: index.json: index.json has version None")


def test_the_evaluations_data_come_into_a_folder_of_their_own(start_node, play, dataset):
    data = DataSpec(uri=f"s3://corpora/{PREFIX}", index_sha256=dataset[1].sha256)
    evaluation = EvaluationSpec(data=data, every_steps=2)
    spec = play.spec()
    node = start_node()
    spec = dataclasses.replace(spec, training=dataclasses.replace(spec.training, evaluation=evaluation))
    node.orders.value = play.seen("run", 1, spec=spec)
    node.agent.tick()
    write_message(node.run_dir / "evaluation-needs/rank-0.json", DataNeeds(number=1, shards=(2,)))
    play.until(lambda: (node.run_dir / "evaluation/shard-00002.bin").exists(), node)
    assert not (node.run_dir / "data").exists()
