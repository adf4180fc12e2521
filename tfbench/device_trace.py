"""What the profiler's trace says of the devices: a clock that is not tfbench's."""

from pathlib import Path


def busy_span_s(folder: Path) -> float:
    """Seconds from the first to the last event on the devices in the newest trace under `folder`.

    Of several devices the longest span counts; without an accelerator, of the host's own threads.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: the trace holds no event.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    traces = sorted(Path(folder).glob("plugins/profile/*/*.xplane.pb"))
    if not traces:
        raise FileNotFoundError(f"no trace (*.xplane.pb) under {folder}/plugins/profile")
    space = xplane_pb2.XSpace.FromString(traces[-1].read_bytes())
    spans_s = [_span_s(plane) for plane in space.planes if plane.name.startswith("/device:GPU")]
    spans_s = spans_s or [_span_s(plane) for plane in space.planes if plane.name.startswith("/host:CPU")]
    if not any(spans_s):
        raise ValueError(f"the trace {traces[-1]} holds no event of a device")
    return max(spans_s)


def _span_s(plane: "xplane_pb2.XPlane") -> float:  # type: ignore[name-defined]  # noqa: F821
    """From the start of the first event to the end of the last; 0 without events."""
    starts_ps, ends_ps = [], []
    for line in plane.lines:
        for event in line.events:
            start_ps = line.timestamp_ns * 1000 + event.offset_ps
            starts_ps.append(start_ps)
            ends_ps.append(start_ps + event.duration_ps)
    return (max(ends_ps) - min(starts_ps)) / 1e12 if starts_ps else 0.0
