"""`sparseengine models`: families that run, what was verified of each, and shipped shapes."""

from __future__ import annotations

import argparse
from typing import Any

from sparseengine.console import print_json, table


class Models:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="JSON instead of tables")

    def run(self, args: argparse.Namespace) -> int:
        families, shapes = family_rows(), shape_rows()
        if args.json:
            print_json({"families": families, "shapes": shapes})
        else:
            print(table(families))
            print(f"\n{LEGEND}\n\nshapes for --load-format dummy --hf-config NAME, and doctor\n")
            print(table(shapes))
        return 0


LEGEND = (
    "logits: equal transformers' in fp32 within 1e-4 on tiny checkpoints (whole, chunked, batched\n"
    "and preempted); weights: greedy tokens of this published checkpoint equal transformers';\n"
    "device: this shape ran on a CUDA device with random weights, dense and sparse"
)


def family_rows() -> list[dict[str, Any]]:
    """One row per architecture name a checkpoint's config may carry."""
    from sparseengine.models import MODELS
    from sparseengine.models.verified import VERIFIED, Verified

    rows = []
    for name in MODELS:
        for shown in (name, *MODELS.aliases(name)):
            found = VERIFIED.get(shown, Verified())
            rows.append(
                {
                    "architecture": shown,
                    "examples": MODELS.get(name).examples if shown == name else f"as {name}",
                    "logits": found.logits,
                    "weights": found.weights or "-",
                    "device": found.device or "-",
                }
            )
    return rows


def shape_rows() -> list[dict[str, Any]]:
    """Every shipped shape: parameters, positions, bytes of KV per token in bf16."""
    import torch

    from sparseengine.core.specs import LayerKind
    from sparseengine.models import MODELS, model_spec
    from sparseengine.weights.dummy import shape_config, shape_names

    rows = []
    for name in shape_names():
        config = shape_config(name)
        spec = model_spec(config, torch.bfloat16)
        model = MODELS.get(spec.architecture)(config, spec, device="meta")
        unbounded = [s for s in spec.layers if s.kind in (LayerKind.FULL, LayerKind.LATENT)]
        rows.append(
            {
                "shape": name,
                "architecture": spec.architecture,
                "parameters": sum(p.numel() for p in model.parameters()),
                "layers": len(spec.layers),
                "kinds": ", ".join(sorted({s.kind.name for s in spec.layers})),
                "positions": spec.max_position,
                "KV bytes per token": sum(2 * s.kv_heads * sum(s.stored_dims) for s in unbounded),
            }
        )
    return rows


COMMAND = Models()
