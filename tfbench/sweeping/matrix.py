"""From --sweep or a YAML file to the points of a sweep, each complete and checked. TensorFlow-free."""

import dataclasses
import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from absl import flags

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.defaults import complete
from tfbench.flags import FLAGS
from tfbench.hardware.gpus import Machine

Matrix = dict[str, list[str]]  # flag → its values, as the user spelled both
_NULL = "tag:yaml.org,2002:null"


@dataclasses.dataclass(frozen=True)
class Point:
    """One configuration of a sweep."""

    name: str  # the swept flags and their values, such as "precision=tf32 gpus=2"
    config: BenchmarkConfig


class ImpossiblePointsError(ValueError):
    """Points that cannot be run: one line for each, with the point and the reason, each reason once."""

    def __init__(self, problems: Sequence[tuple[str, str]]):
        first: dict[str, str] = {}  # point by reason
        lines = []
        for name, why in problems:
            same = first.setdefault(why, name)
            lines.append(f"point {name}: {why if same == name else f'as point {same}'}")
        super().__init__("\n".join(lines))


def parse_text(text: str) -> Matrix:
    """The matrix of --sweep: `flag=value,value flag=value`, quoted as in a shell.

    Raises:
        ConfigError: the text is not of this form.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError("sweep", text, f"{error}") from error
    pairs = []
    for word in words:
        key, equals, values = word.partition("=")
        if not equals:
            raise ConfigError("sweep", text, f"{word!r} is not of the form flag=value,value")
        pairs.append((key, values.split(",")))
    return _checked("sweep", text, pairs)


def parse_file(path: str) -> Matrix:
    """The matrix of a YAML file that maps each flag to a list of values.

    Values are taken as they are spelled, so that YAML's own idea of `no` or `1e3` changes nothing.

    Raises:
        ConfigError: the file cannot be read, or holds anything else.
    """
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("sweep_file", path, " ".join(f"{error}".split())) from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("sweep_file", path, "a mapping of flags to lists, such as `gpus: [1, 2]`")
    pairs = []
    for key, values in root.value:
        plain = isinstance(values, yaml.SequenceNode) and all(
            isinstance(value, yaml.ScalarNode) for value in values.value
        )
        if not plain or not isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise ConfigError("sweep_file", path, f"line {line}: a flag and a list, such as `gpus: [1, 2]`")
        pairs.append((key.value, ["" if value.tag == _NULL else value.value for value in values.value]))
    return _checked("sweep_file", path, pairs)


def _checked(flag: str, given: str, pairs: Iterable[tuple[str, list[str]]]) -> Matrix:
    """The pairs as a matrix.

    Raises:
        ConfigError: a key that cannot be swept or comes twice, a value that is empty or comes twice.
    """
    matrix: Matrix = {}
    for key, values in pairs:
        if key not in _sweepable():
            accepted = ", ".join(sorted(_sweepable()))
            raise ConfigError(flag, given, f"{key!r} cannot be swept; one of {accepted}")
        if key in matrix:
            raise ConfigError(flag, given, f"{key} is there twice: put all its values into one list")
        if not values or not all(value.strip() for value in values):
            raise ConfigError(flag, given, f"{key} has an empty value")
        typed = [typed_value(key, value) for value in values]
        twice = next((value for index, value in enumerate(values) if typed[index] in typed[:index]), None)
        if twice is not None:
            raise ConfigError(flag, given, f"{key} has the value {twice} twice; --repeats=N repeats points")
        matrix[key] = values
    if not matrix:
        raise ConfigError(flag, given, "names no flag, such as gpus=1,2")
    return matrix


def _sweepable() -> set[str]:
    """The fields of a configuration that a flag sets, without the folder that all points share."""
    return {field.name for field in dataclasses.fields(BenchmarkConfig) if field.name in FLAGS} - {
        "results_dir",
        "requested_per_replica_batch_size",
        "scaling_mode",
    }


def typed_value(key: str, text: str) -> Any:
    """The value of a flag as absl's own parser reads it.

    Raises:
        flags.IllegalFlagValueError: it is none of this flag.
    """
    try:
        return FLAGS[key].parser.parse(text)
    except (TypeError, ValueError) as error:
        raise flags.IllegalFlagValueError(f"flag --{key}={text}: {error}") from error


def combinations(matrix: Matrix) -> list[dict[str, str]]:
    """Every combination of the values: flags in the order they were given, the last one changing fastest."""
    return [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())]


def choices_of(combination: Mapping[str, str]) -> dict[str, Any]:
    """The values of a combination with their flags' types."""
    return {key: typed_value(key, value) for key, value in combination.items()}


def complete_points(
    base: Mapping[str, Any], matrix: Matrix, machine: Machine
) -> tuple[list[Point], list[str]]:
    """Complete and check every point before anything runs.

    Args:
        base: the choices that all points share, by field, None where there is none; swept flags win.
        matrix: what is swept.
        machine: the devices that are there.

    Returns:
        The points in the order of `combinations`, and sentences for the user, each once.

    Raises:
        ImpossiblePointsError: points that this machine, model or data rules out, or that are the same.
    """
    points: list[Point] = []
    sentences: dict[str, None] = {}  # a set that keeps the order
    problems: list[tuple[str, str]] = []
    names_by_key: dict[str, str] = {}
    for combination in combinations(matrix):
        name = " ".join(f"{key}={value}" for key, value in combination.items()) or f"model={base['model']}"
        try:
            config, said = complete(dict(base) | choices_of(combination), machine)
        except ConfigError as error:
            problems.append((name, f"{error}"))
            continue
        same = names_by_key.setdefault(config.run_key, name)
        if same != name:
            problems.append((name, f"measures the same as point {same}; sweep what changes the run"))
        points.append(Point(name, config))
        sentences |= dict.fromkeys(said)
    if problems:
        raise ImpossiblePointsError(problems)
    return points, list(sentences)
