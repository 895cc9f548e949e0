"""What a rank gets of a committed save: whole files, or the name of the damaged one."""

import dataclasses
import hashlib
import os

import pytest

from agent.cloud import Bucket
from agent.fetch import Fetch
from agent.files import plain_name
from agent.journal import Journal
from job_contract.checkpoint_layout import Manifest, SavedFile, SavePointer, file_key, manifest_key, save_name, seal
from job_contract.node_files import Needs
from job_contract.orders import ResumeFrom
from job_contract.version import ContractError

FILES = (".metadata", "__0_0.distcp")


@pytest.fixture
def saved(s3, play, tmp_path):
    """The pointers of two committed saves of attempt 1, older first; attempt 2 owns the head."""
    pointers = [commit_save(s3, play, tmp_path, number) for number in (1, 2)]
    play.head(s3, attempt=2)
    return pointers


def commit_save(s3, play, tmp_path, number):
    name = save_name(10 * number, 1, number)
    bodies = {file: f"{name} {file} ".encode() * 100 for file in FILES}
    s3.objects |= {file_key(play.prefix, name, file): body for file, body in bodies.items()}
    files = tuple(
        SavedFile(path=file, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest(), node_rank=0)
        for file, body in bodies.items()
    )
    manifest = Manifest(
        job=play.job,
        attempt=1,
        step=10 * number,
        save=name,
        world_size=1,
        mesh=(1,),
        config_hash="c",
        corpus_digest="d",
        versions={},
        facts={},
        files=files,
    )
    s3.objects[manifest_key(play.prefix, name)], digest = seal(manifest)
    return SavePointer(save=name, manifest_sha256=digest)


@pytest.fixture
def make_fetch(s3, play, tmp_path):
    def make(local=()):
        return Fetch(
            [0],
            job=play.job,
            prefix=play.prefix,
            run_dir=tmp_path / "fetching",
            local=local,
            bucket=Bucket(s3, "bucket"),
            downloads=2,
            journal=Journal(tmp_path / "events.jsonl"),
        )

    return make


def flip(s3, key):
    body = bytearray(s3.objects[key])
    body[len(body) // 2] ^= 1
    s3.objects[key] = bytes(body)


def test_whole_files_lie_in_the_folder_with_their_manifest(saved, make_fetch, s3, play, tmp_path):
    provided = make_fetch().provide(Needs(number=1, save=saved[1], files=FILES))
    assert provided.damaged == ()
    assert provided.folder == str(tmp_path / "fetching" / "restore" / saved[1].save)
    assert sorted(os.listdir(provided.folder)) == sorted([*FILES, "manifest.json"])
    for file in (*FILES, "manifest.json"):
        with open(os.path.join(provided.folder, file), "rb") as copy:
            assert copy.read() == s3.objects[file_key(play.prefix, saved[1].save, file)]


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_one_flipped_byte_is_found_whichever_file_holds_it(saved, make_fetch, s3, play, file):
    flip(s3, file_key(play.prefix, saved[1].save, file))
    provided = make_fetch().provide(Needs(number=1, save=saved[1], files=FILES))
    assert [(damage.save, damage.file) for damage in provided.damaged] == [(saved[1].save, file)]
    assert file not in os.listdir(provided.folder)


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_a_missing_or_cut_file_is_found(saved, make_fetch, s3, play, file):
    key = file_key(play.prefix, saved[1].save, file)
    s3.objects[key] = s3.objects[key][:-1]
    assert make_fetch().provide(Needs(number=1, save=saved[1], files=FILES)).damaged[0].file == file
    del s3.objects[key]
    assert make_fetch().provide(Needs(number=1, save=saved[1], files=FILES)).damaged[0].file == file


def test_a_whole_manifest_of_another_save_is_damage(saved, make_fetch, s3, play):
    older, newer = (manifest_key(play.prefix, pointer.save) for pointer in saved)
    s3.objects[newer] = s3.objects[older]
    assert make_fetch().provide(Needs(number=1, save=saved[1], files=FILES)).damaged[0].file == "manifest.json"


def test_a_damaged_local_copy_is_replaced_from_the_bucket(saved, make_fetch, tmp_path):
    kept = tmp_path / "kept"
    (kept / saved[1].save).mkdir(parents=True)
    (kept / saved[1].save / ".metadata").write_bytes(b"torn")
    assert make_fetch([kept]).provide(Needs(number=1, save=saved[1], files=FILES)).damaged == ()


def test_files_that_the_manifest_does_not_list_are_not_fetched(saved, make_fetch):
    names = ("../../job.json", "rank-0.json", "-rf", "/etc/passwd")
    damaged = make_fetch().provide(Needs(number=1, save=saved[1], files=names)).damaged
    assert [damage.file for damage in damaged] == list(names)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "-rf", "manifest.json", "a\0b", "a\n", "\u00e4"])
def test_a_name_that_leads_elsewhere_is_refused(name):
    with pytest.raises(ContractError):
        plain_name(name)


def test_the_ranks_fall_back_to_the_parent_and_the_node_says_past_what(saved, start_node, play, s3):
    flip(s3, file_key(play.prefix, saved[1].save, "__0_0.distcp"))
    replacement = start_node(5)
    replacement.agent.identity = dataclasses.replace(replacement.agent.identity, instance="i-0")
    resume = ResumeFrom(save=saved[1].save, manifest_sha256=saved[1].manifest_sha256, parent=saved[0])
    replacement.orders.value = play.seen("run", 9, attempt=2, resume_from=resume)
    report = replacement.wait_for("started")
    assert report.restored == saved[0].save
    assert [(miss.save, miss.file) for miss in report.fell_back] == [(saved[1].save, "__0_0.distcp")]
