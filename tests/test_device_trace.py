"""The span of a trace, on traces made by hand."""

import pytest

from tfbench.device_trace import busy_span_s


def write(folder, *planes):
    """A trace with (name, [(line's start in ns, [(offset in ps, duration in ps), …]), …]) as its planes."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    for name, lines in planes:
        plane = space.planes.add(name=name)
        for timestamp_ns, events in lines:
            line = plane.lines.add(timestamp_ns=timestamp_ns)
            for offset_ps, duration_ps in events:
                line.events.add(offset_ps=offset_ps, duration_ps=duration_ps)
    path = folder / "plugins" / "profile" / "2026" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(space.SerializeToString())


def test_first_start_to_last_end_over_all_streams(tmp_path):
    # Stream 1 from 1 µs + 1 ns to 1 µs + 3 ns, stream 2 from 2 µs to 2 µs + 5 ns: 1.004 µs from start to end.
    streams = [(1000, [(1000, 500), (2000, 1000)]), (2000, [(0, 5000)])]
    write(tmp_path, ("/device:GPU:0", streams), ("/host:CPU", [(0, [(0, 10**12)])]))
    assert busy_span_s(tmp_path) == pytest.approx(1.004e-6)


def test_of_several_gpus_the_longest(tmp_path):
    write(tmp_path, ("/device:GPU:0", [(0, [(0, 2000)])]), ("/device:GPU:1", [(0, [(0, 3000)])]))
    assert busy_span_s(tmp_path) == pytest.approx(3e-9)


def test_nothing_to_read_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace"):
        busy_span_s(tmp_path)
    write(tmp_path, ("/device:GPU:0", []))
    with pytest.raises(ValueError, match="no event"):
        busy_span_s(tmp_path)
