"""Calls that may hang: a broken card or a dead network disk answers nothing, and for ever."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises, if it does so in time; a call that hangs is left to a daemon thread.

    Raises:
        TimeoutError: It did not.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def answer() -> None:
        try:
            answers.append(call())
        except Exception as error:  # raised again below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return answers[0]
