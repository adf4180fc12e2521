"""What can be wrong with a machine: one function for each check, from gathered facts to a finding."""

from collections.abc import Callable

from tfbench.checks import gpus, host, installation, software
from tfbench.checks.facts import Facts
from tfbench.checks.finding import Finding

# In the order of a person's questions: is it there, does it work, is it sound, is it fast.
CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    gpus.driver,
    gpus.visible,
    installation.imports,
    installation.driver_for_cuda,
    installation.gpus_seen,
    installation.compute_capability,
    installation.cuda_packages,
    installation.xla,
    installation.all_reduce,
    installation.cudnn,
    installation.nccl,
    software.packages,
    software.rival_packages,
    software.keras,
    software.slowing_settings,
    gpus.xid,
    gpus.memory_errors,
    gpus.mig,
    gpus.other_processes,
    gpus.persistence,
    gpus.power_limit,
    gpus.pcie,
    gpus.links,
    installation.load,
    gpus.throttling,
    host.cores,
    host.numa,
    host.governor,
    host.ram,
    host.shared_memory,
    host.disk,
)


def examine(facts: Facts) -> list[Finding]:
    """Every check's finding, in the order of CHECKS."""
    return [check(facts) for check in CHECKS]
