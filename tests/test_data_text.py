"""CPython's help as BERT's input: tokens against a WordPiece written out here, masks by counting."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from data_helpers import TEXT_MODEL, config_of, epoch, make

from tfbench.data import masking, pydoc, synthetic_batch
from tfbench.data.wordpiece import Vocabulary, encode, sequences, train_tokenizer, vocabulary_of

PAD, UNK, CLS, SEP, MASK = range(5)
PLACES = {32: 8, 128: 20}  # 15 % rounded up to a multiple of 4


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """All sequences of 128 tokens."""
    texts = pydoc.documents()
    tokenizer = train_tokenizer(texts, 3000)
    return sequences(encode(texts, tokenizer), vocabulary_of(tokenizer), 128)


@pytest.fixture(scope="module")
def visited(rows: np.ndarray) -> list[Any]:
    """One epoch, as samples without a batch axis."""
    batches = epoch(config_of("pydoc", seq_length=128), len(rows), 1, TEXT_MODEL)
    return [{name: value[0] for name, value in batch.items()} for batch in batches]


# --- synthetic


def test_synthetic_text() -> None:
    config = config_of("synthetic", image_size=None, seq_length=32, per_replica_batch_size=300)
    batch = {name: value.numpy() for name, value in synthetic_batch(config, TEXT_MODEL, seed=3).items()}
    assert {name: (value.shape, value.dtype) for name, value in batch.items()} == {
        "input_ids": ((300, 32), np.int32),
        "attention_mask": ((300, 32), np.int32),
        "masked_positions": ((300, 8), np.int32),
        "masked_ids": ((300, 8), np.int32),
        "masked_weights": ((300, 8), np.float32),
    }
    assert batch["attention_mask"].all()
    assert (batch["masked_weights"] == 1).all()
    assert (np.diff(batch["masked_positions"]) > 0).all(), "sorted and distinct"
    assert set(batch["masked_positions"].ravel()) == set(range(32))
    for name in ("input_ids", "masked_ids"):
        assert 0 <= batch[name].min() < 30
        assert 2970 < batch[name].max() < 3000
    again = synthetic_batch(config, TEXT_MODEL, seed=3)
    other = synthetic_batch(config, TEXT_MODEL, seed=4)
    np.testing.assert_array_equal(batch["input_ids"], again["input_ids"])
    assert (batch["input_ids"] != other["input_ids"].numpy()).mean() > 0.9


# --- vocabulary and sequences


def test_vocabulary_is_the_same_in_every_process() -> None:
    script = (
        "import json; from tfbench.data import pydoc, wordpiece\n"
        "train = lambda size: wordpiece.train_tokenizer(pydoc.documents(), size).get_vocab()\n"
        "print(json.dumps([train(300), train(8192)]))"
    )
    root = Path(__file__).parents[1]
    elsewhere = json.loads(subprocess.check_output([sys.executable, "-c", script], cwd=root, text=True))
    here = [train_tokenizer(pydoc.documents(), size).get_vocab() for size in (300, 8192)]
    assert here == elsewhere


@pytest.mark.parametrize("size", [pydoc.MIN_VOCAB_SIZE, 1000, pydoc.MAX_VOCAB_SIZE])
def test_vocabulary_keeps_to_its_size(size: int) -> None:
    vocabulary = train_tokenizer(pydoc.documents(), size).get_vocab()
    assert len(vocabulary) <= size
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert [vocabulary[token] for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == list(range(5))


def word_pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    """The longest piece that fits, again and again: the definition of WordPiece."""
    ids, rest = [], word
    while rest:
        prefix = "##" if ids else ""
        piece = next(rest[:end] for end in range(len(rest), 0, -1) if prefix + rest[:end] in vocabulary)
        ids.append(vocabulary[prefix + piece])
        rest = rest[len(piece) :]
    return ids


def test_sequences_hold_the_documents() -> None:
    texts = ["The tokenizer splits\tUNSEEN words, as\nit should: x+=1. " * 4, "Short ##ing text [SEP] end."]
    tokenizer = train_tokenizer([*pydoc.documents(), *texts], 1000)
    vocabulary = tokenizer.get_vocab()
    found = sequences(encode(texts, tokenizer), vocabulary_of(tokenizer), 32)
    expected = []
    for text in texts:
        spaced = "".join(c if c.isalnum() else f" {c} " for c in text.lower())
        ids = [i for word in spaced.split() for i in word_pieces(word, vocabulary)]
        for start in range(0, len(ids), 30):
            row = [CLS, *ids[start : start + 30], SEP]
            expected.append(row + [PAD] * (32 - len(row)))
    assert found.tolist() == expected
    assert found.dtype == np.int32


# --- masking


def test_every_sequence_once_per_epoch_with_its_own_targets(rows: np.ndarray, visited: list[Any]) -> None:
    restored = []
    for sample in visited:
        ids = sample["input_ids"].copy()
        used = sample["masked_weights"] == 1
        ids[sample["masked_positions"][used]] = sample["masked_ids"][used]
        restored.append(tuple(ids))
        np.testing.assert_array_equal(sample["attention_mask"], ids != PAD)
    assert Counter(restored) == Counter(map(tuple, rows))


def test_places_are_distinct_words_in_the_right_number(visited: list[Any]) -> None:
    full = 0
    for sample in visited:
        num_tokens = int(sample["attention_mask"].sum())
        num_words = num_tokens - 2
        used = int(sample["masked_weights"].sum())
        assert used == math.ceil(20 * num_words / 126)
        full += used == 20
        places = sample["masked_positions"][:used]
        assert (np.diff(places) > 0).all()
        assert places.min() > 0
        assert places.max() < num_tokens - 1, "[CLS], [SEP] and padding are never predicted"
        assert sample["masked_ids"][:used].min() > MASK
        for name in ("masked_weights", "masked_positions", "masked_ids"):
            assert (sample[name][used:] == 0).all()
    assert full > 0.8 * len(visited)


def test_shares_of_mask_random_and_kept(visited: list[Any]) -> None:
    shown, target = [], []
    for sample in visited:
        used = sample["masked_weights"] == 1
        shown.append(sample["input_ids"][sample["masked_positions"][used]])
        target.append(sample["masked_ids"][used])
    shown, target = np.concatenate(shown), np.concatenate(target)
    num = len(shown)
    assert num > 15_000
    share = {"mask": (shown == MASK).mean(), "kept": (shown == target).mean()}
    share["random"] = 1 - share["mask"] - share["kept"]
    for name, expected in {"mask": 0.8, "random": 0.1, "kept": 0.1}.items():
        assert abs(share[name] - expected) < 5 * math.sqrt(expected * (1 - expected) / num), name
    replaced = shown[(shown != MASK) & (shown != target)]
    assert replaced.min() > MASK, "no special token is drawn"
    assert replaced.max() < 3000
    # Evenly from the vocabulary: the mean is 1502 ± 866 / sqrt(n).
    assert abs(replaced.mean() - 1502) < 5 * 866 / math.sqrt(len(replaced))


def test_places_are_spread_evenly(rows: np.ndarray, visited: list[Any]) -> None:
    positions = np.concatenate([s["masked_positions"][s["masked_weights"] == 1] for s in visited])
    halves = np.histogram(positions[positions <= 126], bins=[1, 64, 127])[0]
    # Padded rows have fewer words in the second half.
    words = (rows > MASK).sum(axis=0)
    expected = words[1:64].sum() / words[1:127].sum()
    assert abs(halves[0] / halves.sum() - expected) < 5 * math.sqrt(0.25 / halves.sum())


def test_short_sequence_uses_its_share_of_places() -> None:
    ids = tf.constant([[CLS, 10, 11, 12, 13, SEP] + [PAD] * 26])
    uniform = tf.random.stateless_uniform([1, 32 + 2 * 8], [0, 1])
    batch = masking.mask(ids, uniform, places=8, vocabulary=Vocabulary(3000, tuple(range(5))))
    sample = {name: value[0] for name, value in batch.items()}
    # 4 of 30 words of a full sequence: 8 · 4 / 30 = 1.07, rounded up.
    np.testing.assert_array_equal(sample["masked_weights"], [1, 1, 0, 0, 0, 0, 0, 0])
    assert sample["input_ids"][0] == CLS


def test_same_seed_same_masks_whatever_the_shards() -> None:
    def read(count: int, seed: int) -> list[list[int]]:
        batches = epoch(config_of("pydoc", seed=seed), 40, count, TEXT_MODEL)
        return [batch["input_ids"][0].tolist() for batch in batches]

    assert read(1, 0) == read(2, 0) == read(4, 0)
    assert read(1, 0) != read(1, 1)


def test_two_epochs_are_masked_differently(rows: np.ndarray) -> None:
    config = config_of("pydoc", seq_length=128)
    batches = list(make(config, TEXT_MODEL).take(2 * len(rows)).as_numpy_iterator())
    places: dict[tuple[int, ...], list[Any]] = {}
    for batch in batches:
        ids = batch["input_ids"][0].copy()
        used = batch["masked_weights"][0] == 1
        ids[batch["masked_positions"][0][used]] = batch["masked_ids"][0][used]
        places.setdefault(tuple(ids), []).append(batch["masked_positions"][0].tolist())
    full = [visits for ids, visits in places.items() if len(visits) == 2 and PAD not in ids]
    assert len(full) > 700
    assert all(first != second for first, second in full)


@pytest.mark.parametrize(("seq_length", "places"), PLACES.items())
def test_batches_are_static(seq_length: int, places: int) -> None:
    config = config_of("pydoc", seq_length=seq_length, per_replica_batch_size=4)
    assert make(config, TEXT_MODEL).element_spec == {
        "input_ids": tf.TensorSpec([4, seq_length], tf.int32),
        "attention_mask": tf.TensorSpec([4, seq_length], tf.int32),
        "masked_positions": tf.TensorSpec([4, places], tf.int32),
        "masked_ids": tf.TensorSpec([4, places], tf.int32),
        "masked_weights": tf.TensorSpec([4, places], tf.float32),
    }
