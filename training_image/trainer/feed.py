"""A rank's side of the data: it says which shards it reads now and next, and trains on what the agent has proved."""

from __future__ import annotations

from pathlib import Path

from job_contract.dataset import INDEX_FILE, open_index
from job_contract.node_files import DAMAGED_DATA_FILE, DamagedData, DataNeeds, read_message, write_message
from trainer.corpus import Corpus, open_corpus
from trainer.data import Batches
from trainer.endings import UserError
from trainer.pulse import Lack


class Feed:
    """Gives the batches their corpus. The built-in one is here whole; of a data set there are two blocks at a time."""

    def __init__(
        self, run_dir: Path, folder: Path, pinned: str | None, batches: Batches, rank: int, *, sharing: int = 1
    ) -> None:
        """`pinned` is the digest of the data set that the agent brings to `folder`; None = the built-in corpus.

        `sharing` ranks are brought theirs by one agent.
        """
        self.sharing = sharing
        self.run_dir, self.folder, self.pinned, self.batches, self.rank = run_dir, folder, pinned, batches, rank
        self.corpus: Corpus | None = None
        self._number, self._asked = 0, ()
        if self.pinned is None:
            self._open(open_corpus(self.folder))

    @property
    def digest(self) -> str:
        """The digest of the index, known before the index is here."""
        return self.pinned or (self.corpus.digest if self.corpus else "")

    @property
    def masked(self) -> bool:
        """Whether some tokens are no targets."""
        return self.corpus is not None and self.corpus.index.masked

    def lacks(self, step: int) -> bool:
        """Return whether a sample of the step after `step` finished ones is not here yet; it has been asked for.

        Raises UserError when the agent could not get the data as they were pinned.
        """
        if self.pinned is None:
            return False
        self._look_for_damage()
        if self.corpus is None:
            if not (self.folder / INDEX_FILE).exists():
                return True
            self._open(Corpus(self.folder, open_index((self.folder / INDEX_FILE).read_bytes(), self.pinned)))
        self._ask(step)
        return not all(self.corpus.has(shard) for shard in self.batches.shards(step))

    def lack(self, step: int) -> Lack | None:
        """Return the first thing that the step after `step` finished ones lacks, None when it lacks nothing."""
        if not self.lacks(step):
            return None
        if self.corpus is None:
            return Lack(f"{self.folder.name}/{INDEX_FILE}", 0)
        shards, missing = self.corpus.index.shards, sorted(self.batches.shards(step))
        missing = [shard for shard in missing if not self.corpus.has(shard)]
        wanted = sum(file.bytes for shard in self._asked for file in shards[shard].needed)
        return Lack(f"{self.folder.name}/{shards[missing[0]].file}", self.sharing * wanted) if missing else None

    def _ask(self, step: int) -> None:
        reading = self.batches.reading(step)
        if reading != self._asked:
            self._number, self._asked = self._number + 1, reading
            needs = DataNeeds(number=self._number, shards=reading)
            write_message(self.folder.with_name(f"{self.folder.name}-needs") / f"rank-{self.rank}.json", needs)
            self.corpus.forget_all_but(reading)

    def _look_for_damage(self) -> None:
        damaged = read_message(self.run_dir / DAMAGED_DATA_FILE, DamagedData)
        if damaged is not None:
            raise UserError(f"data: {damaged.file}: {damaged.reason}")

    def _open(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.batches.read_from(corpus)
