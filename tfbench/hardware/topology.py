"""How the GPUs of a run reach each other, in the words of `nvidia-smi topo -m`. TensorFlow-free."""

import itertools
from collections.abc import Sequence
from typing import Any

import pynvml

from tfbench.hardware.gpus import Gpu, Nvml, decoded, handle_of

# nvml.h, nvmlGpuTopologyLevel_t, and the legend of `nvidia-smi topo -m`; the nearest first.
_PCIE_PATHS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}


def topology(gpus: Sequence[Gpu], nvml: Any = pynvml) -> str | None:
    """The link of the pair that is worst connected, such as "NV18", "PIX" or "SYS".

    Any NVLink is better than PCIe, more of them better than fewer.

    Args:
        gpus: of the run.
        nvml: The `pynvml` module, or what stands for it in a test.

    Returns:
        None with fewer than two GPUs, and where the driver does not say.
    """
    with Nvml(nvml) as session:
        handles = [handle_of(session, gpu) for gpu in gpus]
        if session.problem or None in handles:
            return None
        links = [_link(session, one, other) for one, other in itertools.combinations(handles, 2)]
    known = [link for link in links if link is not None]
    return max(known)[1] if known and len(known) == len(links) else None


def _link(nvml: Nvml, one: Any, other: Any) -> tuple[int, str] | None:
    """How bad the link of two cards is, to compare, and its name; None where the driver does not say."""
    if nvlinks := _nvlinks(nvml, one, other):
        return -nvlinks, f"NV{nvlinks}"
    level = nvml.read("nvmlDeviceGetTopologyCommonAncestor", one, other)
    return (1 + list(_PCIE_PATHS).index(level), _PCIE_PATHS[level]) if level in _PCIE_PATHS else None


def _nvlinks(nvml: Nvml, one: Any, other: Any) -> int:
    """Active NVLinks from a card to another, directly or through switches."""
    pci = nvml.read("nvmlDeviceGetPciInfo", other)
    peer = None if pci is None else decoded(pci.busId)
    return sum(
        _leads_to(nvml, one, link, peer)
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
        if nvml.read("nvmlDeviceGetNvLinkState", one, link) == pynvml.NVML_FEATURE_ENABLED
    )


def _leads_to(nvml: Nvml, card: Any, link: int, peer: str | None) -> bool:
    if nvml.read("nvmlDeviceGetNvLinkRemoteDeviceType", card, link) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return True
    remote = nvml.read("nvmlDeviceGetNvLinkRemotePciInfo", card, link)
    return remote is not None and decoded(remote.busId) == peer
