"""Token records: text tokenised once, read from memory-mapped shards. `make_tokens` makes them.

A folder holds `manifest.json`, `vocab.txt` and shards. A shard is an array of records: the ids of a sequence,
uint16 or int32, and their CRC-32, so that a record that is not what was written is known when it is read.
Masking is drawn on every visit.
"""

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfbench.data import corpus, image_shards, pydoc, wordpiece
from tfbench.data.wordpiece import Lengths, Vocabulary
from tfbench.models.bert import VOCAB_SIZE

if TYPE_CHECKING:
    import tokenizers

FORMAT = 1
MANIFEST = "manifest.json"
VOCABULARY = "vocab.txt"
_KEYS = {  # of a manifest, and of its parts
    "settings": ("seq_length", "num_shards"),
    "vocabulary": ("size", "special_ids"),
    "shards": ("file", "sequences", "tokens", "bytes", "sha256"),
}


class TokensError(ValueError):
    """Token records that cannot be used; the message names the file and where in it."""


@dataclasses.dataclass
class Manifest:
    """What a folder of token records holds.

    Attributes:
        settings: what decides every shard, as it was asked for.
        vocabulary: of the ids.
        shards: of each finished one `file`, `sequences`, `tokens`, `bytes` and `sha256`, in order.
    """

    settings: dict[str, Any]
    vocabulary: Vocabulary
    shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def record(self) -> np.dtype[Any]:
        """One record of a shard."""
        ids = "<u2" if self.vocabulary.size <= 2**16 else "<i4"
        return np.dtype([("ids", ids, (self.settings["seq_length"],)), ("crc32", "<u4")])

    @property
    def lengths(self) -> Lengths:
        """Of the sequences of all finished shards."""
        sequences, tokens = (sum(shard[name] for shard in self.shards) for name in ("sequences", "tokens"))
        return Lengths(sequences, self.settings["seq_length"], tokens)

    def write(self, folder: Path) -> None:
        """Replaces the folder's manifest, whole or not at all."""
        complete = len(self.shards) == self.settings["num_shards"]
        lengths = self.lengths
        content = {
            "format": FORMAT,
            "complete": complete,
            "settings": self.settings,
            "vocabulary": dataclasses.asdict(self.vocabulary),
            "sequences": lengths.sequences,
            "mean_tokens": lengths.mean_tokens if lengths.sequences else None,
            "padding_share": lengths.padding_share if lengths.sequences else None,
            "shards": self.shards,
        }
        _write_whole(folder / MANIFEST, json.dumps(content, indent=2).encode())


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder of token records.

    Raises:
        TokensError: there is none, or it is none of this format.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        _require_keys(content, path)
        vocabulary = Vocabulary(content["vocabulary"]["size"], tuple(content["vocabulary"]["special_ids"]))
        return Manifest(content["settings"], vocabulary, content["shards"])
    except OSError as error:
        raise TokensError(f"{path} cannot be read ({error.strerror}); make token records there") from error
    except (TypeError, json.JSONDecodeError) as error:
        raise TokensError(f"{path} is no manifest of token records: {error}") from error


def _require_keys(content: Any, path: Path) -> None:
    """Raises TokensError where a manifest is one of images, or lacks what is read of it."""
    if not isinstance(content, dict):
        raise TokensError(f"{path} is no manifest of token records, it holds no object")
    if content.get("format") != FORMAT:
        raise TokensError(f"{path} has format {content.get('format')}, this tfbench reads {FORMAT}")
    if "recipe" in content:
        raise TokensError(f"{path} is no manifest of token records, it is one of images")
    for name, keys in _KEYS.items():
        if name not in content:
            raise TokensError(f"{path} is no manifest of token records: it has no {name!r}")
        parts = content[name] if isinstance(content[name], list) else [content[name]]
        lacking = [key for part in parts for key in keys if key not in part]
        if lacking:
            raise TokensError(f"{path}: {name!r} has no {lacking[0]!r}")


