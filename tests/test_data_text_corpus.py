"""Plain text to sequences and token records, against readers written out here. Without TensorFlow."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tfbench.data import corpus, tokens, wordpiece

VOCABULARY = wordpiece.Vocabulary(100, (0, 1, 2, 3, 4))
BERT_LIKE = ["[PAD]", "[unused0]", "the", "cat", "##s", "sat", ".", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def words_of(*counts: int) -> str:
    """Documents of so many words, all different."""
    number = iter(range(10_000))
    return "\n\n".join(" ".join(f"word{next(number)}" for _ in range(count)) for count in counts)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Twelve documents in two files."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text(words_of(3, 50, 8, 1, 20, 33, 5))
    (folder / "b.txt").write_text(words_of(7, 2, 90, 11, 4))
    return folder


def make(out: Path, text: Path, **choices: object) -> tokens.Manifest:
    settings = dict(seq_length=16, vocab=None, num_shards=3, seed=0, pack=False) | choices
    tokens.make_tokens([f"{text}/*.txt"], out, **settings)  # type: ignore[arg-type]
    return tokens.read_manifest(out)


def all_rows(out: Path) -> np.ndarray:
    reader = tokens.TokenReader(out)
    return reader.read(np.arange(len(reader)))


# --- documents


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        (b"one\ntwo\n\nthree", ["one two", "three"]),
        (b"\n\n\none\n\n\n\n two\n", ["one", "two"]),
        (b"one\r\n\r\ntwo\r\n", ["one", "two"]),
        (b"one\n \t\ntwo", ["one", "two"]),
        (b"\xef\xbb\xbfone", ["one"]),
        ("ä\n\n漢字".encode(), ["ä", "漢字"]),
        (b"last line\n\n", ["last line"]),
    ],
)
def test_documents_lie_between_blank_lines(tmp_path: Path, content: bytes, documents: list[str]) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "some.txt").write_bytes(content)
    found = corpus.Corpus(corpus.files_of([f"{tmp_path}/*.txt"]))
    assert [" ".join(document.split()) for document in found] == documents


def test_files_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(" \n\n\t\n")
    with pytest.raises(ValueError, match="without any text"):
        corpus.Corpus([str(tmp_path / "a")])
    with pytest.raises(ValueError, match=r"nothing-\* matches no file"):
        corpus.files_of([f"{tmp_path}/nothing-*"])


def test_what_is_no_utf8_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"good\n\nba\xffd")
    with pytest.raises(ValueError, match="a is not UTF-8 at byte 8"):
        corpus.Corpus([str(tmp_path / "a")])[1]


# --- sequences


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize(
    ("pack", "rows"),
    [
        (
            False,
            [
                [2, 10, 11, 12, 13, 14, 15, 3],
                [2, 16, 3, 0, 0, 0, 0, 0],
                [2, 20, 21, 3, 0, 0, 0, 0],
                [2, 30, 31, 32, 3, 0, 0, 0],
            ],
        ),
        (True, [[2, 10, 11, 12, 13, 14, 15, 3], [2, 16, 3, 20, 21, 3, 30, 3], [2, 31, 32, 3, 0, 0, 0, 0]]),
    ],
)
def test_sequences_with_and_without_packing(pack: bool, rows: list[list[int]]) -> None:
    documents = [ids(*range(10, 17)), ids(), ids(20, 21), ids(30, 31, 32)]
    found = wordpiece.sequences(documents, VOCABULARY, 8, pack=pack)
    assert found.tolist() == rows
    assert found.dtype == np.int32


@pytest.mark.parametrize("pack", [False, True])
def test_no_document_no_sequence(pack: bool) -> None:
    assert wordpiece.sequences([ids(), ids()], VOCABULARY, 8, pack=pack).shape == (0, 8)


def test_lengths() -> None:
    rows = wordpiece.sequences([ids(*range(10, 17)), ids(20, 21)], VOCABULARY, 8)
    lengths = wordpiece.lengths_of(rows, VOCABULARY)
    # 8 + 3 + 4 tokens in 3 sequences of 8.
    assert (lengths.sequences, lengths.tokens, lengths.mean_tokens) == (3, 15, 5.0)
    assert lengths.padding_share == pytest.approx(9 / 24)
    assert f"{lengths}" == "3 sequences of 8, on average 5.0 tokens, 37.5% padding"


# --- vocabularies


def test_vocabulary_file_is_berts(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(BERT_LIKE) + "\n")
    tokenizer = wordpiece.read_tokenizer(path)
    assert wordpiece.vocabulary_of(tokenizer) == wordpiece.Vocabulary(11, (0, 7, 8, 9, 10))
    # Lower-case, accents off, as the published uncased models; "dog" is not in the vocabulary.
    assert [row.tolist() for row in wordpiece.encode(["The Càts sat. dog"], tokenizer)] == [
        [2, 3, 4, 5, 6, 7]
    ]
    published = tokenizers.BertWordPieceTokenizer(str(path), lowercase=True)
    assert published.encode("The Càts sat. dog", add_special_tokens=False).ids == [2, 3, 4, 5, 6, 7]
    path.write_text("\n".join([*BERT_LIKE, "The"]))
    assert next(wordpiece.encode(["The the"], wordpiece.read_tokenizer(path))).tolist() == [11, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\n", r"has no \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"),
        ("\n".join([*BERT_LIKE, "cat"]).encode(), "has 'cat' twice"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_other_vocabulary_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        wordpiece.read_tokenizer(tmp_path / "vocab.txt")


def test_written_vocabulary_is_read_back(tmp_path: Path) -> None:
    tokenizer = wordpiece.train_tokenizer([words_of(300), "Übergrößen, naïve 漢字 — x²"], 400)
    wordpiece.write_vocabulary(tokenizer, tmp_path / "vocab.txt")
    assert wordpiece.read_tokenizer(tmp_path / "vocab.txt").get_vocab() == tokenizer.get_vocab()


def test_rare_characters_are_left_out() -> None:
    many = "".join(chr(0x4E00 + number) for number in range(50))  # Chinese characters are words
    tokenizer = wordpiece.train_tokenizer([many, "abab " * 9], 200, max_characters=3)
    known = {token for token in tokenizer.get_vocab() if token not in wordpiece.SPECIAL_TOKENS}
    assert {token for token in known if len(token.removeprefix("##")) == 1} == {"a", "b", "一", "##a", "##b"}


# --- token records


def test_records_hold_the_documents(tmp_path: Path, text: Path) -> None:
    manifest = make(tmp_path / "out", text)
    tokenizer = tokenizers.BertWordPieceTokenizer(str(tmp_path / "out" / "vocab.txt"), lowercase=True)
    expected: Counter[tuple[int, ...]] = Counter()
    for name in ("a.txt", "b.txt"):
        for document in (text / name).read_text().split("\n\n"):
            found = tokenizer.encode(document, add_special_tokens=False).ids
            for start in range(0, len(found), 14):
                row = [2, *found[start : start + 14], 3]
                expected[tuple(row + [0] * (16 - len(row)))] += 1
    rows = all_rows(tmp_path / "out")
    assert Counter(map(tuple, rows.tolist())) == expected
    assert rows.dtype == np.int32
    assert manifest.record["ids"].base == np.uint16
    # And by hand: 16 ids of 2 bytes and a checksum of 4.
    raw = b"".join((tmp_path / "out" / shard["file"]).read_bytes() for shard in manifest.shards)
    assert np.frombuffer(raw, np.uint8).reshape(-1, 36)[:, :32].tobytes() == rows.astype("<u2").tobytes()


def test_manifest_says_what_is_there(tmp_path: Path, text: Path) -> None:
    manifest = make(tmp_path / "out", text)
    rows = all_rows(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert content["complete"] is True
    assert content["sequences"] == len(rows) == sum(shard["sequences"] for shard in content["shards"])
    assert content["mean_tokens"] == pytest.approx((rows != 0).sum(axis=1).mean())
    assert content["padding_share"] == pytest.approx((rows == 0).mean())
    for shard in manifest.shards:
        raw = (tmp_path / "out" / shard["file"]).read_bytes()
        assert hashlib.sha256(raw).hexdigest() == shard["sha256"]
    assert tokens.verify_tokens(tmp_path / "out") == []


def test_packing_fills_sequences(tmp_path: Path, text: Path) -> None:
    make(tmp_path / "packed", text, pack=True, num_shards=1)
    make(tmp_path / "plain", text, num_shards=1)
    packed, plain = all_rows(tmp_path / "packed"), all_rows(tmp_path / "plain")
    assert (packed[:-1] != 0).all()
    assert len(packed) < len(plain)
    for kept in (packed, plain):
        assert Counter(kept[kept > 4].tolist()) == Counter(plain[plain > 4].tolist())


def test_seed_decides_the_order_and_nothing_else_does(tmp_path: Path, text: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make(tmp_path / name, text, seed=seed)
    first, again, other = (all_rows(tmp_path / name).tolist() for name in "abc")
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)


def test_stopped_making_goes_on(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "whole", text)
    out = tmp_path / "stopped"
    written, write_shard = [], tokens._write_shard

    def write_and_stop(path: Path, *rest: object) -> object:
        if len(written) == 2:
            path.with_name(f"{path.name}.partial").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path)
        return write_shard(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tokens, "_write_shard", write_and_stop)
    with pytest.raises(KeyboardInterrupt):
        make(out, text)
    with pytest.raises(tokens.TokensError, match="not complete: 2 of 3 shards"):
        tokens.TokenReader(out)
    assert tokens.verify_tokens(out) == [f"{out}: 1 shard(s) not made yet"]

    monkeypatch.setattr(tokens, "_write_shard", write_shard)
    before = {path: path.stat().st_mtime_ns for path in written}
    make(out, text)
    assert {path: path.stat().st_mtime_ns for path in written} == before, "finished shards are kept"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()
    }


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"seq_length": 24}, r"made with another seq_length \(\d+ there\): choose"),
        ({"seed": 5, "pack": True}, r"made with another seed \(\d there\), pack \(False there\)"),
        ({"num_shards": 13}, "num_shards=13: at most one for each of 12 documents"),
        ({"seq_length": 7}, "seq_length=7"),
        ({"num_shards": 0}, "num_shards=0"),
    ],
)
def test_making_refuses(tmp_path: Path, text: Path, choices: dict[str, object], message: str) -> None:
    make(tmp_path / "out", text)
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "out", text, **choices)


def test_changed_text_is_not_mixed_with_what_is_there(tmp_path: Path, text: Path) -> None:
    make(tmp_path / "out", text)
    (text / "b.txt").write_text("another text")
    with pytest.raises(ValueError, match="made with another sources"):
        make(tmp_path / "out", text)


def test_large_vocabularies_take_four_bytes(tmp_path: Path, text: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    tail = [f"word{number}" for number in range(100)]
    vocab.write_text("\n".join([*wordpiece.SPECIAL_TOKENS, *(f"filler{n}" for n in range(70_000)), *tail]))
    manifest = make(tmp_path / "out", text, vocab=str(vocab))
    assert manifest.record["ids"].base == np.int32
    assert all_rows(tmp_path / "out").max() >= 70_000


# --- damage


@pytest.mark.parametrize("byte", [0, 35, 36 * 2 + 7])
def test_flipped_bit_is_named(tmp_path: Path, text: Path, byte: int) -> None:
    out = tmp_path / "out"
    manifest = make(out, text)
    path = out / manifest.shards[1]["file"]
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
    record = byte // 36
    message = f"{path} is damaged in the record at byte {36 * record}"
    assert [problem.startswith(message) for problem in tokens.verify_tokens(out)] == [True]
    reader = tokens.TokenReader(out)
    first = manifest.shards[0]["sequences"]
    with pytest.raises(tokens.TokensError, match=message):
        reader.read(np.array([0, first + record]))
    assert len(reader.read(np.array([0, first + record + 1]))) == 2, "the others can be read"


def test_cut_off_shard_is_named(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    manifest = make(out, text)
    path = out / manifest.shards[2]["file"]
    path.write_bytes(path.read_bytes()[:40])
    message = f"{path} is cut off at byte 40: it was made with {manifest.shards[2]['bytes']}"
    with pytest.raises(tokens.TokensError, match=message):
        tokens.TokenReader(out)
    assert tokens.verify_tokens(out) == [message]
    path.unlink()
    with pytest.raises(tokens.TokensError, match=f"{path} cannot be read: No such file"):
        tokens.TokenReader(out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no manifest"),
        ("[]", "is no manifest"),
        ('{"format": 9}', "has format 9"),
        (
            '{"format": 1, "recipe": {"kind": "images"}}',
            "is no manifest of token records, it is one of images",
        ),
        ('{"format": 1, "settings": {"seq_length": 8}}', "manifest.json: 'settings' has no 'num_shards'"),
        ('{"format": 1, "settings": {"seq_length": 8, "num_shards": 1}}', "it has no 'vocabulary'"),
        (
            '{"format": 1, "settings": {"seq_length": 8, "num_shards": 1}, "vocabulary": '
            '{"size": 9, "special_ids": []}, "shards": [{"file": "x"}]}',
            "manifest.json: 'shards' has no 'sequences'",
        ),
        (None, "make token"),
    ],
)
def test_folder_without_a_manifest(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(tokens.TokensError, match=message):
        tokens.TokenReader(tmp_path)
