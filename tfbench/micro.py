"""`python -m tfbench.micro`: what this machine reaches at one thing at a time, the ceilings of a training."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from tfbench import records
from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.display import Display
from tfbench.hardware.gpus import Probe, probe
from tfbench.microbench import input_rate, matmul, roofline, rows, suite
from tfbench.microbench.case import Machine

FLAGS = flags.FLAGS
CPU_DEVICES = 2  # logical ones, so that something can be summed over them
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def define_flags() -> None:
    """Defines this command's flags: some have names of another entry point's, so not on import."""
    flags.DEFINE_list("only", list(suite.BENCHMARKS), f"Of {', '.join(suite.BENCHMARKS)}; default: all.")
    flags.DEFINE_bool("quick", False, "Only the ceilings and the largest of the other cases.")
    flags.DEFINE_string(
        "gpus", "auto", "GPUs to use: a number, auto for all that are visible, 0 for the CPU."
    )
    flags.DEFINE_string("results_dir", "tfbench_results", "Folder of micro.csv and its picture.")
    flags.DEFINE_string(
        "data",
        None,
        "Folder or glob of TFRecord files to read; others in it are left out. Default: small ones are made.",
    )


def micro(argv: list[str]) -> int:
    """Measure what the flags say; returns the exit code."""
    display = Display()
    if len(argv) > 1:
        display.error(f"{argv[1]!r} is not a flag: flags start with --")
        return EXIT_REFUSED
    try:
        return _micro(display)
    except (ConfigError, rows.MicroSchemaError, OSError) as error:
        display.error(f"{error}\nSee python -m tfbench.micro --help")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        display.error("stopped; the rows so far are written")
        return EXIT_INTERRUPTED


def _micro(display: Display) -> int:
    """The exit code: 1 where a result was wrong or a case failed.

    Raises:
        ConfigError: a flag's value is not possible.
        MicroSchemaError: micro.csv has other columns.
        OSError: the results folder cannot be used.
    """
    found = probe()
    used = _gpus_used(FLAGS.gpus, found)
    _check_names(FLAGS.only)
    files = _record_files(FLAGS.data)
    results_dir = Path(FLAGS.results_dir).expanduser()
    results_dir.mkdir(parents=True, exist_ok=True)
    path = results_dir / "micro.csv"
    if path.exists() and path.stat().st_size:
        rows.read(path)  # another schema is refused before anything is measured
    where = f"{used} × {found.gpus[0].name}" if used else "the CPU, where everything runs small"
    display.say(f"measuring {where}; operands are random, because zeros need less power and run faster")
    from tfbench import devices

    config = BenchmarkConfig(model="resnet50", gpus=used, cpu_replicas=1 if used else CPU_DEVICES)
    devices.set_environment(config)
    with devices.native_messages_to(results_dir / "micro.log"):
        names = devices.open_devices(config)
        machine = suite.machine_of(names, found, used, FLAGS.quick)
        facts = suite.shared_facts(machine, found.driver, _versions())
        done = suite.run(suite.cases(machine, FLAGS.only, files), machine, facts, path, display)
    _keep_ceilings(done, machine, facts)
    _show_roofline(done, machine, results_dir, display)
    display.say(f"rows: {path}")
    return EXIT_FAILED if any((row.note or "").startswith(("wrong:", "failed:")) for row in done) else 0


def _gpus_used(asked: str, found: Probe) -> int:
    """How many GPUs to use.

    Raises:
        ConfigError: more than there are, or not a number.
    """
    present = len(found.gpus)
    if asked == "auto":
        return present
    if not asked.isdecimal():
        raise ConfigError("gpus", asked, "a whole number, or auto for all that are visible")
    if int(asked) > present:
        why = found.reason or f"{present} visible"
        raise ConfigError("gpus", asked, f"{why}. --gpus=auto takes what is there, --gpus=0 the CPU")
    return int(asked)


def _check_names(only: list[str]) -> None:
    """Raises ConfigError for a benchmark that there is not, or none at all."""
    unknown = [name for name in only if name not in suite.BENCHMARKS]
    if unknown or not only:
        raise ConfigError("only", ",".join(unknown), f"some of {', '.join(suite.BENCHMARKS)}")


def _record_files(data: str | None) -> list[str] | None:
    """Files that --data names; None without it.

    Raises:
        ConfigError: none of them holds records.
    """
    if data is None:
        return None
    files = input_rate.files_of(data)
    if not files:
        raise ConfigError("data", data, "a folder or a glob of uncompressed TFRecord files; none is there")
    return files


def _versions() -> dict[str, str | None]:
    """Columns of the software in use."""
    import tensorflow as tf

    from tfbench.devices import library_versions

    return {**library_versions(), "tensorflow": tf.__version__}


def _keep_ceilings(done: Sequence[rows.MicroRow], machine: Machine, facts: dict[str, Any]) -> None:
    """Training compares its rate with the square products of this run from now on."""
    from tfbench import ceilings

    if not machine.gpus or machine.quick:
        return
    for number_format, tflops in roofline.roofs(done).tflops.items():
        if number_format in matmul.FORMAT_OF_TRAINING.values():
            ceilings.keep(machine.gpus[0], number_format, facts, tflops * 1e12)


def _show_roofline(
    done: Sequence[rows.MicroRow], machine: Machine, results_dir: Path, display: Display
) -> None:
    """The picture, and why models are not on it."""
    runs_path = results_dir / "runs.csv"
    try:
        runs = records.read(runs_path) if runs_path.exists() else []
    except records.SchemaError as error:
        display.warn(str(error))
        runs = []
    name = machine.gpus[0].name if machine.gpus else None
    placed, sentences = roofline.steps(runs, name, machine.spec)
    path = results_dir / "micro_roofline.png"
    if not roofline.draw(path, done, placed, machine.spec, f"Roofline of {name or 'the CPU'}"):
        display.say("no roofline: it needs the rates of --only=matmul,memory")
        return
    for sentence in sentences:
        display.say(sentence)
    display.say(f"picture: {path}")


def parse(argv: list[str]) -> list[str]:
    """As absl's parser, but a refused flag ends with one message."""
    try:
        return list(FLAGS(argv))
    except flags.Error as error:
        Display().error(f"{error}\nSee python -m tfbench.micro --help")
        sys.exit(EXIT_REFUSED)


def main() -> None:
    """Console entry point."""
    define_flags()
    app.run(micro, flags_parser=parse)


if __name__ == "__main__":
    main()