def make_tokens(
    sources: list[str], out: Path, seq_length: int, vocab: str | None, num_shards: int, seed: int, pack: bool
) -> None:
    """Tokenises text to a folder of shards; a call that was stopped goes on where it was.

    Args:
        sources: paths or globs of UTF-8 text files, documents between blank lines; or "pydoc" alone.
        out: folder, made where it is missing.
        seq_length: tokens of a sequence, special ones included.
        vocab: file as BERT's vocab.txt; None trains one of up to BERT's 30,522 tokens on the text.
        num_shards: files to make, at most one for each document.
        seed: of the order of the documents, which decides in which shard each is.
        pack: several documents may share a sequence, see `wordpiece.sequences`.

    Raises:
        ValueError: a setting cannot be, the text cannot be read, or `out` holds what was made otherwise.
    """
    from rich.progress import track

    if seq_length < 8 or num_shards < 1:
        raise ValueError(f"seq_length={seq_length}, num_shards={num_shards}: at least 8 and at least 1")
    documents, description = _open_sources(sources)
    if num_shards > len(documents):
        raise ValueError(f"num_shards={num_shards}: at most one for each of {len(documents)} documents")
    settings: dict[str, Any] = {
        "seq_length": seq_length,
        "num_shards": num_shards,
        "seed": seed,
        "pack": pack,
    }
    settings |= {"sources": description, "vocab_sha256": _sha256(Path(vocab)) if vocab else None}
    out.mkdir(parents=True, exist_ok=True)
    manifest, tokenizer = _begin(out, settings, vocab, documents)
    order = np.random.default_rng(seed).permutation(len(documents))
    for index in track(range(num_shards), "token shards"):
        if index < len(manifest.shards):
            continue
        texts = (documents[int(each)] for each in order[index::num_shards])
        encoded = wordpiece.encode(texts, tokenizer)
        rows = wordpiece.sequences(encoded, manifest.vocabulary, seq_length, pack=pack)
        manifest.shards.append(_write_shard(out / f"tokens-{index:05d}-of-{num_shards:05d}", rows, manifest))
        manifest.write(out)


def verify_tokens(folder: Path) -> list[str]:
    """Reads every shard and compares it with the manifest; returns what is wrong, nothing where all is well.

    Raises:
        TokensError: the manifest cannot be read.
    """
    manifest = read_manifest(folder)
    problems = []
    for path, shard in _shards(folder, manifest):
        try:
            records = _open_shard(path, shard, manifest)
            if _sha256(path) != shard["sha256"]:
                _require_sound(records, np.arange(len(records)), path)
                problems.append(f"{path}: its SHA-256 is not the manifest's")
        except TokensError as error:
            problems.append(f"{error}")
    missing = manifest.settings["num_shards"] - len(manifest.shards)
    return problems + ([f"{folder}: {missing} shard(s) not made yet"] if missing else [])


def _open_sources(sources: list[str]) -> tuple[Sequence[str], list[Any]]:
    """The documents, and what identifies them."""
    if sources == ["pydoc"]:
        texts = pydoc.documents()
        return texts, ["pydoc", hashlib.sha256("\n".join(texts).encode()).hexdigest()]
    files = corpus.files_of(sources)
    return corpus.Corpus(files), [[path, os.path.getsize(path)] for path in files]


def _begin(
    out: Path, settings: dict[str, Any], vocab: str | None, documents: Sequence[str]
) -> tuple[Manifest, "tokenizers.Tokenizer"]:
    """The manifest to go on with, and its tokenizer.

    Raises:
        ValueError: the folder holds records made with other settings.
    """
    if (out / MANIFEST).exists():
        manifest = read_manifest(out)
        other = image_shards.differences(manifest.settings, settings)
        if other:
            raise ValueError(
                f"{out} holds token records made with another {other}: "
                "choose another folder or remove this one"
            )
        return manifest, wordpiece.read_tokenizer(out / VOCABULARY)
    if vocab is None:
        tokenizer = wordpiece.train_tokenizer(corpus.training_texts(documents), VOCAB_SIZE)
    else:
        tokenizer = wordpiece.read_tokenizer(vocab)
    wordpiece.write_vocabulary(tokenizer, out / VOCABULARY)
    manifest = Manifest(settings, wordpiece.vocabulary_of(tokenizer))
    manifest.write(out)
    return manifest, tokenizer


