import csv

import pytest

from tfbench.measure.timing import WINDOW_COLUMNS, Window, WindowTimer, write_windows_csv


class FakeDevice:
    """A clock that moves only when work is waited for, and the order in which it was asked."""

    def __init__(self):
        self.now_s = 100.0
        self.pending_s = 0.0
        self.calls = []

    def enqueue(self, seconds):
        self.pending_s += seconds

    def synchronize(self):
        self.calls.append("synchronize")
        self.now_s += self.pending_s
        self.pending_s = 0.0

    def clock(self):
        self.calls.append("clock")
        return self.now_s


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def timer(device):
    return WindowTimer(device.synchronize, clock=device.clock)


def test_window_holds_the_work_of_its_block_and_nothing_before_it(device, timer):
    device.enqueue(5.0)  # still running when the window opens
    with timer.window() as counted:
        device.enqueue(2.0)
        counted.add(steps=3, samples=96)
        device.enqueue(0.5)
        counted.add(steps=1, samples=32)

    assert timer.windows == [Window(index=0, steps=4, samples=128, start_s=105.0, end_s=107.5)]
    assert timer.windows[0].seconds == 2.5
    assert device.calls == ["synchronize", "clock", "synchronize", "clock"]


def test_window_that_raised_is_not_recorded(device, timer):
    def run_out_of_memory(counted):
        counted.add(1, 8)
        raise MemoryError

    with pytest.raises(MemoryError), timer.window() as counted:
        run_out_of_memory(counted)
    with timer.window() as counted:
        device.enqueue(1.0)
        counted.add(1, 8)

    assert timer.windows == [Window(0, 1, 8, 100.0, 101.0)]


def test_failure_at_the_closing_edge_is_not_recorded():
    edges = iter([None, RuntimeError("device lost")])

    def synchronize():
        if error := next(edges):
            raise error

    timer = WindowTimer(synchronize)
    with pytest.raises(RuntimeError, match="device lost"), timer.window() as counted:
        counted.add(1, 8)
    assert timer.windows == []


@pytest.mark.parametrize(("steps", "samples"), [(0, 0), (1, 0), (0, 8)])
def test_window_without_work_is_refused(timer, steps, samples):
    with pytest.raises(ValueError, match="window 0 counted"), timer.window() as counted:
        counted.add(steps, samples)
    assert timer.windows == []


def test_default_clock_is_monotonic_and_counts_windows():
    timer = WindowTimer(lambda: None)
    for _ in range(2):
        with timer.window() as counted:
            counted.add(1, 1)
    first, second = timer.windows
    assert (first.index, second.index) == (0, 1)
    assert first.start_s <= first.end_s <= second.start_s <= second.end_s


def test_windows_csv(tmp_path):
    windows = [Window(0, 4, 128, 105.0, 107.5), Window(1, 2, 64, 108.0, 109.0)]
    write_windows_csv(tmp_path / "windows.csv", windows, [0.1 + 0.2, None])

    with open(tmp_path / "windows.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == WINDOW_COLUMNS
    assert rows == [
        ["0", "4", "128", "105.0", "2.5", "51.2", "625.0", "0.30000000000000004"],
        ["1", "2", "64", "108.0", "1.0", "64.0", "500.0", ""],
    ]


def test_windows_csv_wants_a_loss_for_each_window(tmp_path):
    with pytest.raises(ValueError, match="shorter"):
        write_windows_csv(tmp_path / "windows.csv", [Window(0, 1, 1, 0.0, 1.0)], [])
