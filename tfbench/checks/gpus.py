"""Checks of the driver and the cards. TensorFlow-free."""

import re

from tfbench.checks.facts import Card, Facts
from tfbench.checks.finding import Finding, Verdict, of_cards

_NEAR_C = 5  # degrees below the slowdown that are close
_LEAST_CLOCK = 0.9  # share of the highest clock that a loaded card should reach
_HARDWARE_REASONS = {
    "hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown", "reliability",
}  # fmt: skip
# NVIDIA, "XID Errors", the catalogue: those that point to the card, its memory or its links.
_HARDWARE_XIDS = {
    48: "double-bit ECC error", 61: "microcontroller breakpoint", 62: "microcontroller halt",
    64: "row remapping failed", 74: "NVLink error", 79: "fallen off the bus",
    92: "many single-bit ECC errors",
    95: "uncontained ECC error", 119: "GSP does not answer", 120: "GSP error", 140: "unrecovered ECC error",
}  # fmt: skip
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([\da-fA-F:.]+)\): (\d+)")


def driver(facts: Facts) -> Finding:
    """There is a driver that answers, and it finds cards."""
    probe = facts.probe
    if probe.driver is None and not facts.host.nvidia_devices:
        return Finding("driver", "warning", f"no NVIDIA card on the PCI bus; {probe.reason}", "use --gpus=0")
    if probe.driver is None or not probe.installed:
        fix = "install or reload the driver, or start the container with its GPUs; nvidia-smi must list them"
        return Finding("driver", "problem", probe.reason, fix)
    return Finding("driver", "ok", f"driver {probe.driver}, CUDA up to {probe.cuda}, {probe.installed} GPUs")


def visible(facts: Facts) -> Finding:
    """CUDA sees all cards that are installed."""
    probe = facts.probe
    if not probe.installed:
        return Finding("visible_gpus", "unknown", "no GPU is installed")
    names = ", ".join(gpu.name or "without a name" for gpu in probe.gpus)
    if "cannot be opened" in probe.reason:
        fix = "see the kernel log (xid); reset the card or reboot"
        return Finding("visible_gpus", "problem", probe.reason, fix)
    if probe.reason:
        return Finding(
            "visible_gpus", "warning", probe.reason, "unset CUDA_VISIBLE_DEVICES if this is not meant"
        )
    return Finding("visible_gpus", "ok", f"all {probe.installed}: {names}")


def pcie(facts: Facts) -> Finding:
    """Each card uses all lanes, and under load the highest generation, of its slot."""
    return of_cards("pcie", facts.cards, _pcie)


def _pcie(card: Card) -> Verdict:
    loaded = card.load.card if card.load else None
    now = loaded or card.idle
    generation, width = now.pcie_generation, now.pcie_width
    if generation is None or width is None:
        return "unknown", "its PCIe link is not known", ""
    said = f"generation {generation} of {now.pcie_generation_max}, {width} of {now.pcie_width_max} lanes"
    if width < (now.pcie_width_max or width):
        return "problem", said, "reseat the card or its riser; look for lane sharing in the board's manual"
    if generation == (now.pcie_generation_max or generation):
        return "ok", said, ""
    if loaded is None:
        return "unknown", f"{said}, idle: only a load raises it", ""
    return "problem", f"{said} under load", "check the BIOS setting of the slot, the riser and its cable"


def links(facts: Facts) -> Finding:
    """GPUs reach each other without the host, and have equally many NVLinks."""
    if len(facts.cards) < 2:
        return Finding("links", "unknown", "fewer than two GPUs")
    active = [card.idle.nvlinks_active for card in facts.cards]
    counts = ", ".join("none" if links is None else str(links) for links in active)
    paths = {pair.path for pair in facts.pairs if pair.path}
    said = f"NVLinks: {counts}; PCIe path: {', '.join(sorted(paths)) or 'unknown'}"
    if len(set(active)) > 1 and len({card.gpu.name for card in facts.cards}) == 1:
        fix = "nvidia-smi nvlink --status; check the bridge or the fabric manager"
        return Finding("links", "problem", f"cards of one kind differ: {said}", fix)
    if 0 in active:
        return Finding(
            "links", "warning", f"no NVLink is active: {said}", "check the bridge or the fabric manager"
        )
    cut = [f"{pair.first} and {pair.second}" for pair in facts.pairs if pair.peer_access is False]
    if cut:
        fix = "sums go through the host: IOMMU (ACS) off, or cards under one switch"
        return Finding("links", "warning", f"no peer access between GPU {', '.join(cut)}; {said}", fix)
    return Finding("links", "ok", said)


def persistence(facts: Facts) -> Finding:
    """The driver stays loaded between runs."""
    return of_cards("persistence", facts.cards, _persistence)


def _persistence(card: Card) -> Verdict:
    if card.idle.persistence is None:
        return "unknown", "persistence mode is not known", ""
    if card.idle.persistence:
        return "ok", "persistence mode on", ""
    return "warning", "persistence mode off: every start loads the driver", "sudo nvidia-smi -pm 1"


def memory_errors(facts: Facts) -> Finding:
    """ECC is on and has nothing to report; no memory row waits for or failed remapping."""
    return of_cards("memory_errors", facts.cards, _memory_errors)


