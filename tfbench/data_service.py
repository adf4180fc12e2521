"""`python -m tfbench.data_service`: a tf.data service for --data_service, until Ctrl-C or SIGTERM.

Dispatcher and workers are in this one process, so that nothing of them can outlive it.
"""

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from absl import app, flags

from tfbench.config import ConfigError
from tfbench.data.service import workers
from tfbench.devices import native_messages_to
from tfbench.display import Display
from tfbench.malloc import keep_freed_memory

FLAGS = flags.FLAGS
LOCAL = "localhost"
flags.DEFINE_integer("workers", 1, "Of this process; each uses all cores that it may.", lower_bound=1)
flags.DEFINE_integer("port", 5050, "Of the dispatcher; 0: any free one.", lower_bound=0, upper_bound=65535)
flags.DEFINE_string(
    "host", LOCAL, "Name or address of this host for those who train. localhost: on this host only."
)
flags.DEFINE_string(
    "join",
    None,
    "grpc://HOST:PORT of a dispatcher that runs already: it is given the workers of this host. The data must "
    "have the same path on every host.",
)

EXIT_REFUSED = 2


def serve(argv: list[str]) -> int:
    """Serve until a signal comes; returns the exit code of what is refused."""
    display, stop = Display(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        if len(argv) > 1:
            raise flags.Error(f"{argv[1]!r} is not a flag: flags start with --")
        _check()
        with native_messages_to(Path(os.devnull)):  # TensorFlow's greetings
            _held, address = _start()
    except (ConfigError, flags.Error) as error:
        display.error(f"{error}\nSee python -m tfbench.data_service --help")
        return EXIT_REFUSED
    display.say(f"{FLAGS.workers} worker(s). Train with: --data_service={address}")
    stop.wait()
    display.say("ended")
    sys.stdout.flush()
    # There is nothing to save, and servers that stop by themselves may wait for those who train.
    os._exit(0)


def _check() -> None:
    """Raises: ConfigError: what TensorFlow would not refuse."""
    if FLAGS.join is None:
        try:  # TensorFlow would share a port that others listen on
            socket.create_server(("", FLAGS.port)).close()
        except OSError as error:
            raise ConfigError("port", FLAGS.port, f"{error.strerror}; --port=0 takes a free one") from error
        return
    workers("join", FLAGS.join)  # TensorFlow would wait for an hour
    if FLAGS.host == LOCAL and not FLAGS.join.startswith(f"grpc://{LOCAL}:"):
        raise ConfigError("host", FLAGS.host, f"expected this host's name for others: --join={FLAGS.join}")


def _start() -> tuple[list[Any], str]:
    """Returns the servers, which serve as long as they are held, and the dispatcher's address."""
    keep_freed_memory()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the GPUs are for those who train
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatchers, address = [], FLAGS.join
    if address is None:
        dispatchers.append(service.DispatchServer(service.DispatcherConfig(port=FLAGS.port)))
        port = dispatchers[0].target.rpartition(":")[2]
        address = f"grpc://{FLAGS.host}:{port}"
    config = service.WorkerConfig(
        dispatcher_address=address.removeprefix("grpc://"), worker_address=f"{FLAGS.host}:%port%"
    )
    return [service.WorkerServer(config) for _ in range(FLAGS.workers)] + dispatchers, address


def parse(argv: list[str]) -> list[str]:
    """As absl's parser, but a flag that it refuses ends like one that is refused later."""
    try:
        return list(FLAGS(argv))
    except flags.Error as error:
        Display().error(f"{error}\nSee python -m tfbench.data_service --help")
        sys.exit(EXIT_REFUSED)


def main() -> None:
    """Console entry point."""
    app.run(serve, flags_parser=parse)


if __name__ == "__main__":
    main()
