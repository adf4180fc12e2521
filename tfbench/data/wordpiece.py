"""Text → WordPiece tokens → sequences of one length, for every data set of text. TensorFlow-free."""

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

# In BERT's order; a vocabulary trained here starts with them.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Characters that a trained vocabulary knows; rarer ones become [UNK]. The figure of tokenizers'
# BertWordPieceTokenizer.
MAX_CHARACTERS = 1000
ENCODED_AT_ONCE = 256  # documents; the tokenizer's threads share them


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What masking needs to know of a vocabulary.

    Attributes:
        size: number of tokens; ids are 0 to size − 1.
        special_ids: of SPECIAL_TOKENS, in their order.
    """

    size: int
    special_ids: tuple[int, ...]

    @property
    def pad_id(self) -> int:
        """Of [PAD]."""
        return self.special_ids[0]

    @property
    def cls_id(self) -> int:
        """Of [CLS], which starts a sequence."""
        return self.special_ids[2]

    @property
    def sep_id(self) -> int:
        """Of [SEP], which ends a sequence and separates packed documents."""
        return self.special_ids[3]

    @property
    def mask_id(self) -> int:
        """Of [MASK], which hides a token."""
        return self.special_ids[4]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How full sequences are.

    Attributes:
        sequences: number of sequences.
        seq_length: places of each.
        tokens: of all sequences together, special ones included, padding not.
    """

    sequences: int
    seq_length: int
    tokens: int

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sequence."""
        return self.tokens / self.sequences

    @property
    def padding_share(self) -> float:
        """Share of all places that hold no token."""
        return 1 - self.mean_tokens / self.seq_length

    def __str__(self) -> str:
        return (
            f"{self.sequences:,} sequences of {self.seq_length}, on average {self.mean_tokens:.1f} tokens, "
            f"{self.padding_share:.1%} padding"
        )


def lengths_of(rows: "np.ndarray", vocabulary: Vocabulary) -> Lengths:
    """Counts the tokens of integer [N, S] sequences."""
    import numpy as np

    sequences, seq_length = rows.shape
    return Lengths(sequences, seq_length, int(np.count_nonzero(rows != vocabulary.pad_id)))


def train_tokenizer(
    texts: list[str], vocab_size: int, max_characters: int = MAX_CHARACTERS
) -> "tokenizers.Tokenizer":
    """Trains a lower-case WordPiece vocabulary; equal texts give equal vocabularies.

    Args:
        texts: documents.
        vocab_size: upper bound, at least 5 + 2 × the different characters; texts may support fewer tokens.
        max_characters: the most frequent ones are known.
    """
    from tokenizers import models, trainers

    tokenizer = _tokenizer(models.WordPiece(unk_token="[UNK]"), lowercase=True)
    alphabet, within_words = _characters(tokenizer, texts, max_characters)
    # The trainer numbers the pieces "##x" in the order of a hash map and breaks ties by number, so that every
    # training would end differently. Special tokens come first, in the order given.
    pieces = [f"##{character}" for character in within_words]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *pieces],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A tokenizer of its own, for which the pieces are not special.
    return _tokenizer(models.WordPiece(tokenizer.get_vocab(), unk_token="[UNK]"), lowercase=True)


def read_tokenizer(path: str | os.PathLike[str]) -> "tokenizers.Tokenizer":
    """Reads a vocabulary in the layout of BERT's vocab.txt: a token a line, numbered from 0.

    A vocabulary without capital letters makes a lower-case tokenizer, as in bert-base-uncased.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    from tokenizers import models

    try:
        tokens = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; expected BERT's vocab.txt, a token a line")
    twice = [token for token, count in Counter(tokens).items() if count > 1]
    if twice:
        raise ValueError(f"{path} has {twice[0]!r} twice: the ids of tokens are the lines they stand on")
    lowercase = all(token == token.lower() for token in tokens if not token.startswith("["))
    numbers = {token: number for number, token in enumerate(tokens)}
    return _tokenizer(models.WordPiece(numbers, unk_token="[UNK]"), lowercase)


def write_vocabulary(tokenizer: "tokenizers.Tokenizer", path: str | os.PathLike[str]) -> None:
    """Writes the vocabulary as `read_tokenizer` reads it."""
    numbers = tokenizer.get_vocab()
    lines = (f"{token}\n" for token in sorted(numbers, key=lambda token: numbers[token]))
    Path(path).write_text("".join(lines), encoding="utf-8")


def vocabulary_of(tokenizer: "tokenizers.Tokenizer") -> Vocabulary:
    """The size of a tokenizer's vocabulary and its special tokens."""
    numbers = tokenizer.get_vocab()
    special_ids = tuple(numbers[token] for token in SPECIAL_TOKENS)
    return Vocabulary(len(numbers), special_ids)


def _tokenizer(model: "tokenizers.models.WordPiece", lowercase: bool) -> "tokenizers.Tokenizer":
    import tokenizers

    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _characters(
    tokenizer: "tokenizers.Tokenizer", texts: list[str], max_characters: int
) -> tuple[list[str], list[str]]:
    """The most frequent characters, and those of them that follow another one in a word, both sorted."""
    words = Counter(
        word
        for text in texts
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
    )
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    alphabet = sorted(sorted(counts, key=lambda each: (-counts[each], each))[:max_characters])
    within_words = {character for word in words for character in word[1:]}
    return alphabet, [character for character in alphabet if character in within_words]


def encode(texts: Iterable[str], tokenizer: "tokenizers.Tokenizer") -> Iterator["np.ndarray"]:
    """Token ids of each document, int32 [tokens], without special tokens."""
    import numpy as np

    texts = iter(texts)
    while some := list(itertools.islice(texts, ENCODED_AT_ONCE)):
        for encoding in tokenizer.encode_batch_fast(some):
            yield np.array(encoding.ids, np.int32)


def sequences(
    documents: Iterable["np.ndarray"], vocabulary: Vocabulary, seq_length: int, *, pack: bool = False
) -> "np.ndarray":
    """Cuts documents to sequences, each [CLS], up to seq_length − 2 tokens, [SEP], padding.

    Args:
        documents: token ids of each; empty ones are passed over.
        vocabulary: of the ids.
        seq_length: S.
        pack: documents follow each other with [SEP] between, and only the last sequence is padded; attention
            reaches over all of a sequence, as in RoBERTa. Else every document starts a sequence, and its last
            one is padded.

    Returns:
        int32 [N, S].
    """
    import numpy as np

    room = seq_length - 2
    chunks = [
        ids[start : start + room]
        for ids in (_joined(documents, vocabulary.sep_id, room) if pack else documents)
        for start in range(0, len(ids), room)
    ]
    rows = np.full([len(chunks), seq_length], vocabulary.pad_id, np.int32)
    rows[:, 0] = vocabulary.cls_id
    for row, chunk in zip(rows, chunks, strict=True):
        row[1 : len(chunk) + 1] = chunk
        row[len(chunk) + 1] = vocabulary.sep_id
    return rows


def _joined(documents: Iterable["np.ndarray"], sep_id: int, room: int) -> Iterator["np.ndarray"]:
    """All documents in a row, in pieces of which only the last is no multiple of `room` tokens."""
    import numpy as np

    waiting = np.empty(0, np.int32)
    for ids in documents:
        if not len(ids):
            continue
        waiting = np.concatenate([waiting, [sep_id], ids]) if len(waiting) else ids
        whole = len(waiting) // room * room
        yield waiting[:whole]
        waiting = waiting[whole:]
    yield waiting