def _memory_errors(card: Card) -> Verdict:
    now = card.load.card if card.load and card.load.card else card.idle
    if now.row_remapping_failed:
        return "problem", "remapping a broken memory row failed", "have the card replaced"
    if now.ecc_errors_uncorrected:
        return (
            "problem",
            f"{now.ecc_errors_uncorrected} uncorrected ECC errors",
            "reset the card; if they return, replace it",
        )
    if now.row_remapping_pending:
        return "warning", "a memory row waits for remapping", "reset the card when it is free: nvidia-smi -r"
    if now.ecc is False:
        return "warning", "ECC is off: memory errors stay unseen", "sudo nvidia-smi -e 1, then reboot"
    if now.ecc is None:
        return "unknown", "no ECC on this card, or not readable", ""
    rows = (now.rows_remapped_corrected or 0) + (now.rows_remapped_uncorrected or 0)
    corrected = now.ecc_errors_corrected
    return (
        "ok",
        f"ECC on, corrected errors: {'unknown' if corrected is None else corrected}, remapped rows: {rows}",
        "",
    )


def xid(facts: Facts) -> Finding:
    """The driver has logged no error of a card since boot."""
    if facts.kernel_log is None:
        return Finding(
            "xid", "unknown", "the kernel log is not readable here", "look as root: dmesg | grep Xid"
        )
    found: dict[tuple[int, str], int] = {}
    for line in facts.kernel_log:
        if match := _XID.search(line):
            key = int(match[2]), match[1]
            found[key] = found.get(key, 0) + 1
    if not found:
        return Finding("xid", "ok", "none in the kernel log")
    said = "; ".join(
        f"Xid {number} ({_HARDWARE_XIDS.get(number, 'the card may be sound')}) on {where}, {times} times"
        for (number, where), times in sorted(found.items())
    )
    if any(number in _HARDWARE_XIDS for number, _ in found):
        return Finding(
            "xid", "problem", said, "drain the machine, run dcgmi diag -r 3, look at NVIDIA's list of Xids"
        )
    return Finding("xid", "warning", said, "most come from programs; look at NVIDIA's list of Xids")


def power_limit(facts: Facts) -> Finding:
    """The power limit is the card's default."""
    return of_cards("power_limit", facts.cards, _power_limit)


def _power_limit(card: Card) -> Verdict:
    limit_w, default_w = card.idle.power_limit_w, card.idle.power_limit_default_w
    if limit_w is None or default_w is None:
        return "unknown", "its power limit is not known", ""
    said = f"{limit_w:.0f} W, default {default_w:.0f} W"
    if limit_w < default_w:
        return "warning", said, f"sudo nvidia-smi -pl {default_w:.0f}"
    return "ok", said, ""


def throttling(facts: Facts) -> Finding:
    """Under load the card is cool and its clock near its highest, or held down by the power limit alone."""
    return of_cards("throttling", facts.cards, _throttling)


def _throttling(card: Card) -> Verdict:
    seen = card.load.telemetry if card.load else None
    if seen is None or seen.sm_clock_mhz_mean is None:
        return "unknown", "not seen under load", ""
    reasons = set((seen.throttle_reasons or "").split("|")) - {""}
    highest = card.idle.sm_clock_mhz_max
    said = f"{seen.sm_clock_mhz_mean:,.0f} of {highest or '?'} MHz"
    said += "" if seen.temperature_c_max is None else f", {seen.temperature_c_max:.0f} °C"
    said += "" if seen.power_w_mean is None else f", {seen.power_w_mean:.0f} W"
    said += f" ({', '.join(sorted(reasons))})" if reasons else ""
    if reasons & _HARDWARE_REASONS:
        return "problem", said, "check airflow, fans, power cables and the power supply"
    near = card.slowdown_c is not None and (seen.temperature_c_max or 0) >= card.slowdown_c - _NEAR_C
    if near:
        return "warning", f"{said}; it slows down at {card.slowdown_c} °C", "check airflow and fans"
    if highest and seen.sm_clock_mhz_mean < _LEAST_CLOCK * highest and "sw_power_cap" not in reasons:
        return "warning", said, "clocks are locked low: sudo nvidia-smi -rgc; sudo nvidia-smi -rac"
    return "ok", said, ""


def other_processes(facts: Facts) -> Finding:
    """Nobody else uses the cards."""
    fix = "wait for them or choose other cards with CUDA_VISIBLE_DEVICES"
    return of_cards(
        "other_processes",
        facts.cards,
        lambda card: ("warning", card.busy, fix) if card.busy else ("ok", "free", ""),
    )


def mig(facts: Facts) -> Finding:
    """Cards are whole: MIG gives a process one instance of one card."""
    if not facts.probe.installed:
        return Finding("mig", "unknown", "no GPU is installed")
    on = {index: count for index, count in enumerate(facts.mig_instances) if count is not None}
    if not on:
        return Finding("mig", "ok", "off")
    said = ", ".join(f"GPU {index} has {count} instances" for index, count in on.items())
    if 0 in on.values():
        fix = "make an instance (nvidia-smi mig -cgi) or turn MIG off: sudo nvidia-smi -mig 0"
        return Finding("mig", "problem", f"MIG is on without an instance: {said}", fix)
    fix = "for the whole card: sudo nvidia-smi -mig 0"
    return Finding("mig", "warning", f"MIG is on: {said}; a process uses one", fix)