def _write_shard(path: Path, rows: np.ndarray, manifest: Manifest) -> dict[str, Any]:
    """Writes the sequences int32 [N, S]; returns the manifest's entry."""
    records = np.empty(len(rows), manifest.record)
    records["ids"] = rows
    records["crc32"] = [zlib.crc32(ids.tobytes()) for ids in records["ids"]]
    _write_whole(path, records.tobytes())
    return {
        "file": path.name,
        "sequences": len(rows),
        "tokens": wordpiece.lengths_of(rows, manifest.vocabulary).tokens,
        "bytes": path.stat().st_size,
        "sha256": _sha256(path),
    }


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is either complete or not there."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shards(folder: Path, manifest: Manifest) -> list[tuple[Path, dict[str, Any]]]:
    return [(folder / shard["file"], shard) for shard in manifest.shards]


def _open_shard(path: Path, shard: dict[str, Any], manifest: Manifest) -> np.ndarray:
    """Maps a shard, or returns an empty array.

    Raises:
        TokensError: it is missing, or not as long as it was made.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TokensError(f"{path} cannot be read: {error.strerror}") from error
    if size != shard["bytes"]:
        what = f"is cut off at byte {size}" if size < shard["bytes"] else f"has {size} bytes"
        raise TokensError(f"{path} {what}: it was made with {shard['bytes']}")
    if not size:
        return np.empty(0, manifest.record)
    records: np.ndarray = np.memmap(path, manifest.record, mode="r")
    return records


def _require_sound(records: np.ndarray, indices: np.ndarray, path: Path) -> np.ndarray:
    """Reads records; returns their ids, int32 [N, S].

    Raises:
        TokensError: one is not what was written.
    """
    chosen = records[indices]
    for index, ids, expected in zip(indices, chosen["ids"], chosen["crc32"], strict=True):
        if zlib.crc32(ids.tobytes()) != expected:
            raise TokensError(
                f"{path} is damaged in the record at byte {index * records.itemsize}: its checksum differs"
            )
    rows: np.ndarray = chosen["ids"].astype(np.int32)
    return rows


class TokenReader:
    """Sequences of a folder of token records by their number, over all shards.

    Args:
        folder: made by `make_tokens`.

    Raises:
        TokensError: it is not complete, or a shard is not as long as it was made.
    """

    def __init__(self, folder: Path):
        self.manifest = read_manifest(folder)
        asked = self.manifest.settings["num_shards"]
        if len(self.manifest.shards) != asked:
            raise TokensError(
                f"{folder} is not complete: {len(self.manifest.shards)} of {asked} shards; "
                "give the command that made them again"
            )
        shards = _shards(folder, self.manifest)
        self._paths = [path for path, _ in shards]
        self._shards = [_open_shard(path, shard, self.manifest) for path, shard in shards]
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads sequences.

        Args:
            indices: int64 [N], each in [0, len).

        Returns:
            int32 [N, S].

        Raises:
            TokensError: a record is damaged; names its file and where it begins.
        """
        rows = np.empty([len(indices), self.manifest.settings["seq_length"]], np.int32)
        shard_of = np.searchsorted(self._starts, indices, side="right") - 1
        for shard in np.unique(shard_of):
            here = shard_of == shard
            inside = indices[here] - self._starts[shard]
            rows[here] = _require_sound(self._shards[shard], inside, self._paths[shard])
        return rows
