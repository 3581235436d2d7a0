"""One server for the tests of this folder that change nothing about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.servers import Served, save_chat_checkpoint, serving


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_checkpoint(tmp_path_factory.mktemp("served"), num_hidden_layers=1)


@pytest.fixture(scope="session")
def served(checkpoint: Path) -> Iterator[Served]:
    engine = {"enable_methods": ["full", "snapkv", "streaming_llm"]}
    with serving(
        checkpoint,
        engine=engine,
        served_model_names=("tiny", "alias"),
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        max_n=8,
    ) as running:
        yield running
