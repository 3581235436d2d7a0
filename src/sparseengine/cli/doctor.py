"""`sparseengine doctor [MODEL]`: what works on this machine, and how many requests fit.

With --input-len it answers the second question alone, for a model that is neither loaded nor needs
to be here: its config is enough.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
from dataclasses import replace
from typing import Any

from sparseengine import env
from sparseengine.config import EngineConfig
from sparseengine.console import (
    add_engine_arguments,
    engine_config,
    positive,
    print_json,
    table,
)
from sparseengine.errors import ConfigError

PACKAGES = ("torch", "transformers", "triton", "numba", "safetensors", "gguf", "huggingface_hub")


class Doctor:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="JSON instead of text")
        parser.add_argument(
            "--input-len", type=positive, metavar="TOKENS", help="plan: prompt length of a request"
        )
        parser.add_argument(
            "--output-len",
            type=positive,
            metavar="TOKENS",
            default=256,
            help="plan: tokens generated per request [default: 256]",
        )
        parser.add_argument(
            "--device-memory-gb",
            type=float,
            metavar="GB",
            help="plan: memory of the device (10^9 bytes) instead of this machine's",
        )
        add_engine_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        config = engine_config(args)
        if args.input_len is not None:
            return plan(config, args)
        if args.device_memory_gb is not None:
            raise ConfigError("--device-memory-gb plans for a device: give --input-len, too")
        found: dict[str, Any] = {
            "packages": packages(),
            "machine": machine(),
            "backends": backends(config),
            "models": models(),
            "warnings": env.unknown(),
        }
        name = config.model.model or config.model.hf_config or _first_pulled(found["models"])
        if name is not None:
            found["engine"] = try_engine(config, name)
        if args.json:
            print_json(found)
        else:
            print(as_text(found))
        return 0


def plan(config: EngineConfig, args: argparse.Namespace) -> int:
    """How many requests of one length fit, without loading the model."""
    from sparseengine.engine.fit import planned_table
    from sparseengine.resolve import resolve

    if config.model.hf_config is not None:
        config = replace(config, model=replace(config.model, load_format="dummy"))
    elsewhere = args.device_memory_gb is not None
    if elsewhere and config.model.dtype == "auto":
        config = replace(config, model=replace(config.model, dtype="bfloat16"))
    resolved = resolve(config)
    memory = int(args.device_memory_gb * 1e9) if elsewhere else resolved.caps.memory_bytes
    found = planned_table(
        resolved,
        memory_bytes=memory,
        prompt_tokens=args.input_len,
        output_tokens=args.output_len,
    )
    if args.json:
        print_json(found.to_dict())
    else:
        print(f"{config.model.model or config.model.hf_config}, {resolved.dtype}\n{found.render()}")
    return 0


def packages() -> dict[str, str | None]:
    """Installed versions; None for what is missing."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        present = importlib.util.find_spec(name) is not None
        found[name] = importlib.metadata.version(name) if present else None
    return found


def machine() -> dict[str, Any]:
    """Cores, threads, memory, and each device as the engine sees it."""
    import torch

    from sparseengine.attention.caps import device_caps

    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    devices = {}
    for kind in kinds:
        caps = device_caps(torch.device(kind))
        devices[kind] = {
            "memory_bytes": caps.memory_bytes,
            "arch": caps.arch,
            "multiprocessors": caps.multiprocessors,
            "has_triton": caps.has_triton,
        }
    return {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "devices": devices}


def backends(config: EngineConfig) -> list[dict[str, Any]]:
    """Every attention backend on every device: would it run a usual layer, and why."""
    import torch

    from sparseengine.attention import BACKENDS
    from sparseengine.attention.caps import device_caps
    from sparseengine.core.attention import AttentionNeed, Support
    from sparseengine.core.specs import LayerKind, LayerSpec

    layer = LayerSpec(kind=LayerKind.FULL, q_heads=32, kv_heads=8, head_dim=128, value_dim=128)
    rows = []
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        need = AttentionNeed(
            layer=layer,
            dtype=torch.float32 if kind == "cpu" else torch.bfloat16,
            page_size=config.cache.block_size,
            per_head=True,
            deterministic=config.runtime.deterministic,
        )
        caps = device_caps(torch.device(kind))
        for name in BACKENDS:
            try:
                answer = BACKENDS.get(name)().supports(need, caps)
            except ImportError as error:
                answer = Support(False, f"cannot be imported: {error}")
            rows.append(
                {"device": kind, "backend": name, "works": answer.ok, "reason": answer.reason}
            )
    return rows


def models() -> dict[str, str | None]:
    """Short names and where they are stored."""
    from sparseengine.weights.hub import PULLABLE, locate

    return {name: str(folder) if (folder := locate(name)) else None for name in PULLABLE}


def _first_pulled(found: dict[str, str | None]) -> str | None:
    return next((name for name, folder in found.items() if folder), None)


def try_engine(config: EngineConfig, name: str) -> dict[str, Any]:
    """Start the engine, generate four tokens, and read its memory table."""
    from sparseengine.core.params import SamplingParams
    from sparseengine.llm import LLM

    if not config.model.model:
        config = replace(config, model=replace(config.model, model=name))
    with LLM.from_config(config, quiet=True) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        output = llm.generate([[1, 2, 3, 4]], sampling, use_tqdm=False)[0].outputs[0]
        return {
            "model": name,
            "generated_tokens": len(output.token_ids),
            "route": ", ".join(dict.fromkeys(r.selected for r in llm.resolved.routes)),
            "launch_shapes": str(llm.resolved.tuned),
            "memory": llm.memory.to_dict(),
            "memory_text": llm.memory.render(),
        }


def as_text(found: dict[str, Any]) -> str:
    """The findings for people."""
    machine_facts = found["machine"]
    parts = [
        table([{"package": n, "version": v or "missing"} for n, v in found["packages"].items()]),
        f"{machine_facts['cores']} cores, {machine_facts['threads']} torch threads",
        table(
            [
                {
                    "device": kind,
                    "memory GiB": facts["memory_bytes"] / 2**30,
                    "triton": facts["has_triton"],
                }
                for kind, facts in machine_facts["devices"].items()
            ]
        ),
        table(found["backends"]),
        "\n".join(f"{n}: {f or 'not pulled'}" for n, f in found["models"].items()),
        *found["warnings"],
    ]
    engine = found.get("engine")
    if engine is None:
        parts.append("no model to try: `sparseengine pull smollm2-135m`, or name one")
    else:
        parts.append(
            f"{engine['model']}: {engine['generated_tokens']} tokens generated on route "
            f"{engine['route']}, launch shapes {engine['launch_shapes']}\n{engine['memory_text']}"
        )
    return "\n\n".join(parts)


COMMAND = Doctor()
