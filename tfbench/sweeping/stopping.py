"""The user's wish to stop, counted and not raised, so that no statement is cut in two. TensorFlow-free."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

# Ctrl-C, a scheduler's end of time, a closed terminal.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """Counts the requests that come inside a `with` block.

    A signal that is ignored when the block begins (`nohup`, jobs in the background of a script) stays so.
    """

    def __init__(self) -> None:
        self.count = 0
        self._kept: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._kept[number] = signal.signal(number, self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
