"""Starting and stopping: the engine, the socket, the banner, signals and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparseengine.async_llm import AsyncLLM
from sparseengine.config import EngineConfig
from sparseengine.console import note
from sparseengine.errors import ConfigError
from sparseengine.server.app import make_app
from sparseengine.server.banner import banner
from sparseengine.server.service import Service
from sparseengine.server.settings import ServerSettings

_log = logging.getLogger("sparseengine.server")


def timed_protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's HTTP protocol, which also closes a connection that sends no whole request head."""

    class Timed(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_timer = self.loop.call_later(seconds, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
            super().connection_lost(exc)

        def _give_up(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    return Timed


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which would cut streams off."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """A running server; `serve` blocks, tests drive `start` and `stop`."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.service = Service(llm, settings)
        self.settings = settings
        self.socket = _bind(settings)
        config = uvicorn.Config(
            make_app(self.service),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=timed_protocol(settings.client_timeout),
            timeout_keep_alive=75,
            server_header=False,
            backlog=2048,
        )
        self._uvicorn = _Uvicorn(config)
        self._stopping = False

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"

    @property
    def started(self) -> bool:
        return self._uvicorn.started

    async def run(self) -> None:
        """Serve until `stop`, or until the engine is dead and its requests were answered."""
        watch = asyncio.create_task(self._watch_engine())
        try:
            await self._uvicorn.serve(sockets=[self.socket])
        finally:
            watch.cancel()
            if self.service.tracer is not None:
                await asyncio.to_thread(self.service.tracer.close)

    async def _watch_engine(self) -> None:
        """A dead engine is for a supervisor to restart: answer what waits, then leave."""
        while self.service.llm.error is None:
            await asyncio.sleep(0.2)
        _log.error("the engine is dead: %s", self.service.llm.error)
        await asyncio.sleep(1.0)
        self._uvicorn.should_exit = True

    async def drain(self) -> None:
        """Take no more requests, let running ones end for a while, then stop."""
        self.service.draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + self.settings.drain_timeout
        while self.service.in_flight and loop.time() < end:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)  # the last answers leave
        self._uvicorn.should_exit = True

    def stop(self) -> None:
        """At once: running requests are cut off."""
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = True


def _bind(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        found.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error}; choose another --host or "
            "--port"
        ) from None
    return found


async def _serve(config: EngineConfig, settings: ServerSettings) -> int:
    async with AsyncLLM.from_config(config) as llm:
        server = Server(llm, settings)
        loop, tasks = asyncio.get_running_loop(), set()

        def on_signal() -> None:
            if server.service.draining:
                note("second signal: stopping at once")
                server.stop()
                return
            note(f"shutting down: requests have {settings.drain_timeout:g} s to end")
            tasks.add(asyncio.create_task(server.drain()))

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        note(banner(server.service, server.url))
        await server.run()
        return 1 if llm.error is not None else 0


def serve(config: EngineConfig, settings: ServerSettings) -> int:
    """Blocks until a signal. 0: stopped as asked; 1: the engine died."""
    logging.basicConfig(
        level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("sparseengine.access").propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("sparseengine.access").addHandler(handler)
    return asyncio.run(_serve(config, settings))
