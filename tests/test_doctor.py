import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path

import pynvml
import pytest
from doctor_helpers import CARDS, SOUND, STAGES, UUIDS, MachineNvml, changed, second_card, tensorflow
from fake_nvml import GIB, FakeCard, FakeNvml, mig_instance
from run_helpers import environment, environment_without_tensorflow, gpu, python

from tfbench.checks import CHECKS, examine, gather
from tfbench.checks.deadline import within
from tfbench.checks.facts import Pair
from tfbench.checks.finding import Finding, worst
from tfbench.checks.run_child import run_child

NO_GPU = {
    "probe": {"gpus": (), "installed": 0, "driver": None, "cuda": None, "reason": "no NVIDIA driver"},
    "cards": (), "pairs": (), "mig_instances": (),
}  # fmt: skip
DLOPEN = (
    "I0000 00:00:1.2 7 dso_loader.cc:144] Could not load dynamic library 'libcusolver.so.11'; dlerror: "
    "libcudnn.so.9: cannot open shared object file: No such file or directory\n"
    "I0000 00:00:1.3 7 dso_loader.cc:144] Could not load dynamic library 'libnvinfer.so.8'; dlerror: "
    "libnvinfer.so.8: cannot open shared object file: No such file or directory\n"
)
CUBLAS = "ImportError: libcublas.so.12: cannot open shared object file: No such file or directory"
ONEDNN = "I0000 port.cc:153] oneDNN custom operations are on. You may see round-off errors\n"
NOT_REACHED = dict.fromkeys(("product", "all_reduce", "libraries", "load"))
XID = "[9.1] NVRM: Xid (PCI:0000:3b:00): {}, pid=77, name=python, something"

