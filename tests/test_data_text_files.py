"""--data=text:GLOB and tokens:PATH as the training reads them, against the sequences they must hold."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from data_helpers import IMAGE_MODEL, TEXT_MODEL, check, config_of, epoch, make

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.data import InputLog, Shard, pydoc, tokens
from tfbench.data.text import require_text_files
from tfbench.data.wordpiece import Vocabulary

VOCAB = ["[PAD]", *(f"[unused{n}]" for n in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # BERT's ids
WORDS = [f"w{number}" for number in range(200)]
PAD, CLS, SEP, MASK = 0, 101, 102, 103


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of documents of 1 to 60 words, a vocabulary as BERT's, and token records of them."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "vocab.txt").write_text("\n".join([*VOCAB, *WORDS]))
    random = np.random.default_rng(3)
    for name in "ab":
        documents = [" ".join(random.choice(WORDS, random.integers(1, 61))) for _ in range(30)]
        (folder / f"{name}.txt").write_text("\n\n".join(documents))
    for pack in (False, True):
        tokens.make_tokens(
            [f"{folder}/?.txt"], folder / f"pack={pack}", 32, str(folder / "vocab.txt"), 3, 0, pack
        )
    return folder


def sequences_of(folder: Path, pack: bool) -> Counter[tuple[int, ...]]:
    """What the text must become, read by hand; packing joins the documents in their order."""
    documents = []
    for name in "ab":
        for document in (folder / f"{name}.txt").read_text().split("\n\n"):
            documents.append([len(VOCAB) + int(word[1:]) for word in document.split()])
    if pack:
        joined: list[int] = []
        for document in documents:  # a sequence that ends with its document ends in [SEP] anyway
            joined += [SEP, *document] if len(joined) % 30 else document
        documents = [joined]
    rows: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        for start in range(0, len(document), 30):
            row = [CLS, *document[start : start + 30], SEP]
            rows[tuple(row + [PAD] * (32 - len(row)))] += 1
    return rows


def restored(samples: list[Any]) -> Counter[tuple[int, ...]]:
    """The sequences before their masking."""
    rows: Counter[tuple[int, ...]] = Counter()
    for batch in samples:
        ids = batch["input_ids"][0].copy()
        used = batch["masked_weights"][0] == 1
        ids[batch["masked_positions"][0][used]] = batch["masked_ids"][0][used]
        rows[tuple(ids.tolist())] += 1
    return rows


def config(folder: Path, kind: str, pack: bool = False, **choices: Any) -> BenchmarkConfig:
    if kind == "tokens":
        return config_of(f"tokens:{folder}/pack={pack}", **choices)
    return config_of(f"text:{folder}/?.txt", vocab=str(folder / "vocab.txt"), pack=pack, **choices)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_one_epoch_visits_every_sequence_once(folder: Path, kind: str, count: int) -> None:
    expected = sequences_of(folder, pack=False)
    samples = epoch(config(folder, kind), expected.total(), count, TEXT_MODEL)
    assert restored(samples) == expected


def test_packed_text_in_the_order_of_its_documents(folder: Path) -> None:
    expected = sequences_of(folder, pack=True)
    assert restored(epoch(config(folder, "text", pack=True), expected.total(), 2, TEXT_MODEL)) == expected


def test_packed_records(folder: Path) -> None:
    reader = tokens.TokenReader(folder / "pack=True")
    expected = Counter(map(tuple, reader.read(np.arange(len(reader))).tolist()))
    assert restored(epoch(config(folder, "tokens", pack=True), len(reader), 2, TEXT_MODEL)) == expected
    words = Counter(token for row in expected.elements() for token in row if token > MASK)
    plain = sequences_of(folder, pack=False)
    assert words == Counter(token for row in plain.elements() for token in row if token > MASK)


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_same_seed_same_masks_whatever_the_shards(folder: Path, kind: str) -> None:
    def read(count: int, seed: int) -> list[list[int]]:
        samples = epoch(config(folder, kind, seed=seed), 100, count, TEXT_MODEL)
        return [batch["input_ids"][0].tolist() for batch in samples]

    assert read(1, 0) == read(2, 0)
    assert read(1, 0) != read(1, 1)


def test_special_tokens_anywhere_in_the_vocabulary(folder: Path) -> None:
    """Neither predicted nor drawn; the shares of 80, 10 and 10 % within five standard deviations."""
    batches = make(config(folder, "tokens", pack=True, per_replica_batch_size=64), TEXT_MODEL).take(200)
    shown, target = [], []
    for batch in batches.as_numpy_iterator():
        used = batch["masked_weights"] == 1
        shown.append(np.take_along_axis(batch["input_ids"], batch["masked_positions"], axis=1)[used])
        target.append(batch["masked_ids"][used])
        np.testing.assert_array_equal(batch["attention_mask"], batch["input_ids"] != PAD)
    shown, target = np.concatenate(shown), np.concatenate(target)
    assert target.min() > MASK
    masked = shown == MASK
    kept = shown == target
    for share, found in ((0.8, masked.mean()), (0.1, kept.mean()), (0.1, 1 - masked.mean() - kept.mean())):
        # A token drawn at random is the original one in 1 of 299 cases, far below the tolerance.
        assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / len(shown))
    drawn = shown[~masked & ~kept]
    assert not set(drawn) & {PAD, 100, CLS, SEP, MASK}
    assert set(drawn) == set(range(304)) - {PAD, 100, CLS, SEP, MASK}, "all others are drawn"


def test_notes_say_how_full_the_sequences_are(folder: Path) -> None:
    expected = sequences_of(folder, pack=False)
    mean = sum(token != PAD for row in expected.elements() for token in row) / expected.total()
    for kind in ("text", "tokens"):
        shard = Shard(0, 1, InputLog())
        make(config(folder, kind), TEXT_MODEL, shard)
        (note,) = shard.log.notes
        figures = (
            f"{expected.total()} sequences of 32, on average {mean:.1f} tokens, {1 - mean / 32:.1%} padding"
        )
        assert figures in note
        assert "304 tokens in the vocabulary" in note
        assert "not packed" in note


def test_text_trains_its_own_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(pydoc.documents()[:20]))
    (batch,) = make(config_of(f"text:{tmp_path}/*.txt"), TEXT_MODEL).take(1).as_numpy_iterator()
    assert batch["input_ids"][0, 0] == 2


def test_damaged_record_ends_the_reading_with_its_place(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "records"
    tokens.make_tokens([f"{folder}/?.txt"], out, 32, str(folder / "vocab.txt"), 1, 0, False)
    path = out / "tokens-00000-of-00001"
    content = bytearray(path.read_bytes())
    content[68 * 5 + 3] ^= 16  # 32 ids of 2 bytes and a checksum of 4
    path.write_bytes(content)
    data = make(config_of(f"tokens:{out}"), TEXT_MODEL)
    with pytest.raises(tf.errors.OpError, match=f"{path} is damaged in the record at byte 340"):
        list(data.take(tokens.read_manifest(out).lengths.sequences).as_numpy_iterator())


def refusal(config: BenchmarkConfig, spec: Any = TEXT_MODEL) -> str:
    with pytest.raises(ConfigError) as refused:
        check(config, spec)
    return str(refused.value)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    check(config(folder, "text"), TEXT_MODEL)
    check(config(folder, "tokens"), TEXT_MODEL)
    assert "matches no file" in refusal(config_of(f"text:{tmp_path}/*"))
    assert "reads images" in refusal(config(folder, "tokens"), IMAGE_MODEL)
    assert "--seq_length=16: --seq_length=32" in refusal(config(folder, "tokens", seq_length=16))
    assert "make token records there" in refusal(config_of(f"tokens:{tmp_path}"))
    small = Vocabulary(200, ()).size
    spec = type(TEXT_MODEL)(**{**vars(TEXT_MODEL), "vocab_size": small})
    assert "has a vocabulary of 304 tokens, text_model knows only 200" in refusal(
        config(folder, "tokens"), spec
    )
    assert "--vocab=" in refusal(config(folder, "text"), spec)
    assert "give a smaller one with --vocab" in refusal(config_of(f"text:{folder}/?.txt"), spec)
    missing = config_of(f"text:{folder}/?.txt", vocab=f"{tmp_path}/none")
    assert f"--vocab={tmp_path}/none" in refusal(missing)


def test_a_vocabulary_without_a_word_of_the_text_is_refused(folder: Path, tmp_path: Path) -> None:
    """Every word would be [UNK], and nothing would be predicted."""
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*VOCAB, "other", "words"]))
    with pytest.raises(
        ConfigError, match=rf"--vocab={vocab}: has of 60 document\(s\) no token of --data=text:"
    ):
        make(config_of(f"text:{folder}/?.txt", vocab=str(vocab)), TEXT_MODEL)


@pytest.mark.parametrize(("flag", "value"), [("vocab", "v.txt"), ("pack", True)])
def test_choices_of_plain_text_go_with_nothing_else(flag: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{flag}=.* goes with --data=text:GLOB, not with --data=pydoc"):
        require_text_files(config_of("pydoc", **{flag: value}))
    require_text_files(config_of("text:x", **{flag: value}))
