"""Training data of the benchmarks: random tokens of one length, or pieces of Python source of varying lengths.

Both collators record the unpadded length of every sequence, batch by batch, so that padding doesn't count in tokens a second.
They do so in the process that trains, so the data loader may have no workers.
"""

from __future__ import annotations

import random
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

Record = dict[str, torch.Tensor]
_TOKEN = re.compile(r"\w+|\n *|[^\w\s]")
_DEFINITION = re.compile(r"^(?=def |async def |class )", re.MULTILINE)
_SHORTEST_DIVISOR = 32
"""Texts with fewer than length / 32 tokens are skipped."""
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests"}
"""Folders below the standard library's that don't belong to it (installed packages) or are often absent (tests)."""


class RandomTokens(torch.utils.data.Dataset[Record]):
    """Sequences of random token ids without padding; the labels are the ids."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._shape, self._vocabulary = (count, length), vocabulary

    def __len__(self) -> int:
        """Number of sequences."""
        return self._shape[0]

    def __getitem__(self, index: int) -> Record:
        """One sequence; the same for the same index."""
        ids = torch.randint(0, self._vocabulary, (self._shape[1],), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class SourceTexts(torch.utils.data.Dataset[Record]):
    """Functions and classes of Python's standard library, each a document of its own length.

    The same arguments give the same documents in every run on one installation of Python. A token is a word, a line break with
    the blanks after it, or a single other character; its id is the CRC-32 of its text modulo ``vocabulary``.

    Args:
        count: number of documents. If the library has fewer, they come again in the same order.
        length: maximum number of tokens of a document; longer ones are cut.
        vocabulary: number of different ids.

    Raises:
        ValueError: the standard library has no document.
    """

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._documents: list[Record] = []
        for words in _definitions():
            if len(self._documents) == count:
                break
            if len(words) * _SHORTEST_DIVISOR >= length:
                ids = torch.tensor([zlib.crc32(word.encode()) % vocabulary for word in words[:length]])
                self._documents.append({"input_ids": ids, "labels": ids})
        if not self._documents:
            raise ValueError(
                "Python's standard library has no source files here, from which the documents are made; take --data random, "
                "or a Python that is installed with them"
            )
        self._count = count

    def __len__(self) -> int:
        """Number of documents."""
        return self._count

    def __getitem__(self, index: int) -> Record:
        """One document."""
        return self._documents[index % len(self._documents)]


def _definitions() -> Iterator[list[str]]:
    """Yields the tokens of each piece of each file. A piece begins at a top-level function or class and ends at the next one;
    the first piece of a file is what comes before its first definition."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in library.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(path.relative_to(library).parts)]
    files.sort()
    random.Random(0).shuffle(files)
    for path in files:
        for text in _DEFINITION.split(path.read_text(encoding="utf-8", errors="replace")):
            yield _TOKEN.findall(text)


class Collator:
    """Stacks sequences, and makes sure that every token that is counted was trained on.

    Args:
        length: of every sequence.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.lengths: list[list[int]] = []
        """Tokens of each sequence of each batch so far."""

    def __call__(self, records: list[Record]) -> Record:
        """A batch.

        Raises:
            ValueError: a sequence has another length, or tokens without a label, which would count as speed.
        """
        batch = {key: torch.stack([record[key] for record in records]) for key in ("input_ids", "labels")}
        if batch["input_ids"].shape != (len(records), self._length) or bool((batch["labels"] != batch["input_ids"]).any()):
            raise ValueError(f"a batch has padding, or not {self._length} tokens in each sequence: its speed would be wrong")
        self.lengths.append([self._length] * len(records))
        return batch


class PaddingCollator:
    """Pads documents on the right to the longest of their batch, as transformers' own collators do.

    Padding has the id 0, the label -100 and the attention mask 0.
    """

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []
        """Tokens of each document of each batch so far, padding not among them."""

    def __call__(self, records: list[Record]) -> Record:
        """A batch: ``input_ids``, ``attention_mask`` and ``labels``, each of shape (documents, tokens of the longest one)."""
        self.lengths.append([len(record["input_ids"]) for record in records])
        columns = {
            "input_ids": ([record["input_ids"] for record in records], 0),
            "attention_mask": ([torch.ones_like(record["input_ids"]) for record in records], 0),
            "labels": ([record["labels"] for record in records], -100),
        }
        return {
            name: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
            for name, (rows, padding) in columns.items()
        }
