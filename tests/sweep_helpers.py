"""Sweeps in a folder of a test, with a stand-in for the process that trains. TensorFlow-free."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import psutil
from run_helpers import DEADLINE_S, ROOT, environment, gpu, machine, python

from tfbench import records

# Stands for tfbench.train: does what FAKE says for its --seed, or trains well; rows and folders as its own.
FAKE = """
import datetime, json, os, signal, subprocess, sys, time
from pathlib import Path
from absl import flags
import sweep_helpers
import tfbench.flags
from tfbench import records
from tfbench.defaults import complete
from tfbench.hardware import environment

flags.FLAGS(sys.argv)
config, _ = complete(tfbench.flags.choices_from_flags(), sweep_helpers.machine_there())
now = datetime.datetime.now(datetime.UTC)
run_id = f"{now:%Y%m%d-%H%M%S}-{config.model}-{config.run_key[:6]}-{os.getpid()}"
folder = Path(config.results_dir) / run_id
folder.mkdir(parents=True)

def row(status, rate=None):
    told = dict(status=status, samples_per_sec=rate, flags=f"--seed={config.seed}", tag=config.tag)
    if rate:
        told |= dict(samples_per_sec_low=rate - 1, samples_per_sec_high=rate + 1)
    same = dict(run_id=run_id, run_key=config.run_key, started_at=now.isoformat())
    asked = config.requested_per_replica_batch_size
    told |= dict(per_replica_batch_size=config.per_replica_batch_size, requested_per_replica_batch_size=asked)
    told |= dict(compute_ms=1.0 if config.diagnose else None)
    told |= dict(num_gpus=config.gpus, num_replicas=config.num_replicas)
    told |= dict(parallel_runs=environment.parallel_runs(), cpu_cores=len(os.sched_getaffinity(0)))
    records.append(Path(config.results_dir) / "runs.csv", records.RunRecord(**told | same))

def sleep_for_ever(line=""):
    (folder / "asleep").touch()
    while True:
        time.sleep(0.1)
        if line:
            print(line, flush=True)

def interrupted(number, frame):
    row("interrupted")
    sys.exit(130)

def meet():
    # Goes on when another run is under way as well.
    where = dict(cores=sorted(os.sched_getaffinity(0)), gpu=os.environ["CUDA_VISIBLE_DEVICES"])
    (folder / "here").write_text(json.dumps(where))
    while len(list(Path(config.results_dir).glob("*/here"))) < 2:
        time.sleep(0.02)

print("training", flush=True)
behaviour = json.loads(os.environ["FAKE"]).get(str(config.seed), "ok")
if config.per_replica_batch_size > int(os.environ["FAKE_LARGEST"]):
    behaviour = "oom"
if behaviour in ("ok", "meet"):
    if behaviour == "meet":
        meet()
    time.sleep(float(os.environ.get("FAKE_S", 0)) / 2)
    row("ok", float(os.environ.get("FAKE_RATE", 100)))
    time.sleep(float(os.environ.get("FAKE_S", 0)) / 2)
elif behaviour == "oom":
    row("oom")
    sys.exit(1)
elif behaviour == "crash":
    sys.exit("boom")
elif behaviour == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "cudnn":
    (folder / "train.log").write_text("E could not create: CUDNN_STATUS_ALLOC_FAILED\\n")
    os.abort()
elif behaviour == "helper":
    subprocess.Popen(["sleep", "600"])
    row("ok", 50.0)
elif behaviour == "hang":
    sleep_for_ever()
elif behaviour == "babble":
    sleep_for_ever("still there")
elif behaviour == "gentle":
    signal.signal(signal.SIGTERM, interrupted)
    sleep_for_ever()
elif behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_for_ever()
"""
# The real command, but for the program that it starts and the GPUs that are there.
DRIVER = """
import sys
from tfbench.sweeping import loop
loop.TRAINER = (sys.executable, {fake!r})
import sweep_helpers
from tfbench import sweep
sweep.this_machine = sweep_helpers.machine_there
sweep.main()
"""
BASE = ("--model=resnet_tiny", "--gpus=0", "--results_dir=out")


def machine_there():
    """The machine with as many GPUs as FAKE_GPUS says."""
    return machine(*(gpu(index=index, uuid=f"GPU-{index}") for index in range(int(os.environ["FAKE_GPUS"]))))


class Sweeper:
    """Sweeps in a folder, with stand-ins that behave as they are told.

    Args:
        folder: an empty one.
        gpus: of the machine.
        largest: per-replica batch that trains.
    """

    def __init__(self, folder, gpus=0, largest=10**6):
        self.folder, self.results = folder, folder / "out"
        self.gpus, self.largest = gpus, largest
        (folder / "fake.py").write_text(FAKE)
        (folder / "driver.py").write_text(DRIVER.format(fake=str(folder / "fake.py")))

    def environment(self, behaviours, seconds=0.0):
        told = {"FAKE": json.dumps(behaviours), "FAKE_S": f"{seconds}", "FAKE_FOLDER": str(self.folder)}
        told |= {"FAKE_GPUS": f"{self.gpus}", "FAKE_LARGEST": f"{self.largest}"}
        return environment(**told, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))

    def run(self, *flags, **behaviours):
        told = {seed.removeprefix("s"): behaviour for seed, behaviour in behaviours.items()}
        return python("driver.py", *BASE, *flags, cwd=self.folder, env=self.environment(told))

    def start(self, *flags, behaviours=None, seconds=0.0):
        return subprocess.Popen(
            [sys.executable, "driver.py", *BASE, *flags],
            cwd=self.folder,
            env=self.environment(behaviours or {}, seconds),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A job in the background of a script ignores Ctrl-C, and so would this one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def rows(self):
        return records.read(self.results / "runs.csv")

    def ends(self):
        """(seed, status) of every row."""
        return [(seed_of(row), row.status) for row in self.rows()]

    def places(self):
        """Cores and GPU of each run that met another."""
        return [json.loads(path.read_text()) for path in self.results.glob("*/here")]

    def wait_for(self, pattern, count=1):
        """Until so many children have come so far."""
        deadline_s = time.monotonic() + DEADLINE_S
        while len(list(self.results.glob(pattern))) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def alive(self):
        """Processes of this folder's sweeps; zombies, which only wait to be counted, are dead."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process):
        try:
            ours = process.environ().get("FAKE_FOLDER") == str(self.folder)
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def assert_nobody_is_left(self):
        deadline_s = time.monotonic() + 5  # a killed process takes a moment
        while self.alive() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not self.alive()


def seed_of(row):
    """The seed among a row's flags."""
    (seed,) = (flag for flag in shlex.split(row.flags) if flag.startswith("--seed="))
    return int(seed.removeprefix("--seed="))
