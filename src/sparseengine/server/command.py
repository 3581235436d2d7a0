"""`sparseengine serve MODEL`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse

from sparseengine.console import add_engine_arguments, add_server_arguments, engine_config
from sparseengine.server.settings import server_settings


class Serve:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_server_arguments(parser)
        add_engine_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        settings = server_settings(args)
        config = engine_config(args)
        from sparseengine.server.run import serve

        return serve(config, settings)


COMMAND = Serve()
