"""Batches of messages between two processes (or threads) that never wait for each other.

Each side writes from a thread of its own, so that a peer that stalls costs the caller nothing: what
was sent meanwhile waits in a queue and leaves as one batch. The connection is an anonymous pipe
that only the two ends hold; nothing that came over a network is ever unpickled.
"""

from __future__ import annotations

import contextlib
import copyreg
import os
import pickle
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any

_STOP = object()


def _make_proxy(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


def _reduce_proxy(proxy: MappingProxyType[Any, Any]) -> tuple[Any, tuple[dict[Any, Any]]]:
    return _make_proxy, (dict(proxy),)


copyreg.pickle(MappingProxyType, _reduce_proxy)  # frozen parameters hold their mappings in these


class Channel:
    """One end of a pipe. `on_batch` gets lists of messages in a thread of the channel's own;
    `on_close` is called there once, when the other end is gone."""

    def __init__(
        self,
        connection: Connection,
        on_batch: Callable[[list[Any]], None],
        on_close: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._on_batch = on_batch
        self._on_close = on_close
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="channel-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="channel-reader", daemon=True)

    def start(self) -> None:
        self._writer.start()
        self._reader.start()

    def send(self, message: Any) -> None:
        """Queue a message; returns at once. Raises here when it cannot be pickled."""
        self._out.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def close(self, timeout: float = 2.0) -> None:
        """Send what is queued, then close this end."""
        self._out.put(_STOP)
        self._writer.join(timeout)
        # Both readers wait in the kernel: only a shutdown wakes them, closing the number does not.
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self) -> None:
        while True:
            batch = [self._out.get()]
            try:
                while True:
                    batch.append(self._out.get_nowait())
            except Empty:
                pass
            stops = _STOP in batch
            try:
                parts = [m for m in batch if m is not _STOP]
                self._connection.send_bytes(pickle.dumps(parts, pickle.HIGHEST_PROTOCOL))
            except OSError:  # the other end is gone; the reader says so
                return
            if stops:
                return

    def _read(self) -> None:
        while True:
            try:
                batch = [pickle.loads(m) for m in pickle.loads(self._connection.recv_bytes())]
            except (EOFError, OSError, TypeError):  # TypeError: closed while waiting
                self._on_close()
                return
            if batch:
                self._on_batch(batch)
