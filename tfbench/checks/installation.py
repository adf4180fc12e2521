"""Checks of TensorFlow and its CUDA libraries against the driver and the cards. TensorFlow-free."""

import re
from collections.abc import Mapping
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tfbench.checks.child import STAGES
from tfbench.checks.facts import Card, Facts
from tfbench.checks.finding import Finding, Verdict, of_cards

_REINSTALL = "pip install 'tfbench[cuda]'"
_MISSING = re.compile(r"(lib[\w.+-]+?\.so[\d.]*): cannot open shared object file")
_OPTIONAL = "libnvinfer"  # TensorRT, which tfbench does not use
_DRIVERS_OWN = "libcuda."
_ERROR_LINE = re.compile(r"^[EF]\d{4}|Error\b|\berror\b|Check failed|Fatal|Aborted")
_LINES_SHOWN = 3
_BUILT_FOR = re.compile(r"(sm|compute)_(\d+)(\d)")  # sm_90 and sm_90a: 9.0; sm_120: 12.0

# Which package brings a library, without its suffix for the CUDA version.
_PACKAGE_OF = {
    "libcublas": "nvidia-cublas",
    "libcudart": "nvidia-cuda-runtime",
    "libcudnn": "nvidia-cudnn",
    "libcufft": "nvidia-cufft",
    "libcupti": "nvidia-cuda-cupti",
    "libcurand": "nvidia-curand",
    "libcusolver": "nvidia-cusolver",
    "libcusparse": "nvidia-cusparse",
    "libnccl": "nvidia-nccl",
    "libnvJitLink": "nvidia-nvjitlink",
    "libnvrtc": "nvidia-cuda-nvrtc",
}
# CUDA's release notes, table "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version
# Compatibility", Linux.
_LEAST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def missing_libraries(facts: Facts) -> list[str]:
    """Shared libraries that TensorFlow's process could not open."""
    told = " ".join(str(stage.get("error", "")) for stage in facts.tensorflow.stages.values())
    found = dict.fromkeys(_MISSING.findall(f"{facts.tensorflow.messages}\n{told}"))
    # Where there is no card, it is no wonder that there is no driver.
    ignored = (_OPTIONAL,) if facts.cards else (_OPTIONAL, _DRIVERS_OWN)
    return [name for name in found if not name.startswith(ignored)]


def library_fix(facts: Facts) -> str:
    """What to install for the libraries that are missing; "" if none is."""
    fixes = []
    for library in missing_libraries(facts):
        if library.startswith(_DRIVERS_OWN):
            fixes.append(
                f"{library} is the NVIDIA driver's: install it, or start the container with its GPUs"
            )
            continue
        stem = next((package for name, package in _PACKAGE_OF.items() if library.startswith(name)), None)
        required = [Requirement(line).name for line in facts.software.cuda_requirements]
        package = stem and next((name for name in required if name.startswith(stem)), stem)
        fixes.append(
            f"{library}: pip install {package}" if package else f"{library}: add it to LD_LIBRARY_PATH"
        )
    return "; ".join(fixes)


