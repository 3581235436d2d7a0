"""`sparseengine explain MODEL`: what would run and why; with a prompt, what was kept and read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparseengine.console import (
    add_engine_arguments,
    engine_config,
    positive,
    print_json,
    sparse_params,
    table,
)
from sparseengine.core.params import SamplingParams

if TYPE_CHECKING:
    from sparseengine.config import EngineConfig

_STEPS = 4  # decode steps that are run to show what is read


class Explain:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="JSON instead of text")
        parser.add_argument(
            "--prompt-len", type=positive, default=None, help="prompt tokens of the demand shown"
        )
        parser.add_argument(
            "--max-tokens", type=positive, default=128, help="output tokens of the demand shown"
        )
        parser.add_argument(
            "-p", "--prompt", metavar="TEXT", help="run this prompt and show what is kept and read"
        )
        parser.add_argument("--all", action="store_true", help="also values left at their default")
        add_engine_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.resolve import explain, resolve

        config = engine_config(args)
        data = explain(resolve(config), prompt_len=args.prompt_len, max_tokens=args.max_tokens)
        if args.prompt is not None:
            data = {**data, "record": run_recorded(config, args.prompt)}
        if args.json:
            print_json(data)
        else:
            print(as_text(data, show_defaults=args.all))
        return 0


def run_recorded(config: EngineConfig, prompt: str) -> dict[str, Any]:
    """The record of a prompt and a few decode steps under the configured method."""
    from sparseengine.llm import LLM

    sampling = SamplingParams(temperature=0.0, max_tokens=_STEPS + 1, ignore_eos=True)
    with LLM.from_config(config, quiet=True) as llm:
        sparse = sparse_params(config, record=True)
        output = llm.generate(prompt, sampling, sparse, use_tqdm=False)[0]
    record = output.outputs[0].sparse
    assert record is not None
    return record.to_dict()


def as_text(data: Mapping[str, Any], *, show_defaults: bool = False) -> str:
    """The explanation for people."""
    model = data["model"]
    parts = [
        f"model: {model['name']} ({model['architecture']}, {model['layers']} layers, "
        f"at most {model['max_model_len']:,} tokens)",
        "values\n" + _values(data["values"], show_defaults),
        *[_method(m) for m in data["methods"]],
        _prefill(data["prefill"]),
        "cache plan\n" + table([_group(g) for g in data["cache_plan"]]),
        "routes\n" + "\n".join(_route(r) for r in data["routes"]),
        f"launch shapes of kernels: {data['launch_shapes']}",
    ]
    if "record" in data:
        parts.append(_record(data["record"]))
    return "\n\n".join(parts)


def _values(values: Mapping[str, Any], show_defaults: bool) -> str:
    rows = [
        {
            "name": path,
            "value": repr(v["value"]),
            "source": v["source"],
            "origin": v["origin"],
            "over": "; ".join(f"{g['value']!r} from {g['origin']}" for g in v["shadowed"]) or None,
        }
        for path, v in values.items()
        if show_defaults or v["source"] != "default"
    ]
    return table(rows) if rows else "(all default)"


def _record(record: Mapping[str, Any]) -> str:
    """Per layer: tokens that the KV heads retain after the prompt and read in the last step."""
    kept, read = record["retained"][0], record["reads"][-1]
    rows = [
        {
            "layer": layer,
            "kept": _span(heads),
            "read": _span(read["positions"][layer]) if layer in read["positions"] else "all",
        }
        for layer, heads in kept["positions"].items()
    ]
    density = record["prefill_density"]
    blocks = "" if density is None else f"\nprefill read {density:.1%} of the pairs of blocks"
    return (
        f"of a prompt of {record['prompt_tokens']:,} tokens, tokens per KV head\n{table(rows)}"
        f"{blocks}\n"
        f"resident after the prompt: {kept['resident_bytes']:,} bytes; read in a decode step: "
        f"{read['bytes_read']:,} bytes"
    )


def _span(heads: list[list[int]]) -> str:
    sizes = sorted({len(head) for head in heads})
    return f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"


def _method(method: Mapping[str, Any]) -> str:
    demand = method["demand"]
    traits = method["traits"]
    knobs = ", ".join(f"{k}={v}" for k, v in method["config"].items()) or "none"
    budget, stages = demand["budget_tokens"], method["pipeline"]
    return "\n".join(
        [
            f"method {method['name']}{' (default)' if method['default'] else ''}: "
            f"{traits['family']}, prefill {traits['prefill_policy']}, "
            f"sharing {traits['sharing']}",
            *([f"  stages: {' | '.join(map(_stage, stages))}"] if len(stages) > 1 else []),
            f"  knobs: {knobs}",
            f"  a request of {demand['prompt_tokens']:,} + {demand['max_tokens']:,} tokens: "
            f"budget {'none' if budget is None else f'{budget:,}'}, peak "
            f"{demand['peak_tokens']:,}, steady {demand['steady_tokens']:,} tokens per row",
        ]
    )


def _stage(stage: Mapping[str, Any]) -> str:
    """A stage of a pipeline, as in `page_quanta (model)`."""
    more = stage.get("scope") or (f"{stage['tokens']:,} tokens" if "tokens" in stage else "")
    return f"{stage['name']} ({more})" if more else str(stage["name"])


def _prefill(pattern: Mapping[str, Any]) -> str:
    knobs = ", ".join(f"{k}={v!r}" for k, v in pattern["config"].items()) or "none"
    return (
        f"prefill: {pattern['name']}, chunking does not matter: {pattern['traits']['invariant']}\n"
        f"  knobs: {knobs}\n  sparse prefill is possible: {pattern['possible']}"
    )


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    layers = group["layers"]
    aux = ", ".join(f"{a['name']} per {a['per']}" for a in group["aux"])
    return {
        "layers": f"{layers[0]}-{layers[-1]} ({len(layers)})" if layers else "none",
        "page": group["page_size"],
        "ragged": group["ragged"],
        "codec": ", ".join(group["codec"]) or "raw",
        "side tensors": aux or "none",
    }


def _route(route: Mapping[str, Any]) -> str:
    layers = route["layers"]
    span = f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
    lines = [f"  {span}: {route['selected']} ({route['reason']})"]
    for rejected in route["rejected"]:
        lines.append(f"    not {rejected['route']}: {rejected['reason']}")
    return "\n".join(lines)


COMMAND = Explain()
