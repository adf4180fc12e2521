"""Documents of plain text files. TensorFlow-free."""

import glob
import itertools
import mmap
import os
import re
from collections.abc import Sequence
from typing import overload

import numpy as np

# A vocabulary is trained on this much of a corpus, drawn from all of it: more changes rare pieces only.
TRAINING_BYTES = 16 * 2**20
_BLANK_LINES = re.compile(rb"\n[ \t\r]*(?=\n)")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def files_of(patterns: Sequence[str]) -> list[str]:
    """Absolute paths of the files that paths or globs name, sorted, each once.

    Raises:
        ValueError: a pattern matches no file.
    """
    found: set[str] = set()
    for pattern in patterns:
        paths = glob.glob(os.path.abspath(os.path.expanduser(pattern)), recursive=True)
        files = [path for path in paths if os.path.isfile(path)]
        if not files:
            raise ValueError(f"{pattern} matches no file; expected a path or a glob of UTF-8 text files")
        found.update(files)
    return sorted(found)


class Corpus(Sequence[str]):
    """The documents of UTF-8 text files: what stands between blank lines, the layout of BERT's input.

    Only where the documents begin and end is kept in memory.

    Args:
        files: paths.

    Raises:
        ValueError: there is no document in any of them.
        OSError: one cannot be read.
    """

    def __init__(self, files: Sequence[str]):
        self.files = list(files)
        spans = [_spans(path) for path in self.files]
        self._file = np.repeat(np.arange(len(spans)), [len(each) for each in spans])
        self._span = np.concatenate(spans)
        if not len(self._span):
            raise ValueError(f"{len(self.files)} file(s), the first is {self.files[0]}, without any text")

    def __len__(self) -> int:
        return len(self._span)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Raises: ValueError: a document is not UTF-8; names its file and the offset in it."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        path, (start, end) = self.files[self._file[index]], self._span[index]
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read(end - start)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 at byte {start + error.start}: {error.reason}") from error


def training_texts(documents: Sequence[str]) -> list[str]:
    """Documents to train a vocabulary on: all, or TRAINING_BYTES of them drawn from all; always the same."""
    chosen, size = [], 0
    for index in np.random.default_rng(0).permutation(len(documents)):
        chosen.append(documents[int(index)])
        size += len(chosen[-1].encode())
        if size >= TRAINING_BYTES:
            break
    return chosen


def _spans(path: str) -> np.ndarray:
    """Offsets at which the documents of a file begin and end, int64 [documents, 2]."""
    if not os.path.getsize(path):
        return np.empty([0, 2], np.int64)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        first = len(_BYTE_ORDER_MARK) if content[: len(_BYTE_ORDER_MARK)] == _BYTE_ORDER_MARK else 0
        breaks = [match.end() for match in _BLANK_LINES.finditer(content)]
        edges = [first, *breaks, len(content)]
        spans = [
            (start, end)
            for start, end in itertools.pairwise(edges)
            if not content[start:end].isspace() and start < end
        ]
    return np.array(spans, np.int64).reshape(-1, 2)