def _last_errors(messages: str) -> str:
    """The last lines that say what went wrong, else the last lines."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    telling = [line for line in lines if _ERROR_LINE.search(line)]
    return " / ".join((telling or lines)[-_LINES_SHOWN:]) or "without a message"


def _failed(name: str, facts: Facts, stage: str, fix: str) -> Finding | None:
    """The finding on a stage that did not finish; None if it did."""
    tensorflow = facts.tensorflow
    told = tensorflow.stages.get(stage)
    if told is not None and "error" not in told:
        return None
    if told is not None:
        return Finding(name, "problem", _shortened(told["error"]), library_fix(facts) or fix)
    if "error" in tensorflow.stages.get("import", {}):
        return Finding(name, "unknown", "TensorFlow cannot be imported")
    reached = next(known for known in STAGES if known not in tensorflow.stages)
    if reached != stage:
        return Finding(name, "unknown", f"not reached: TensorFlow's process ended at {reached!r}")
    evidence = f"at {stage!r} {tensorflow.ended or 'it ended'}: {_last_errors(tensorflow.messages)}"
    if not tensorflow.in_time:
        fix = f"once more: a first start may compile kernels for minutes; else {fix}"
    return Finding(name, "problem", evidence, library_fix(facts) or fix)


def _shortened(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return " / ".join(lines if len(lines) <= _LINES_SHOWN else [lines[0], *lines[1 - _LINES_SHOWN :]])


def imports(facts: Facts) -> Finding:
    """TensorFlow can be imported."""
    fix = "reinstall it: pip install --force-reinstall 'tensorflow[and-cuda]'"
    if finding := _failed("tensorflow", facts, "import", fix):
        return finding
    told = facts.tensorflow.stages["import"]
    if not told["is_cuda_build"] and facts.cards:
        return Finding("tensorflow", "problem", f"{told['version']}, built without CUDA", _REINSTALL)
    build = (
        f"built for CUDA {told['cuda']}, cuDNN {told['cudnn']}" if told["is_cuda_build"] else "for the CPU"
    )
    return Finding("tensorflow", "ok", f"{told['version']}, {build}")


def driver_for_cuda(facts: Facts) -> Finding:
    """The driver runs the CUDA that TensorFlow was built with."""
    name = "driver_for_cuda"
    build, runs = facts.tensorflow.stages.get("import", {}).get("cuda"), facts.probe.cuda
    if not build or not runs:
        return Finding(
            name, "unknown", f"driver: CUDA {runs or 'unknown'}; TensorFlow: CUDA {build or 'unknown'}"
        )
    evidence = f"driver {facts.probe.driver} runs CUDA up to {runs}; TensorFlow is built with {build}"
    major = Version(build).major
    if Version(runs).major < major:
        least = _LEAST_DRIVER.get(major, "one for this CUDA")
        return Finding(name, "problem", evidence, f"install driver {least} or later")
    if Version(runs) < Version(".".join(build.split(".")[:2])):
        fix = "works for cards that the build knows; for newer cards install a driver of that CUDA version"
        return Finding(name, "warning", evidence, fix)
    return Finding(name, "ok", evidence)


def gpus_seen(facts: Facts) -> Finding:
    """TensorFlow sees the GPUs that NVML sees."""
    name = "gpus_seen"
    if finding := _failed(name, facts, "devices", _REINSTALL):
        return finding
    expected, seen = len(facts.probe.gpus), facts.tensorflow.stages["devices"]["gpus"]
    evidence = f"NVML sees {expected} GPUs, TensorFlow {seen}"
    if seen >= expected:
        return Finding(name, "ok" if seen else "unknown", evidence)
    if missing := missing_libraries(facts):
        evidence += f"; missing: {', '.join(missing)}"
    return Finding(name, "problem", evidence, library_fix(facts) or _REINSTALL)


def compute_capability(facts: Facts) -> Finding:
    """TensorFlow was built for the cards."""
    built = facts.tensorflow.stages.get("import", {}).get("compute_capabilities")
    if not built:
        return Finding("compute_capability", "unknown", "what TensorFlow is built for is not known")
    return of_cards("compute_capability", facts.cards, lambda card: _capability(card, built))


def _capability(card: Card, built: list[str]) -> Verdict:
    """sm_XY is machine code, for X.Y and later X.*; compute_XY is PTX, which the driver compiles."""
    capability = card.gpu.compute_capability
    if capability is None:
        return "unknown", "its compute capability is not known", ""
    versions = [(m[1], int(m[2]), int(m[3])) for text in built if (m := _BUILT_FOR.match(text))]
    said = f"compute capability {capability[0]}.{capability[1]}, TensorFlow has {', '.join(built)}"
    if any(
        kind == "sm" and major == capability[0] and (major, minor) <= capability
        for kind, major, minor in versions
    ):
        return "ok", said, ""
    if ("compute", *capability) in versions:
        return "ok", f"{said}: compiled by the driver at the first start, then cached", ""
    if any(kind == "compute" and (major, minor) < capability for kind, major, minor in versions):
        fix = "use a TensorFlow built for this card if there is one: kernels are compiled anew and may fail"
        return "warning", said, fix
    return "problem", said, "use a TensorFlow release that was built for this card"


def cudnn(facts: Facts) -> Finding:
    """The loaded cuDNN is one that TensorFlow works with."""
    wrong = re.search(r"Loaded runtime CuDNN library: .*", facts.tensorflow.messages)
    if wrong:
        return Finding("cudnn", "problem", wrong[0], _package_fix(facts, "nvidia-cudnn"))
    return _loaded("cudnn", "nvidia-cudnn", facts)


def nccl(facts: Facts) -> Finding:
    """The loaded NCCL is one that TensorFlow works with."""
    return _loaded("nccl", "nvidia-nccl", facts)


def _loaded(name: str, package: str, facts: Facts) -> Finding:
    if finding := _failed(name, facts, "libraries", _REINSTALL):
        return finding
    version = facts.tensorflow.stages["libraries"][name]
    if version is None:
        return Finding(name, "unknown", "not loaded by TensorFlow")
    requirement = _requirement(facts, package)
    if requirement is None:
        return Finding(name, "unknown", f"{version} is loaded; what TensorFlow needs is not known")
    wanted = _first_three(requirement.specifier)
    evidence = f"{version} is loaded; TensorFlow needs {wanted}"
    if wanted.contains(version):
        return Finding(name, "ok", evidence)
    return Finding(name, "problem", evidence, _package_fix(facts, package))


def _requirement(facts: Facts, package: str) -> Requirement | None:
    lines = map(Requirement, facts.software.cuda_requirements)
    return next((line for line in lines if line.name.startswith(package)), None)


def _package_fix(facts: Facts, package: str) -> str:
    requirement = _requirement(facts, package)
    wanted = f"{requirement.name}{requirement.specifier}" if requirement else package
    return f"pip install '{wanted}', and take another one out of LD_LIBRARY_PATH"


def _first_three(specifiers: SpecifierSet) -> SpecifierSet:
    """The limits in the library's own numbers: a package's fourth is its build, which no library tells."""
    return SpecifierSet(",".join(f"{s.operator}{'.'.join(s.version.split('.')[:3])}" for s in specifiers))


def cuda_packages(facts: Facts) -> Finding:
    """The pip packages of CUDA fit TensorFlow, unless it found all it needs elsewhere."""
    name, installed = "cuda_packages", facts.software.packages
    if not facts.cards:
        return Finding(name, "unknown", "not needed without a GPU")
    needed = [Requirement(line) for line in facts.software.cuda_requirements]
    if not needed:
        return Finding(name, "unknown", "tensorflow is not installed as a package")
    versions = [(line, installed.get(canonicalize_name(line.name))) for line in needed]
    missing = [line.name for line, version in versions if version is None]
    wrong = [
        f"{line.name} {version} (needs {line.specifier})"
        for line, version in versions
        if version is not None and not line.specifier.contains(version, prereleases=True)
    ]
    works = facts.tensorflow.stages.get("devices", {}).get("gpus", 0) >= len(facts.cards)
    if wrong:
        return Finding(name, "warning" if works else "problem", f"do not fit: {', '.join(wrong)}", _REINSTALL)
    if missing:
        elsewhere = "; the machine's own libraries are used" if works else ""
        evidence = f"not installed: {', '.join(missing)}{elsewhere}"
        return Finding(name, "ok" if works else "problem", evidence, "" if works else _REINSTALL)
    return Finding(name, "ok", f"all {len(needed)} are installed and fit")


def xla(facts: Facts) -> Finding:
    """XLA compiles and its code is right: it needs ptxas and libdevice only now."""
    toolchain = _requirement(facts, "nvidia-cuda-nvcc")
    package = toolchain.name if toolchain else "nvidia-cuda-nvcc"
    fix = f"pip install {package} (ptxas, libdevice), or XLA_FLAGS=--xla_gpu_cuda_data_dir=CUDA's folder"
    if finding := _failed("xla", facts, "product", fix):
        return finding
    told = facts.tensorflow.stages["product"]
    wrong = {device: total for device, total in told["sums"].items() if total != told["expected"]}
    if wrong:
        said = ", ".join(f"{device} gave {total}" for device, total in wrong.items())
        return Finding(
            "xla", "problem", f"{said}, not {told['expected']}", "do not trust this device's results"
        )
    return Finding("xla", "ok", f"compiled and right on {', '.join(told['sums'])}")


def all_reduce(facts: Facts) -> Finding:
    """MirroredStrategy sums over all devices, and the sums are exact."""
    fix = "NCCL_DEBUG=INFO shows more; try NCCL_P2P_DISABLE=1; a larger /dev/shm; IOMMU (ACS) off"
    if finding := _failed("all_reduce", facts, "all_reduce", fix):
        return finding
    told = facts.tensorflow.stages["all_reduce"]
    if told["wrong"] or told["results"] != told["replicas"]:
        evidence = (
            f"{told['results']} of {told['replicas']} replicas answered; wrong sums on: {told['wrong']}"
        )
        return Finding("all_reduce", "problem", evidence, fix)
    if told["replicas"] == 1:
        return Finding("all_reduce", "ok", "one device: nothing to sum over")
    return Finding("all_reduce", "ok", f"exact on all {told['replicas']} replicas")


def load(facts: Facts) -> Finding:
    """The GPUs got through the load."""
    if not facts.cards:
        return Finding("load", "unknown", "no GPU is visible")
    if facts.load_left_out:
        return Finding("load", "unknown", f"left out: {facts.load_left_out}")
    told: Mapping[str, Any] = facts.tensorflow.stages.get("load", {})
    if str(told.get("error", "")).startswith("TimeoutError"):
        return Finding("load", "unknown", "TensorFlow's start left no time for it")
    if finding := _failed("load", facts, "load", "see the kernel log (xid) and the messages"):
        return finding
    if not told["tflops"]:
        return Finding("load", "unknown", "TensorFlow sees no GPU")
    rates = ", ".join(f"{rate:,.0f}" for rate in told["tflops"])
    seconds = told["end_s"] - told["start_s"]
    evidence = f"{seconds:.0f} s of float16 products on all; then each alone: {rates} TFLOP/s"
    slowest, fastest = min(told["tflops"]), max(told["tflops"])
    alike = len({card.gpu.name for card in facts.cards}) == 1
    if alike and slowest < 0.9 * fastest:
        return Finding(
            "load", "warning", evidence, "one card is slower than its like: compare clocks and power"
        )
    return Finding("load", "ok", evidence)