# check, machine, level, words of the evidence, words of the fix
CASES = [
    ("driver", changed(**NO_GPU), "problem", "no NVIDIA driver", "nvidia-smi"),
    ("driver", changed(**NO_GPU, host={"nvidia_devices": 0}), "warning", "no NVIDIA card", "--gpus=0"),
    (
        "driver",
        changed(probe={"installed": 0, "reason": "the driver finds no GPU"}),
        "problem",
        "finds no GPU",
        "",
    ),
    (
        "visible_gpus",
        changed(probe={"reason": "GPU 1 of the driver cannot be opened"}),
        "problem",
        "GPU 1",
        "xid",
    ),
    (
        "visible_gpus",
        changed(probe={"reason": "CUDA_VISIBLE_DEVICES=0 hides the others"}),
        "warning",
        "hides",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (
        "tensorflow",
        tensorflow(**{"import": {"error": CUBLAS}}),
        "problem",
        "libcublas.so.12",
        "libcublas.so.12: pip install nvidia-cublas-cu12",
    ),
    (
        "tensorflow",
        tensorflow(
            ended="killed by SIGILL",
            messages=f"{ONEDNN}Fatal Python error: Illegal instruction\n{ONEDNN}",
            **{"import": None, "devices": None},
            **NOT_REACHED,
        ),
        "problem",
        "at 'import' killed by SIGILL: Fatal Python error: Illegal instruction",
        "reinstall",
    ),
    (
        "tensorflow",
        tensorflow(**{"import": {"version": "2.21.0", "is_cuda_build": False}}),
        "problem",
        "without CUDA",
        "tfbench[cuda]",
    ),
    ("driver_for_cuda", changed(probe={"cuda": "11.8"}), "problem", "CUDA up to 11.8", "525.60.13"),
    ("driver_for_cuda", changed(probe={"cuda": "12.4"}), "warning", "CUDA up to 12.4", "newer cards"),
    (
        "gpus_seen",
        tensorflow(devices={"gpus": 0}, messages=DLOPEN),
        "problem",
        "NVML sees 2 GPUs, TensorFlow 0; missing: libcudnn.so.9",
        "libcudnn.so.9: pip install nvidia-cudnn-cu12",
    ),
    (
        "gpus_seen",
        tensorflow(devices={"gpus": 0}, messages=DLOPEN.replace("cudnn.so.9", "cuda.so.1")),
        "problem",
        "libcuda.so.1",
        "the NVIDIA driver's",
    ),
    (
        "gpus_seen",
        tensorflow(devices={"gpus": 1}),
        "problem",
        "NVML sees 2 GPUs, TensorFlow 1",
        "tfbench[cuda]",
    ),
    (
        "gpus_seen",
        tensorflow(in_time=False, ended="no end in time", messages="a\nb\n", devices=None, **NOT_REACHED),
        "problem",
        "at 'devices' no end in time: a / b",
        "once more",
    ),
    (
        "compute_capability",
        second_card(gpu=gpu(compute_capability=(5, 2))),
        "problem",
        "GPU 1: compute capability 5.2",
        "built for this card",
    ),
    ("compute_capability", second_card(gpu=gpu(compute_capability=(12, 0))), "warning", "12.0", "may fail"),
    (
        "cuda_packages",
        changed(
            software={
                "packages": {
                    "nvidia-cudnn-cu12": "9.1.0.70",
                    "nvidia-nccl-cu12": "2.28.1",
                    "nvidia-cublas-cu12": "12.5.3.2",
                }
            }
        ),
        "warning",
        "nvidia-cudnn-cu12 9.1.0.70 (needs",
        "tfbench[cuda]",
    ),
    (
        "cuda_packages",
        dataclasses.replace(
            tensorflow(devices={"gpus": 0}), software=dataclasses.replace(SOUND.software, packages={})
        ),
        "problem",
        "not installed: nvidia-cublas-cu12, nvidia-cudnn-cu12, nvidia-nccl-cu12",
        "tfbench[cuda]",
    ),
    (
        "xla",
        tensorflow(product={"error": "InternalError: ptxas not found\nsecond"}),
        "problem",
        "ptxas not found / second",
        "nvidia-cuda-nvcc",
    ),
    (
        "xla",
        tensorflow(product={"sums": {"GPU:0": 4096.0, "GPU:1": 4000.0}, "expected": 4096.0}),
        "problem",
        "GPU:1 gave 4000.0",
        "do not trust",
    ),
    (
        "xla",
        tensorflow(
            ended="killed by SIGABRT", messages="F0000 Check failed: INVALID_PTX\nbye\n", **NOT_REACHED
        ),
        "problem",
        "SIGABRT: F0000 Check failed: INVALID_PTX",
        "",
    ),
    (
        "all_reduce",
        tensorflow(all_reduce={"replicas": 2, "results": 2, "wrong": [1]}),
        "problem",
        "wrong sums on: [1]",
        "NCCL_DEBUG",
    ),
    (
        "all_reduce",
        tensorflow(all_reduce={"error": "UnknownError: unhandled system error"}),
        "problem",
        "unhandled system error",
        "/dev/shm",
    ),
    (
        "cudnn",
        tensorflow(libraries={"cudnn": "9.1.0", "nccl": None}),
        "problem",
        "9.1.0 is loaded",
        "nvidia-cudnn-cu12<10.0,>=9.3.0.75",
    ),
    (
        "cudnn",
        tensorflow(
            messages="E0 dnn.cc] Loaded runtime CuDNN library: 9.1.0 but source was compiled with: 9.3"
        ),
        "problem",
        "Loaded runtime CuDNN library: 9.1.0",
        "nvidia-cudnn-cu12",
    ),
    (
        "nccl",
        tensorflow(libraries={"cudnn": None, "nccl": "2.18.1"}),
        "problem",
        "2.18.1 is loaded",
        "nvidia-nccl-cu12",
    ),
    (
        "packages",
        changed(software={"packages": {"tensorflow": "2.20.0"}}),
        "problem",
        "tensorflow 2.20.0 (needs <2.22,>=2.21); keras is missing",
        "pip install",
    ),
    (
        "rival_packages",
        changed(software={"packages": {"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"}}),
        "problem",
        "tensorflow-cpu",
        "pip uninstall",
    ),
    (
        "rival_packages",
        changed(software={"packages": {"pynvml": "11.5.3"}}),
        "problem",
        "hides nvidia-ml-py",
        "pip uninstall pynvml",
    ),
    (
        "rival_packages",
        changed(software={"packages": {"pynvml": "12.0.0"}}),
        "warning",
        "12.0.0 is retired",
        "",
    ),
    ("keras", changed(software={"environ": {"TF_USE_LEGACY_KERAS": "1"}}), "problem", "Keras 2", "unset"),
    (
        "keras",
        changed(software={"environ": {"KERAS_BACKEND": "jax"}}),
        "warning",
        "backend jax",
        "tensorflow",
    ),
    ("keras", changed(software={"keras_config_backend": "torch"}), "warning", "backend torch", ""),
    (
        "slowing_settings",
        changed(software={"environ": {"NVIDIA_TF32_OVERRIDE": "0"}}),
        "warning",
        "TF32 is off",
        "unset NVIDIA_TF32_OVERRIDE",
    ),
    (
        "xid",
        changed(kernel_log=(XID.format(79), XID.format(79), XID.format(13))),
        "problem",
        "Xid 79 (fallen off the bus) on 0000:3b:00, 2 times",
        "dcgmi",
    ),
    ("xid", changed(kernel_log=(XID.format(31).replace("PCI:", ""),)), "warning", "Xid 31", "programs"),
    ("memory_errors", second_card(row_remapping_failed=True), "problem", "GPU 1: remapping", "replaced"),
    ("memory_errors", second_card(ecc_errors_uncorrected=3), "problem", "GPU 1: 3 uncorrected", "reset"),
    (
        "memory_errors",
        second_card(loaded={"ecc_errors_uncorrected": 1}),
        "problem",
        "GPU 1: 1 uncorrected",
        "reset",
    ),
    (
        "memory_errors",
        second_card(row_remapping_pending=True),
        "warning",
        "waits for remapping",
        "nvidia-smi -r",
    ),
    ("memory_errors", second_card(ecc=False), "warning", "ECC is off", "nvidia-smi -e 1"),
    ("mig", changed(mig_instances=(None, 0)), "problem", "GPU 1 has 0 instances", "-mig 0"),
    ("mig", changed(mig_instances=(7, None)), "warning", "GPU 0 has 7 instances", "-mig 0"),
    (
        "other_processes",
        second_card(busy="already had 12.3 GiB in use before the start"),
        "warning",
        "GPU 1: already had 12.3 GiB",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        "persistence",
        second_card(persistence=False),
        "warning",
        "GPU 1: persistence mode off",
        "nvidia-smi -pm 1",
    ),
    (
        "power_limit",
        second_card(power_limit_w=400.0),
        "warning",
        "GPU 1: 400 W, default 700 W",
        "nvidia-smi -pl 700",
    ),
    ("pcie", second_card(pcie_width=8), "problem", "GPU 1: generation 5 of 5, 8 of 16 lanes", "reseat"),
    ("pcie", second_card(loaded={"pcie_generation": 3}), "problem", "generation 3 of 5", "BIOS"),
    (
        "links",
        second_card(nvlinks_active=12),
        "problem",
        "cards of one kind differ: NVLinks: 18, 12",
        "nvlink --status",
    ),
    (
        "links",
        changed(
            cards=tuple(
                dataclasses.replace(card, idle=dataclasses.replace(card.idle, nvlinks_active=0))
                for card in CARDS
            )
        ),
        "warning",
        "no NVLink is active",
        "fabric manager",
    ),
    (
        "links",
        changed(pairs=(Pair(first=0, second=1, path=None, peer_access=False),)),
        "warning",
        "no peer access between GPU 0 and 1",
        "IOMMU",
    ),
    (
        "load",
        tensorflow(load={"start_s": 0.0, "end_s": 20.0, "tflops": [700.0, 600.0]}),
        "warning",
        "700, 600 TFLOP/s",
        "slower than its like",
    ),
    (
        "load",
        tensorflow(load={"error": "InternalError: CUBLAS_STATUS_EXECUTION_FAILED"}),
        "problem",
        "CUBLAS",
        "xid",
    ),
    (
        "throttling",
        second_card(telemetry={"throttle_reasons": "hw_thermal_slowdown|sw_power_cap"}),
        "problem",
        "hw_thermal_slowdown",
        "airflow",
    ),
    (
        "throttling",
        second_card(telemetry={"temperature_c_max": 86.0}),
        "warning",
        "86 °C, 686 W (sw_power_cap); it slows",
        "fans",
    ),
    (
        "throttling",
        second_card(telemetry={"throttle_reasons": ""}),
        "warning",
        "1,455 of 1980 MHz",
        "locked low",
    ),
    ("cpu_cores", changed(host={"cores": 7.5}), "warning", "7.5 cores for 2 GPUs", "more cores"),
    (
        "numa",
        changed(host={"cpu_nodes": frozenset({0})}),
        "warning",
        "GPU 1 on node 1; cores on 0",
        "numactl",
    ),
    (
        "cpu_governor",
        changed(host={"governors": frozenset({"powersave", "performance"})}),
        "warning",
        "powersave",
        "cpupower",
    ),
    ("ram", changed(host={"ram_gib": 15.0}), "warning", "15 GiB; 16 GiB are advisable", "limit"),
    ("dev_shm", changed(host={"shm_free_gib": 0.0625}), "problem", "0.06 GiB free", "--shm-size"),
    ("dev_shm", changed(host={"shm_free_gib": None}), "problem", "there is no /dev/shm", "--shm-size"),
    (
        "dev_shm",
        changed(host={"shm_free_gib": 0.0625}, cards=CARDS[:1]),
        "warning",
        "0.06 GiB free",
        "--shm-size",
    ),
    ("disk", changed(disk={"mb_per_s": 120.0}), "warning", "/data: 120 MB/s", "NVMe"),
]

# Not wrong, or not to be known: check, machine, level, words of the evidence.
FINE = [
    ("driver_for_cuda", changed(probe={"cuda": None}), "unknown", "CUDA unknown"),
    (
        "gpus_seen",
        dataclasses.replace(changed(**NO_GPU), tensorflow=tensorflow(devices={"gpus": 0}).tensorflow),
        "unknown",
        "NVML sees 0 GPUs",
    ),
    (
        "xla",
        tensorflow(**{"import": {"error": CUBLAS}, "devices": None}, **NOT_REACHED),
        "unknown",
        "imported",
    ),
    (
        "xla",
        tensorflow(ended="killed by SIGSEGV", devices=None, **NOT_REACHED),
        "unknown",
        "ended at 'devices'",
    ),
    ("compute_capability", second_card(gpu=gpu(compute_capability=(8, 6))), "ok", "8.6"),
    ("compute_capability", second_card(gpu=gpu(compute_capability=None)), "unknown", "not known"),
    ("cuda_packages", changed(software={"packages": {}}), "ok", "the machine's own libraries"),
    ("nccl", tensorflow(libraries={"cudnn": None, "nccl": None}), "unknown", "not loaded"),
    ("packages", changed(software={"requirements": ()}), "unknown", "not installed as a package"),
    ("xid", changed(kernel_log=None), "unknown", "not readable"),
    ("memory_errors", second_card(ecc=None), "unknown", "no ECC"),
    ("memory_errors", second_card(ecc_errors_corrected=5), "ok", "corrected errors: 5"),
    ("pcie", second_card(load=None), "unknown", "idle: only a load raises it"),
    ("links", changed(cards=CARDS[:1]), "unknown", "fewer than two"),
    (
        "load",
        dataclasses.replace(SOUND, load_left_out="others use the GPUs"),
        "unknown",
        "others use the GPUs",
    ),
    ("load", tensorflow(load={"error": "TimeoutError: no time was left for it"}), "unknown", "no time"),
    ("throttling", second_card(load=None), "unknown", "not seen under load"),
    ("numa", second_card(numa_node=None), "unknown", "not known"),
    (
        "cpu_governor",
        changed(host={"governors": frozenset({"powersave"}), "governor_driver": "intel_pstate"}),
        "ok",
        "powersave",
    ),
    ("cpu_governor", changed(host={"governors": frozenset()}), "unknown", "virtual machines"),
    (
        "disk",
        changed(disk={"mb_per_s": None, "reason": "there is no such folder"}),
        "unknown",
        "no such folder",
    ),
]


def find(name: str, facts) -> Finding:
    (finding,) = [finding for finding in examine(facts) if finding.name == name]
    return finding


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.__module__}.{check.__name__}")
def test_a_sound_machine_is_ok(check):
    finding = check(SOUND)
    assert (finding.level, finding.fix) == ("ok", ""), finding
    assert finding.evidence


