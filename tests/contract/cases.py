"""One line per method: its knobs on the toy model. A new method adds its line and is tested."""

from __future__ import annotations

from typing import Any, NamedTuple

INV_FREQ = (0.0, 1.0, 0.3, 0.05)  # channel 0, which tells a key's position, does not turn


class Case(NamedTuple):
    """A method with knobs small enough for the toy model; `budget` cuts a 48-token prompt."""

    method: str
    knobs: dict[str, Any]
    budget: int | None = 20
    refused: tuple[str, ...] = ()  # layer mixes it cannot run on
    prefixes: bool = True  # whether prompts of several lengths may go on from one prefix
    shifts: bool = False  # whether keys move to positions inside the cache


READ = {"select": "quest", "select_tokens": 12, "select_config": {"dense_layers": 0}}

CASES = {
    "full": Case("full", {}, None),
    "random": Case("random", {"sink": 2, "recent": 4}),
    "streaming_llm": Case("streaming_llm", {"block_tokens": 20}),
    "streaming_exact": Case("streaming_llm", {"block_tokens": 0, "page_aligned": False}),
    "streaming_shift": Case("streaming_llm", {"block_tokens": 20, "pos_shift": True}, shifts=True),
    "streaming_authors": Case("streaming_llm", {"sink": 3, "preset": "authors"}, shifts=True),
    "duo_attention": Case(
        "duo_attention", {"sink": 4, "retrieval": 0.25, "block_tokens": 20}, 30, refused=("latent",)
    ),
    "duo_exact": Case(
        "duo_attention",
        {"sink": 3, "retrieval": 0.25, "block_tokens": 0, "page_aligned": False},
        30,
        refused=("latent",),
    ),
    "knorm": Case("knorm", {"skip_layers": (), "sink": 2, "recent": 4}),
    "keydiff": Case("keydiff", {"sink": 2, "recent": 4}),
    "keydiff_blocks": Case("keydiff", {"sink": 2, "recent": 4, "block_tokens": 20}),
    "keydiff_bursts": Case("keydiff", {"sink": 2, "recent": 4, "block_tokens": 20, "interval": 3}),
    "expected_attention": Case("expected_attention", {"sink": 2}, refused=("latent",)),
    "snapkv": Case("snapkv", {"window": 6, "kernel": 3, "sink": 2}),
    "snapkv_blocks": Case(
        "snapkv", {"window": 4, "kernel": 3, "sink": 2, "block_tokens": 16}, prefixes=False
    ),
    "pyramidkv": Case("pyramidkv", {"window": 6, "kernel": 3, "sink": 2}),
    "tova": Case("tova", {}),
    "tova_bursts": Case("tova", {"sink": 2, "burst": 3}),
    "tova_prompt": Case("tova", {"burst": 0, "recent": 4}),
    "adakv": Case("adakv", {"window": 6, "kernel": 3, "sink": 2}, refused=("latent",)),
    "adakv_keydiff": Case(
        "adakv", {"scorer": "keydiff", "recent": 4, "block_tokens": 20}, refused=("latent",)
    ),
    "adakv_model": Case("adakv", {"scope": "model", "window": 6, "kernel": 3, "sink": 2}),
    "adakv_pyramid": Case(
        "adakv", {"scorer": "pyramidkv", "window": 6, "kernel": 3, "sink": 2}, refused=("latent",)
    ),
    "adakv_h2o": Case("adakv", {"scorer": "h2o", "interval": 3}, refused=("latent",)),
    "adakv_kvzip": Case(
        "adakv",
        {"scorer": "kvzip", "scope": "model", "chunk": 8, "lead": 2, "recent": 4},
    ),
    "rkv": Case("rkv", {"window": 4, "kernel": 3, "interval": 3}),
    "skipkv": Case(
        "skipkv",
        {"window": 4, "kernel": 3, "interval": 3, "segment": 4, "likeness": 0.2, "sentences": 6},
    ),
    "h2o": Case("h2o", {"interval": 3}),
    "h2o_blocks": Case("h2o", {"interval": 2, "block_tokens": 20, "sink": 2, "average": True}),
    "kvzip": Case("kvzip", {"chunk": 8, "lead": 2, "sink": 2, "recent": 4}),
    "kvzip_uniform": Case("kvzip", {"chunk": 8, "lead": 2, "prefix": (3,), "form": "uniform"}),
    "kvzip_heads": Case("kvzip", {"chunk": 8, "lead": 2, "form": "head", "sink": 2, "recent": 4}),
    "kvzip_layers": Case("kvzip", {"chunk": 8, "lead": 2, "form": "layer", "sink": 2, "recent": 4}),
    "quest": Case("quest", {"dense_layers": 0}),
    "infllm": Case("infllm", {"dense_layers": 0, "sink_pages": 1, "min_pages": 3}),
    "infllm_representatives": Case(
        "infllm",
        {"dense_layers": 0, "digest": "representatives", "recent_pages": 1, "min_pages": 3},
    ),
    "omnikv": Case("omnikv", {"sink": 2, "recent": 6}),
    "snapkv_pages": Case(
        "snapkv",
        {"window": 6, "kernel": 3, "sink": 2, "allocate": "page_quanta", "allocate_scope": "model"},
    ),
    "rkv_adakv": Case("rkv", {"window": 4, "kernel": 3, "interval": 3, "allocate": "adakv"}),
    "h2o_pages_quest": Case(
        "h2o", {"interval": 3, "allocate": "page_quanta", "allocate_scope": "model", **READ}
    ),
    "kvzip_pages_quest": Case(
        "kvzip",
        {"chunk": 8, "lead": 2, "sink": 2, "recent": 4, "allocate": "page_quanta", **READ},
    ),
    "double_sparsity": Case("double_sparsity", {"dense_layers": 0, "sink": 2}),
}

MIXES = {"full": "ff", "window": "wf", "latent": "ll", "recurrent": "rf"}
