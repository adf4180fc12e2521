"""Checks of Python packages and settings. TensorFlow-free."""

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tfbench.checks.facts import Facts
from tfbench.checks.finding import Finding

# Distributions that write the same folder as tensorflow does.
_SAME_FOLDER = (
    "intel-tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-intel", "tf-nightly",
    "tf-nightly-cpu",
)  # fmt: skip
_WRAPPER = Version("12")  # since then pynvml brings no module of this name but requires nvidia-ml-py
_SLOWING = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "every launch waits for its end",
    ("NCCL_P2P_DISABLE", "1"): "GPUs exchange through the host",
    ("NCCL_SHM_DISABLE", "1"): "GPUs exchange through the network",
    ("NVIDIA_TF32_OVERRIDE", "0"): "TF32 is off whatever the precision says",
    ("TF_DETERMINISTIC_OPS", "1"): "slower kernels, as with --deterministic",
    ("TF_DISABLE_MKL", "1"): "plain CPU kernels",
}


def packages(facts: Facts) -> Finding:
    """The installed packages are those that tfbench requires."""
    wrong = []
    for line in map(Requirement, facts.software.requirements):
        version = facts.software.packages.get(canonicalize_name(line.name))
        if version is None or not line.specifier.contains(version, prereleases=True):
            wrong.append(f"{line.name} {version or 'is missing'} (needs {line.specifier or 'any'})")
    if wrong:
        return Finding("packages", "problem", "; ".join(wrong), "pip install --upgrade tfbench")
    if not facts.software.requirements:
        return Finding("packages", "unknown", "tfbench is not installed as a package", "pip install -e .")
    return Finding("packages", "ok", f"all {len(facts.software.requirements)} that tfbench requires fit")


def rival_packages(facts: Facts) -> Finding:
    """No two packages bring the same module."""
    installed = facts.software.packages
    rivals = [name for name in _SAME_FOLDER if name in installed] if "tensorflow" in installed else []
    if rivals:
        fix = f"pip uninstall {' '.join(rivals)} tensorflow, then pip install 'tfbench[cuda]'"
        return Finding("rival_packages", "problem", f"beside tensorflow: {', '.join(rivals)}", fix)
    if "pynvml" not in installed:
        return Finding("rival_packages", "ok", "none")
    version, fix = installed["pynvml"], "pip uninstall pynvml; pip install --force-reinstall nvidia-ml-py"
    if Version(version) < _WRAPPER:
        said = f"pynvml {version} is retired and hides nvidia-ml-py, whose module has the same name"
        return Finding("rival_packages", "problem", said, fix)
    return Finding("rival_packages", "warning", f"pynvml {version} is retired; tfbench does not need it", fix)


def keras(facts: Facts) -> Finding:
    """Keras is Keras 3 on TensorFlow."""
    environ = facts.software.environ
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        fix = "unset TF_USE_LEGACY_KERAS"
        return Finding("keras", "problem", "TF_USE_LEGACY_KERAS makes tf.keras Keras 2", fix)
    backend = environ.get("KERAS_BACKEND") or facts.software.keras_config_backend or "tensorflow"
    said = f"Keras {facts.software.packages.get('keras', 'not installed')}, backend {backend}"
    if backend != "tensorflow":
        return Finding(
            "keras", "warning", f"{said}; tfbench takes tensorflow all the same", "KERAS_BACKEND=tensorflow"
        )
    return Finding("keras", "ok", said)


def slowing_settings(facts: Facts) -> Finding:
    """No environment variable that makes runs slower."""
    environ = facts.software.environ
    found = {name: effect for (name, value), effect in _SLOWING.items() if environ.get(name) == value}
    if found:
        said = "; ".join(f"{name}={environ[name]}: {effect}" for name, effect in found.items())
        return Finding("slowing_settings", "warning", said, f"unset {' '.join(found)}")
    return Finding("slowing_settings", "ok", "none")
