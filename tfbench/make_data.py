"""`python -m tfbench.make_data`: training data to measure with, made where it is needed.

Exit code: 0; 1 where --verify finds something wrong; 2 for refused flags.
"""

import glob
import importlib.util
import os
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from absl import app, flags

from tfbench.config import ConfigError
from tfbench.data.image_shards import Recipe
from tfbench.devices import native_messages_to
from tfbench.display import Display

_KIND = flags.DEFINE_enum(
    "kind", None, ["images", "resized", "tokens"],
    "images: TFRecords in ImageNet's layout and of its sizes, from photographs that scikit-learn has; "
    "resized: copies of --source with smaller images; tokens: text cut to token records.",
    required=True,
)  # fmt: skip
_OUT = flags.DEFINE_string("out", None, "Folder to write to; what it has already is kept.", required=True)
_SOURCE = flags.DEFINE_list(
    "source",
    [],
    "resized: tfrecord:GLOB. tokens: globs of UTF-8 text files; default: pydoc, the help texts of Python.",
)
_SHARDS = flags.DEFINE_integer("shards", 16, "images and tokens: files to make.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "images and tokens: equal seeds make equal files.", lower_bound=0)
_NUM = flags.DEFINE_integer("num", 10_000, "images: how many.", lower_bound=1)
_NUM_CLASSES = flags.DEFINE_integer("num_classes", 1000, "images: classes, labelled from 1.", lower_bound=1)
_SHORT_SIDE = flags.DEFINE_integer("short_side", 256, "resized: pixels; smaller images stay.", lower_bound=8)
_ENCODING = flags.DEFINE_enum(
    "encoding", "jpeg", ["jpeg", "raw"], "resized: raw is PPM, whose pixels are not compressed."
)
_SEQ_LENGTH = flags.DEFINE_integer("seq_length", 128, "tokens: of a sequence.", lower_bound=8)
_VOCAB = flags.DEFINE_string("vocab", None, "tokens: BERT's vocab.txt. Default: trained on the text.")
_PACK = flags.DEFINE_bool("pack", False, "tokens: several documents may share a sequence.")
_PROCESSES = flags.DEFINE_integer("processes", None, "To work in. Default: one for each core.", lower_bound=1)
_KINDS_OF = {  # a flag that is left out here is of every kind
    "source": ("resized", "tokens"),
    "shards": ("images", "tokens"),
    "seed": ("images", "tokens"),
    "num": ("images",),
    "num_classes": ("images",),
    "short_side": ("resized",),
    "encoding": ("resized",),
    "seq_length": ("tokens",),
    "vocab": ("tokens",),
    "pack": ("tokens",),
    "processes": ("images", "resized"),
}
_VERIFY = flags.DEFINE_bool("verify", False, "Make nothing: compare --out with its manifest.")

LOG = ".make_data.log"  # hidden, so that no glob of records takes it
EXIT_DAMAGED = 1
EXIT_REFUSED = 2


def make_data(argv: list[str]) -> int:
    """Do what the flags say; returns the exit code."""
    display = Display()
    if len(argv) > 1:
        display.error(f"{argv[1]!r} is not a flag: flags start with --")
        return EXIT_REFUSED
    out = Path(_OUT.value).expanduser()
    try:
        _refuse_flags_of_other_kinds()
        if _VERIFY.value:
            return _verify(out, display)
        _MAKERS[_KIND.value](out, display)
    except (ValueError, OSError) as error:
        display.error(f"{error}")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        display.error("stopped; the same command goes on where this one was")
        return 130  # 128 + SIGINT, as shells have it
    return 0


def _refuse_flags_of_other_kinds() -> None:
    """Raises ConfigError for the first flag that was given and would change nothing."""
    for name, kinds in _KINDS_OF.items():
        flag = flags.FLAGS[name]
        if flag.present and _KIND.value not in kinds:
            value = ",".join(flag.value) if isinstance(flag.value, list) else flag.value
            accepted = " and ".join(f"--kind={kind}" for kind in kinds)
            raise ConfigError(name, value, f"goes with {accepted}, not with --kind={_KIND.value}")


def _make_images(out: Path, display: Display) -> None:
    """Raises: ValueError: scikit-learn (the photographs) or Pillow (opens them) is missing."""
    from tfbench.data import image_shards

    if any(importlib.util.find_spec(module) is None for module in ("sklearn", "PIL")):
        raise ValueError("--kind=images needs scikit-learn and Pillow: pip install 'tfbench[data]'")
    recipe = image_shards.images_recipe(_NUM.value, _SHARDS.value, _NUM_CLASSES.value, _SEED.value)
    _make_shards(recipe, out, display)


def _make_resized(out: Path, display: Display) -> None:
    """Raises: ValueError: --source names no files, or those of --out."""
    from tfbench.data import image_shards

    patterns = [source.removeprefix("tfrecord:") for source in _SOURCE.value]
    paths = sorted(
        path
        for pattern in patterns
        for path in glob.glob(os.path.expanduser(pattern))
        if os.path.isfile(path) and os.path.basename(path) != image_shards.MANIFEST
    )
    if not paths:
        raise ValueError(f"--source={','.join(_SOURCE.value)}: expected tfrecord:GLOB that matches files")
    if any(os.path.realpath(os.path.dirname(path)) == os.path.realpath(out) for path in paths):
        raise ValueError(f"--out={out}: is the folder of --source, whose files would be overwritten")
    _make_shards(image_shards.resized_recipe(paths, _SHORT_SIDE.value, _ENCODING.value), out, display)


def _make_shards(recipe: Recipe, out: Path, display: Display) -> None:
    from rich.progress import track

    from tfbench.data import image_shards

    processes = _PROCESSES.value or len(os.sched_getaffinity(0))
    out.mkdir(parents=True, exist_ok=True)
    try:
        with native_messages_to(out / LOG):  # of the worker processes too, which inherit it
            written = image_shards.make(
                recipe,
                out,
                processes,
                lambda entries, total: track(entries, recipe.kind, total=total, console=display.console),
            )
    except BrokenProcessPool as error:  # what it said is not on the screen
        raise image_shards.ShardsError(f"a process died; {out / LOG} has its last words") from error
    kept = len(recipe.files) - written
    display.say(
        f"{written} shards written, {kept} were there. {image_shards.how_to_train(out, recipe.files)}"
    )


def _make_tokens(out: Path, display: Display) -> None:
    from tfbench.data.tokens import make_tokens

    if not _SOURCE.value:
        display.say("no --source: the text is pydoc, the help texts of Python")
    make_tokens(
        _SOURCE.value or ["pydoc"],
        out,
        _SEQ_LENGTH.value,
        _VOCAB.value,
        _SHARDS.value,
        _SEED.value,
        _PACK.value,
    )
    display.say(f"Train on them with --data=tokens:{out} --seq_length={_SEQ_LENGTH.value}")


_MAKERS: dict[str, Callable[[Path, Display], None]] = {
    "images": _make_images,
    "resized": _make_resized,
    "tokens": _make_tokens,
}


def _verify(out: Path, display: Display) -> int:
    if _KIND.value == "tokens":
        from tfbench.data.tokens import verify_tokens

        problems = verify_tokens(out)
    else:
        from tfbench.data import image_shards

        _, problems = image_shards.verify(out)
    for problem in problems:
        display.error(problem)
    if not problems:
        display.say(f"{out}: every shard is as it was made")
    return EXIT_DAMAGED if problems else 0


def parse(argv: list[str]) -> list[str]:
    """As absl's parser, but a refused flag ends with one message and its own exit code."""
    try:
        return list(flags.FLAGS(argv))
    except flags.Error as error:
        Display().error(f"{error}\nSee python -m tfbench.make_data --help")
        sys.exit(EXIT_REFUSED)


def main() -> None:
    """Console entry point."""
    app.run(make_data, flags_parser=parse)


if __name__ == "__main__":
    main()
