"""The GPUs a CUDA process on this machine will see, read through NVML. TensorFlow-free."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import psutil
import pynvml

GIB = 2**30

# What NVML returns, with success, for a number that it does not have (NVML_VALUE_NOT_AVAILABLE).
_NOT_AVAILABLE = frozenset({2**32 - 1, 2**64 - 1})

_WITHOUT_NVML = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver: libnvidia-ml.so.1 is not on this machine "
    "(install the driver, or give the container its GPUs)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded (try nvidia-smi)",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated but not reloaded: "
    "its library and its kernel module differ (reboot)",
}


class Nvml:
    """NVML for the length of a `with` block: reads every field on its own and never raises for one.

    Args:
        nvml: The `pynvml` module, or what stands for it in a test.
        on_error: Called with the error of every failed read; default: nothing is told.

    Attributes:
        problem: Why NVML cannot be used; "" when it can.
    """

    def __init__(self, nvml: Any = pynvml, on_error: Callable[[Exception], None] | None = None):
        self._nvml = nvml
        self._on_error = on_error
        self.problem = "NVML is not initialised"

    def __enter__(self) -> Self:
        try:
            self._nvml.nvmlInit()
            self.problem = ""
        except pynvml.NVMLError as error:
            self.problem = _WITHOUT_NVML.get(error.value, f"NVML cannot be used: {error}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.problem:
            # A lost GPU or an unloaded driver makes shutdown fail; nothing is left to be done about it.
            with contextlib.suppress(pynvml.NVMLError):
                self._nvml.nvmlShutdown()
        self.problem = "NVML is not initialised"

    def read(self, function: str, *args: Any) -> Any:
        """What `nvml.<function>(*args)` returns, bytes decoded; None where it has no answer."""
        call = getattr(self._nvml, function, None)  # older releases of nvidia-ml-py lack the newest functions
        if call is None:
            return None
        try:
            value = call(*args)
        # A name that is not UTF-8 fails in nvidia-ml-py's own decoding; a library older than
        # nvidia-ml-py raises the mismatch error, which is not an NVMLError.
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, UnicodeDecodeError) as error:
            if self._on_error is not None:
                self._on_error(error)
            return None
        return decoded(value)

    def read_first(self, functions: tuple[str, ...], *args: Any) -> Any:
        """The answer of the first function that has one: the current name before the deprecated one."""
        return next((v for f in functions if (v := self.read(f, *args)) is not None), None)

    def memory(self, handle: Any) -> Any:
        """Memory of a card with `total` and `used` in bytes, or None.

        Version 2 leaves what the driver keeps for itself out of `used`; older drivers know version 1 only.
        """
        version_2 = self.read("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
        return version_2 if version_2 is not None else self.read("nvmlDeviceGetMemoryInfo", handle)


def decoded(value: Any) -> Any:
    """An NVML answer as Python has it: bytes as text, "not available" as None."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if isinstance(value, int) and value in _NOT_AVAILABLE else value


def scaled(value: int | None, unit: float) -> float | None:
    """`value` ÷ `unit`, or None where there is no value."""
    return None if value is None else value / unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device: a whole card or a MIG instance. A field that NVML does not answer is None."""

    index: int  # NVML's, in PCI bus order; of the card, for a MIG instance
    uuid: str | None
    pci_bus_id: str | None  # of the card, for a MIG instance
    name: str | None
    memory_gib: float | None
    compute_capability: tuple[int, int] | None
    is_mig: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """What NVML says of this machine."""

    gpus: tuple[Gpu, ...]  # in the order in which CUDA will number them
    installed: int  # cards that NVML can open, visible to CUDA or not
    driver: str | None
    cuda: str | None  # the newest CUDA that the driver runs, e.g. "13.0"
    reason: str  # why CUDA sees fewer GPUs than are installed, or none; "" if it sees them all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the defaults of a run depend on."""

    gpus: tuple[Gpu, ...]
    cpu_cores: int  # that this process may use
    ram_gib: float
    reason_without_gpu: str  # "" if there are GPUs


def probe(nvml: Any = pynvml, environ: Mapping[str, str] = os.environ) -> Probe:
    """GPUs that CUDA will enumerate, with the reason where there are none or fewer than installed.

    Args:
        nvml: The `pynvml` module, or what stands for it in a test.
        environ: Environment in which the CUDA process starts. CUDA_DEVICE_ORDER=PCI_BUS_ID is assumed.
    """
    with Nvml(nvml) as session:
        if session.problem:
            return Probe(gpus=(), installed=0, driver=None, cuda=None, reason=session.problem)
        cards, unreadable = _installed(session)
        gpus, reason = _select(cards, environ.get("CUDA_VISIBLE_DEVICES"))
        version = session.read_first(("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"))
        return Probe(
            gpus=tuple(gpus),
            installed=len(cards),
            driver=session.read("nvmlSystemGetDriverVersion"),
            cuda=None if version is None else f"{version // 1000}.{version % 1000 // 10}",
            reason="; ".join([*unreadable, *([reason] if reason else [])]),
        )