@pytest.mark.parametrize(("name", "facts", "level", "evidence", "fix"), CASES)
def test_what_is_wrong_is_found_with_evidence_and_fix(name, facts, level, evidence, fix):
    finding = find(name, facts)
    assert finding.level == level, finding
    assert evidence in finding.evidence
    assert finding.fix
    assert fix in finding.fix


@pytest.mark.parametrize(("name", "facts", "level", "evidence"), FINE)
def test_what_is_fine_or_unknown_is_not_called_wrong(name, facts, level, evidence):
    finding = find(name, facts)
    assert (finding.level, finding.fix if level == "ok" else "") == (level, ""), finding
    assert evidence in finding.evidence


def test_cards_that_differ_are_told_apart_the_worst_first_and_only_its_fix():
    without_ecc = dataclasses.replace(CARDS[0].idle, ecc=False)
    broken = second_card(row_remapping_failed=True).cards[1]
    first = dataclasses.replace(CARDS[0], idle=without_ecc, load=None)
    finding = find("memory_errors", changed(cards=(first, broken, first)))
    assert finding.evidence == (
        "GPU 1: remapping a broken memory row failed; GPU 0, 2: ECC is off: memory errors stay unseen"
    )
    assert (finding.level, finding.fix) == ("problem", "have the card replaced")


