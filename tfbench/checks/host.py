"""Checks of the computer around the GPUs. TensorFlow-free."""

from tfbench.checks.facts import Facts
from tfbench.checks.finding import Finding

# A core decodes 240 to 310 ImageNet pictures a second and a GPU trains thousands: the least, not enough.
_CORES_PER_GPU = 4
_RAM_GIB = 4.0  # TensorFlow with a small model
_RAM_GIB_PER_GPU = 8.0  # twice what a ResNet-50 process of one GPU was seen to use
_SHM_GIB = 1.0  # what NCCL's and NVIDIA's containers ask for: --shm-size=1g; Docker's default is 64 MB
_DISK_MB_PER_S = 250.0  # ImageNet's pictures (110 kB) for 2,300 pictures/s, what eight cores decode
# These keep the clock low; intel_pstate's and amd-pstate-epp's own "powersave" follows the load.
_SLOW_GOVERNORS = frozenset({"powersave", "conservative", "userspace"})
_ACTIVE_DRIVERS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")


def cores(facts: Facts) -> Finding:
    """Enough CPU cores for input and launching."""
    said = f"{facts.host.cores:g} cores for {len(facts.cards)} GPUs"
    if facts.host.cores < _CORES_PER_GPU * len(facts.cards):
        fix = "give the job more cores: taskset, --cpus, --cpus-per-task"
        return Finding("cpu_cores", "warning", f"{said}, fewer than {_CORES_PER_GPU} a GPU", fix)
    return Finding("cpu_cores", "ok", said)


def numa(facts: Facts) -> Finding:
    """The cores that this process may use are near its GPUs."""
    nodes = {ordinal: card.numa_node for ordinal, card in enumerate(facts.cards)}
    if not facts.cards or None in nodes.values() or not facts.host.cpu_nodes:
        return Finding("numa", "unknown", "the NUMA nodes of GPUs and cores are not known")
    said = "; ".join(f"GPU {ordinal} on node {node}" for ordinal, node in nodes.items())
    said += f"; cores on {', '.join(map(str, sorted(facts.host.cpu_nodes)))}"
    if set(nodes.values()) - facts.host.cpu_nodes:
        return Finding("numa", "warning", said, "start with cores of the GPUs' nodes: numactl --cpunodebind")
    return Finding("numa", "ok", said)


def governor(facts: Facts) -> Finding:
    """The cores' clock follows the load."""
    seen = ", ".join(sorted(facts.host.governors))
    if not seen:
        return Finding("cpu_governor", "unknown", "the kernel does not say (usual in virtual machines)")
    said = f"{seen} ({facts.host.governor_driver})"
    if facts.host.governors & _SLOW_GOVERNORS and facts.host.governor_driver not in _ACTIVE_DRIVERS:
        return Finding("cpu_governor", "warning", said, "sudo cpupower frequency-set -g performance")
    return Finding("cpu_governor", "ok", said)


def ram(facts: Facts) -> Finding:
    """Enough host memory."""
    need_gib = max(_RAM_GIB, _RAM_GIB_PER_GPU * len(facts.cards))
    said = f"{facts.host.ram_gib:.0f} GiB"
    if facts.host.ram_gib < need_gib:
        return Finding(
            "ram", "warning", f"{said}; {need_gib:.0f} GiB are advisable", "raise the container's limit"
        )
    return Finding("ram", "ok", said)


def shared_memory(facts: Facts) -> Finding:
    """/dev/shm is large enough for NCCL."""
    free_gib, several = facts.host.shm_free_gib, len(facts.cards) > 1
    said = "there is no /dev/shm" if free_gib is None else f"{free_gib:.2f} GiB free in /dev/shm"
    if (free_gib or 0) < _SHM_GIB:
        return Finding(
            "dev_shm", "problem" if several else "warning", said, "docker run --shm-size=1g (or --ipc=host)"
        )
    return Finding("dev_shm", "ok", said)


def disk(facts: Facts) -> Finding:
    """The data folder is read fast enough for pictures."""
    seen = facts.disk
    if seen.mb_per_s is None:
        return Finding(
            "disk", "unknown", f"{seen.folder}: {seen.reason}", "name a folder of data with --data_dir"
        )
    said = f"{seen.folder}: {seen.mb_per_s:,.0f} MB/s"
    if seen.mb_per_s < _DISK_MB_PER_S:
        return Finding(
            "disk", "warning", f"{said}, below {_DISK_MB_PER_S:.0f}", "move the data to a local NVMe disk"
        )
    return Finding("disk", "ok", said)