def visible_gpus(nvml: Any = pynvml, environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """GPUs that CUDA will enumerate, in its order; empty without a driver (see `probe` for the reason)."""
    return list(probe(nvml, environ).gpus)


def this_machine(nvml: Any = pynvml, environ: Mapping[str, str] = os.environ) -> Machine:
    """GPUs, cores and memory of this machine."""
    found = probe(nvml, environ)
    return Machine(
        gpus=found.gpus,
        cpu_cores=len(os.sched_getaffinity(0)),
        ram_gib=psutil.virtual_memory().total / GIB,
        reason_without_gpu="" if found.gpus else found.reason,
    )


def handle_of(nvml: Nvml, gpu: Gpu) -> Any:
    """NVML's handle of this very card, by UUID or PCI bus id, never by number; None if it is gone."""
    handle = None if gpu.uuid is None else nvml.read("nvmlDeviceGetHandleByUUID", gpu.uuid)
    if handle is None and gpu.pci_bus_id is not None and not gpu.is_mig:
        handle = nvml.read("nvmlDeviceGetHandleByPciBusId", gpu.pci_bus_id)
    return handle


@dataclasses.dataclass(frozen=True)
class _Card:
    """An installed card; with MIG on, its instances are what CUDA can use."""

    gpu: Gpu
    mig_on: bool
    instances: tuple[Gpu, ...]


def _installed(nvml: Nvml) -> tuple[list[_Card], list[str]]:
    """Cards that can be opened, in PCI bus order, and a sentence for each that cannot."""
    count = nvml.read("nvmlDeviceGetCount")
    if not count:
        return [], ["the NVIDIA driver finds no GPU"]
    cards, unreadable = [], []
    for index in range(count):
        handle = nvml.read("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            unreadable.append(f"GPU {index} of the driver cannot be opened")
            continue
        pci = nvml.read("nvmlDeviceGetPciInfo", handle)
        gpu = _gpu(nvml, handle, index, None if pci is None else decoded(pci.busId))
        mode = nvml.read("nvmlDeviceGetMigMode", handle)
        mig_on = mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        cards.append(_Card(gpu, mig_on, _instances(nvml, handle, gpu) if mig_on else ()))
    return cards, unreadable


def _gpu(nvml: Nvml, handle: Any, index: int, pci_bus_id: str | None) -> Gpu:
    memory = nvml.memory(handle)
    return Gpu(
        index=index,
        uuid=nvml.read("nvmlDeviceGetUUID", handle),
        pci_bus_id=pci_bus_id,
        name=nvml.read("nvmlDeviceGetName", handle),
        memory_gib=None if memory is None else scaled(decoded(memory.total), GIB),
        compute_capability=nvml.read("nvmlDeviceGetCudaComputeCapability", handle),
    )


def _instances(nvml: Nvml, handle: Any, card: Gpu) -> tuple[Gpu, ...]:
    """MIG instances of a card. Their numbers may have holes, so all of them are tried."""
    found = []
    for number in range(nvml.read("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        instance = nvml.read("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        if instance is not None:
            gpu = _gpu(nvml, instance, card.index, card.pci_bus_id)
            capability = gpu.compute_capability or card.compute_capability
            found.append(dataclasses.replace(gpu, is_mig=True, compute_capability=capability))
    return tuple(found)


def _select(cards: list[_Card], variable: str | None) -> tuple[list[Gpu], str]:
    """What CUDA makes of CUDA_VISIBLE_DEVICES, and a sentence on what it leaves out ("" if nothing).

    The rules are those of the CUDA programming guide (environment variables) and, for what it leaves
    open (repeated entries, indices and UUIDs mixed), those of PyTorch's emulation, torch.cuda.
    """
    if not cards:
        return [], ""
    chosen, reason = _whole(cards), ""
    if variable is not None:
        chosen, reason = _listed(cards, variable)
    migs = [gpu for gpu in chosen if gpu.is_mig]
    if migs and len(chosen) > 1:
        # MIG user guide, "CUDA device enumeration": one instance, and then no whole card beside it.
        left_out = f"of {len(chosen)} devices CUDA uses {migs[0].uuid} alone: one MIG instance in a process"
        return migs[:1], "; ".join(filter(None, (reason, left_out)))
    return chosen, reason


def _whole(cards: list[_Card]) -> list[Gpu]:
    """What CUDA finds by itself on each card: the card, or with MIG on its first instance, if any."""
    return [gpu for card in cards for gpu in (card.instances[:1] if card.mig_on else (card.gpu,))]


def _listed(cards: list[_Card], variable: str) -> tuple[list[Gpu], str]:
    """GPUs that the entries of CUDA_VISIBLE_DEVICES name, up to the first entry that names none."""
    setting = f"CUDA_VISIBLE_DEVICES={variable}"
    entries = [entry.strip() for entry in variable.split(",")]
    kind = _kind(entries[0])
    chosen: list[Gpu] = []
    for entry in entries:
        found = _named(cards, entry) if _kind(entry) == kind else []
        if len(found) != 1:
            if not chosen:
                return [], f"{setting} hides all GPUs (installed: {len(cards)})"
            return (
                chosen,
                f"{setting}: {entry!r} is no GPU here (installed: {len(cards)}), so CUDA stops there",
            )
        if found[0] in chosen:
            return [], f"{setting} names {entry!r} twice, so CUDA finds no GPU"
        chosen += found
    hidden = len(cards) > len({gpu.index for gpu in chosen})
    return chosen, f"{setting} hides the others (installed: {len(cards)})" if hidden else ""


def _kind(entry: str) -> str:
    """How an entry of CUDA_VISIBLE_DEVICES names a GPU: "GPU-", "MIG-" or "" by number."""
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else ""


def _named(cards: list[_Card], entry: str) -> list[Gpu]:
    """GPUs that one entry can mean; exactly one if it is valid."""
    if entry.startswith("MIG-"):
        return [gpu for card in cards for gpu in card.instances if (gpu.uuid or "").startswith(entry)]
    if entry.startswith("GPU-"):
        return _whole([card for card in cards if (card.gpu.uuid or "").startswith(entry)])
    number = re.match(r"\+?(\d+)", entry)  # as C's strtoul reads it: "1x" is 1, "x" and "-1" are none
    if number is None:
        return []
    return _whole(cards[int(number[1]) :][:1])