def test_every_check_has_a_case_of_something_wrong():
    names = [finding.name for finding in examine(SOUND)]
    assert len(set(names)) == len(names)
    assert {case[0] for case in CASES} == set(names)


def test_without_a_gpu_nothing_about_gpus_is_a_problem():
    stages = {"devices": {"gpus": 0}, "product": {"sums": {"CPU:0": 4096.0}, "expected": 4096.0}}
    without = dataclasses.replace(
        changed(**NO_GPU, host={"nvidia_devices": 0}), tensorflow=tensorflow(**stages).tensorflow
    )
    assert worst(finding.level for finding in examine(without)) == "warning"
    missing_driver = DLOPEN.replace("libcudnn.so.9", "libcuda.so.1")
    told = {"product": {"error": "InternalError: no"}, "devices": {"gpus": 0}}
    failed = tensorflow(messages=missing_driver, **told).tensorflow
    assert "libcuda" not in find("xla", dataclasses.replace(without, tensorflow=failed)).fix


def test_a_loose_limit_on_the_build_number_of_a_package_does_not_bind_the_library():
    assert find("cudnn", tensorflow(libraries={"cudnn": "9.3.0", "nccl": None})).level == "ok"


def deadline(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def child(code: str, until_s: float | None = None, **variables: str):
    """What `run_child` makes of a Python process, and the stages in the order of their calls."""
    calls: list[str] = []
    code = f"import os, sys, time\ntell = lambda s: print('tfbench.doctor: ' + s, flush=True)\n{code}"
    command = [sys.executable, "-c", code]
    return run_child(command, until_s or deadline(), calls.append, environment(**variables)), calls


def test_child_tells_its_stages_and_other_output_is_left_out():
    told, calls = child(
        'print("hello"); tell(\'{"stage": "import", "version": "1"}\'); tell(\'{"stage": "devices"}\')'
    )
    assert told.stages == {"import": {"version": "1"}, "devices": {}}
    assert (told.ended, told.in_time, calls) == ("", True, ["import", "devices", ""])


@pytest.mark.parametrize(
    ("end", "ended"),
    [("os.abort()", "killed by SIGABRT"), ("sys.exit(3)", "exit code 3")],
)
def test_child_that_crashes_keeps_its_stages_and_last_words(end, ended):
    told, calls = child(
        f'tell(\'{{"stage": "import"}}\'); print("F0 Check failed", file=sys.stderr, flush=True); {end}'
    )
    assert (list(told.stages), told.ended, told.in_time) == (["import"], ended, True)
    assert "F0 Check failed" in told.messages
    assert calls == ["import", ""]


def test_child_that_hangs_is_killed_with_its_children_at_the_deadline(tmp_path):
    alive = tmp_path / "alive"
    grandchild = f"import time; time.sleep(5); open({str(alive)!r}, 'w')"
    code = (
        f"import subprocess; subprocess.Popen([sys.executable, '-c', {grandchild!r}])\n"
        'tell(\'{"stage": "import"}\'); time.sleep(600)'
    )
    told, calls = child(code, deadline(2.0))
    assert (list(told.stages), told.in_time, calls) == (["import"], False, ["import", ""])
    time.sleep(4)
    assert not alive.exists()


def test_a_line_that_a_crash_has_torn_is_no_stage():
    told, _ = child('os.write(1, b\'tfbench.doctor: {"stage": "imp\'); os.abort()')
    assert (told.stages, told.ended) == ({}, "killed by SIGABRT")


def test_kinds_of_builds_are_told_apart():
    stage = tensorflow(
        **{"import": STAGES["import"] | {"compute_capabilities": ["sm_80", "sm_90a", "sm_120"]}}
    )
    assert find("compute_capability", stage).level == "ok"
    stage = tensorflow(**{"import": STAGES["import"] | {"compute_capabilities": ["sm_80", "sm_120"]}})
    assert find("compute_capability", stage).level == "problem"


def test_child_gets_the_environment_that_names_missing_libraries():
    told, _ = child("print(os.environ['TF_CPP_VMODULE'], os.environ['CUDA_DEVICE_ORDER'], file=sys.stderr)")
    assert told.messages.split() == ["dso_loader=1", "PCI_BUS_ID"]


def test_within_gives_the_answer_raises_its_error_and_leaves_what_hangs():
    assert within(10, lambda: 3) == 3
    with pytest.raises(OSError, match="gone"):
        within(10, lambda: (_ for _ in ()).throw(OSError("gone")))
    release = threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        within(0.05, release.wait)
    release.set()


def test_gpus_are_read_with_their_ways_and_neighbours():
    cards = [
        FakeCard(uuid=UUIDS[0], memory_used=12 * GIB, processes={7: 12 * GIB}),
        FakeCard(uuid=UUIDS[1], bus_id="00000000:02:00.0"),
        FakeCard(uuid="GPU-c", bus_id="00000000:03:00.0", mig_on=True, instances={4: mig_instance("MIG-1")}),
    ]
    nvml = MachineNvml(*cards, process_names={7: "/usr/bin/python"})
    found, mig, seen, pairs = gather.read_gpus(nvml, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert (found.installed, mig) == (3, (None, None, 1))
    assert [card.gpu.uuid for card in seen] == list(UUIDS)
    assert seen[0].busy.startswith("already had 12.0 GiB in use")
    assert "7 python" in seen[0].busy
    assert (seen[1].busy, seen[1].slowdown_c, seen[1].idle.pcie_width) == ("", 90, 16)
    assert pairs == (Pair(first=0, second=1, path="between NUMA nodes", peer_access=True),)
    nvml.peer_status = pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED
    ((pair,),) = gather.read_gpus(nvml, {"CUDA_VISIBLE_DEVICES": "0,1"})[3:]
    assert pair.peer_access is False
    assert nvml.references == 0


def test_fields_that_nvml_does_not_have_are_unknown_and_leave_the_others():
    functions = (
        "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus", "nvmlDeviceGetTemperatureThreshold",
    )  # fmt: skip
    failing = dict.fromkeys(functions, pynvml.NVMLError_NotSupported)
    nvml = MachineNvml(
        FakeCard(uuid=UUIDS[0], failing=failing), FakeCard(uuid=UUIDS[1], bus_id="00000000:02:00.0")
    )
    _, _, cards, pairs = gather.read_gpus(nvml, {})
    assert (cards[0].slowdown_c, cards[0].idle.power_limit_w, cards[1].slowdown_c) == (None, 700.0, 90)
    assert pairs == (Pair(first=0, second=1, path=None, peer_access=None),)


def test_a_driver_that_hangs_or_is_missing_is_said():
    release = threading.Event()

    class Hanging(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            release.wait(60)
            super().nvmlInit()

    found, _, cards, _ = gather.read_gpus(Hanging(FakeCard()), {}, seconds=0.05)
    release.set()
    assert (found.driver, cards) == (None, ())
    assert "does not answer" in found.reason
    found, mig, cards, pairs = gather.read_gpus(FakeNvml(init_error=pynvml.NVMLError_DriverNotLoaded), {})
    assert (mig, cards, pairs) == ((), (), ())
    assert "not loaded" in found.reason


def test_host_is_read_from_the_kernels_folders(tmp_path):
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    core = f"sys/devices/system/cpu/cpu{min(os.sched_getaffinity(0))}"
    write(f"{core}/cpufreq/scaling_governor", "powersave\n")
    write(f"{core}/cpufreq/scaling_driver", "acpi-cpufreq\n")
    (tmp_path / core / "node3").mkdir()
    write("sys/fs/cgroup/cpu.max", "50000 100000\n")
    write("sys/fs/cgroup/memory.max", str(2**30))
    write("sys/bus/pci/devices/a/vendor", "0x10de\n")
    write("sys/bus/pci/devices/a/class", "0x030200\n")
    write("sys/bus/pci/devices/b/vendor", "0x10de\n")
    write("sys/bus/pci/devices/b/class", "0x068000\n")  # an NVSwitch is no GPU
    host = gather.read_host(tmp_path)
    assert (host.governors, host.governor_driver, host.cpu_nodes) == ({"powersave"}, "acpi-cpufreq", {3})
    assert (host.cores, host.ram_gib, host.nvidia_devices, host.shm_free_gib) == (0.5, 1.0, 1, None)


def test_disk_is_read_only_where_a_folder_has_large_files(tmp_path):
    assert "no such folder" in gather.read_disk(tmp_path / "none").reason
    (tmp_path / "small").write_bytes(b"x")
    assert "16 MiB" in gather.read_disk(tmp_path).reason
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "large").write_bytes(bytes(2**24))
    disk = gather.read_disk(tmp_path)
    assert disk.mb_per_s > 0
    assert disk.reason == ""
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "large", "small"]


def test_kernel_log_is_the_first_that_may_be_read():
    def command(code: str) -> tuple[str, ...]:
        return sys.executable, "-c", code

    refused, log = command("import sys; sys.exit('not permitted')"), command("print('a\\nNVRM: b\\nc')")
    assert gather.kernel_log([("no-such-command",), refused, log]) == ("NVRM: b",)
    assert gather.kernel_log([refused]) is None


def test_software_is_what_is_installed_and_what_the_extra_adds(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    software = gather.read_software({"KERAS_HOME": str(tmp_path)})
    assert {"tensorflow", "nvidia-ml-py", "rich"} <= set(software.packages)
    assert {line.split("-")[0] for line in software.cuda_requirements} == {"nvidia"}
    assert software.keras_config_backend == "jax"
    (tmp_path / "keras.json").write_text("{")
    assert gather.read_software({"KERAS_HOME": str(tmp_path)}).keras_config_backend is None


LOADING = """
import json, time
def tell(stage, **facts): print("tfbench.doctor: " + json.dumps({"stage": stage, **facts}), flush=True)
tell("load_begins"); start_s = time.monotonic(); time.sleep(0.6); tell("load_half"); time.sleep(0.6)
tell("load", start_s=start_s, end_s=time.monotonic(), tflops=[1.0, 2.0])
"""


def gathered(*cards: FakeCard, code: str = LOADING):
    return gather.gather(
        load_s=20.0,
        data_dir=Path("/nonexistent"),
        deadline_s=deadline(20),
        nvml=MachineNvml(*cards),
        environ={"PATH": os.environ["PATH"]},
        child=(sys.executable, "-c", code),
    )


def test_load_is_watched_card_by_card():
    cards = (
        FakeCard(uuid=UUIDS[0], sm_clock=1455),
        FakeCard(uuid=UUIDS[1], bus_id="00000000:02:00.0", sm_clock=999),
    )
    first, second = (card.load for card in gathered(*cards).cards)
    assert (first.telemetry.sm_clock_mhz_mean, second.telemetry.sm_clock_mhz_mean) == (1455.0, 999.0)
    assert (first.tflops, second.tflops, second.card.pcie_generation) == (1.0, 2.0, 5)
    arguments = 'import sys; print(\'tfbench.doctor: {"stage": "load", "asked": %s}\' % sys.argv[1])'
    busy = gathered(cards[0], FakeCard(uuid=UUIDS[1], memory_used=2 * GIB), code=arguments)
    assert (busy.load_left_out, busy.tensorflow.stages["load"]["asked"]) == ("others use the GPUs", 0.0)
    assert [card.load for card in busy.cards] == [None, None]


def doctor(*flags: str, cwd: Path, env: dict[str, str] | None = None):
    return python("-m", "tfbench.doctor", *flags, cwd=cwd, env=env)


def test_doctor_on_this_machine_prints_json_alone(tmp_path):
    done = doctor("--json", "--load_s=0", cwd=tmp_path)
    told = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in told["findings"]}
    assert {name: findings[name]["level"] for name in ("tensorflow", "xla", "all_reduce")} == dict.fromkeys(
        ("tensorflow", "xla", "all_reduce"), "ok"
    )
    assert told["level"] == worst(finding["level"] for finding in told["findings"])
    assert done.returncode == (1 if told["level"] == "problem" else 0)
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_doctor_without_tensorflow_has_a_problem_and_a_table(tmp_path):
    done = doctor(cwd=tmp_path, env=environment_without_tensorflow(tmp_path / "blocker"))
    assert done.returncode == 1
    assert "AssertionError: tensorflow must not be imported" in done.stdout
    assert "→ reinstall it" in done.stdout
    assert "not reached" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("flag", ["--load_s=21", "--load_s=x", "--nonsense", "surplus"])
def test_refused_flags_are_named_at_once(tmp_path, flag):
    done = doctor(flag, cwd=tmp_path)
    assert done.returncode == 2
    assert flag.removeprefix("--").split("=")[0] in done.stdout
    assert "Traceback" not in done.stderr


CHILD = """
import json, time
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from tfbench.checks import child
child.gpus = lambda: ["CPU:0", "CPU:1"]
child.LOAD_SIZE, child.LEAST_LOAD_S = 64, 0.1
print(json.dumps([child.all_reduce(), child.compile_product()]))
child.tell("load", child.load(0.3, time.monotonic() + 60))
import tensorflow.python.distribute.distribute_lib as lib
first = lib.ReplicaContext.all_reduce
lib.ReplicaContext.all_reduce = lambda self, op, value: first(self, op, value) + tf.cast(
    self.replica_id_in_sync_group, tf.float32)
print(json.dumps(child.all_reduce()))
try:
    child.load(20.0, time.monotonic() + 1)
except TimeoutError as error:
    print(error)
"""


def test_all_reduce_and_load_on_two_logical_devices(tmp_path):
    done = python("-c", CHILD, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sound, begins, half, loaded, wrong, late = filter(None, done.stdout.splitlines())
    assert json.loads(sound)[0] == {"replicas": 2, "results": 2, "wrong": []}
    assert json.loads(sound)[1]["sums"] == {"CPU:0": 4096.0, "CPU:1": 4096.0}
    assert ("load_begins" in begins, "load_half" in half) == (True, True)
    told = json.loads(loaded.removeprefix("tfbench.doctor: "))
    assert told["end_s"] - told["start_s"] >= 0.3
    assert len(told["tflops"]) == 2
    assert json.loads(wrong)["wrong"] == [1]
    assert late == "no time was left for it"
