"""One page per sparse method for docs/reference/methods/: its docstring, traits, costs, figures."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparseengine.core.specs import Per

Table = Callable[[list[str], list[list[object]]], str]

SHAPE = "llama-3.1-8b"  # what costs are computed for
PROMPT, ANSWER = 32_768, 256
CONTROLS = ("random", "streaming_llm")
NOT_MEASURED = "Not measured."

# When to use it: what no trait tells. A method without an entry says so on its page.
WHEN = {
    "full": "Short texts, or whenever memory and time allow: nothing else is exact.",
    "random": "As the control of an experiment. It needs no scores, so what beats it has learnt "
    "something from the text.",
    "streaming_llm": "Endless texts of which only the newest part matters, such as a running "
    "dialogue, and as the second control. It cannot answer from the middle of a text.",
    "duo_attention": "Memory-bound serving where the question comes later, on a model whose "
    "retrieval heads are known: with a calibration or with learned gates.",
    "knorm": "As a cheap baseline that needs no queries and no attention. It can be worse than "
    "random, so compare before use.",
    "keydiff": "Memory-bound serving where the question comes later and scoring must cost "
    "next to nothing: it looks at keys alone, and can shrink again under memory pressure.",
    "expected_attention": "One document, questions not yet known, and no time for a second pass "
    "over the text. With a calibration, what is retained does not depend on the prompt's queries.",
    "snapkv": "A long prompt that ends with its only question. Not for questions that come later: "
    "what they need is gone.",
    "pyramidkv": "As `snapkv`, for models whose upper layers look at few tokens. On small models, "
    "whose last layers do the looking up, it loses to `snapkv`.",
    "rkv": "Long reasoning: the answer grows far beyond the budget and repeats itself.",
    "skipkv": "As `rkv`, when the answer says the same in whole sentences again and again. Its "
    "steps are not run ahead, for it reads what was generated.",
    "h2o": "Long prompts and long answers under one fixed budget, when attention is spread over "
    "the same few tokens for long.",
    "tova": "Long answers under a fixed budget that follow the newest token closely. What is "
    "unimportant now is lost for later.",
    "adakv": "As the scorer it is given (`snapkv` unless told otherwise), when some heads need "
    "much more than others. Usually better at the same bytes.",
    "kvzip": "Many questions on one document: it costs about twice the prefill, once, and what "
    "remains serves whatever is asked.",
    "quest": "Decode-bound work on long texts when nothing may be lost: reads few pages in each "
    "step, frees no memory.",
    "infllm": "As `quest`, with smaller summaries of pages, and with recent pages always read.",
    "omnikv": "Decode-bound work on deep models: a few layers choose for all, so that choosing is "
    "cheap. Calibrate the filter layers for other models than Llama-3-8B.",
    "double_sparsity": "Decode-bound work when single tokens, not pages, should be read. Calibrate "
    "it: with built-in channels it may be worse than random.",
}


def pages(root: Path, header: str, table: Table) -> dict[str, str]:
    """File name -> text, for every registered method."""
    from sparseengine.methods import describe_methods

    measured = _measurements(root / "docs" / "results")
    return {f"{row['name']}.md": _page(row, header, table, measured) for row in describe_methods()}


def _page(row: dict[str, Any], header: str, table: Table, measured: list[dict[str, Any]]) -> str:
    from sparseengine.methods import METHODS, RUNS, kind_matrix

    name = row["name"]
    method_class = METHODS.get(name)
    about = (inspect.getdoc(sys.modules[method_class.__module__]) or "").splitlines()[0]
    idea, deviations = split(inspect.getdoc(method_class) or "")
    kinds: list[list[object]] = [
        [kind, "yes" if text == RUNS else "no: they stay dense"]
        for kind, text in kind_matrix()[name].items()
    ]
    parts = [header, f"# {name}\n", f"{about}\n", "[All methods](../methods.md)\n"]
    parts.append(f"## Idea\n\n{idea}\n\nSource: {', '.join(sources(about + idea)) or 'none'}.\n")
    parts.append(f"## When to use it\n\n{WHEN.get(name, 'Nobody has said.')}\n")
    parts.append(f"## Deviations\n\n{deviations or 'None.'}\n")
    parts.append(f"## Budget and knobs\n\n{_budget(row)}\n")
    if row["knobs"]:
        knobs: list[list[object]] = [
            [f"`{k['name']}`", k["default"], k["allowed"], k["doc"]] for k in row["knobs"]
        ]
        parts.append(table(["knob", "default", "allowed", "meaning"], knobs) + "\n")
    presets = method_class.config_class.presets
    if presets:
        lines: list[list[object]] = [
            [f"`{preset}`", ", ".join(f"`{k}`={_shown(v)}" for k, v in values.items())]
            for preset, values in presets.items()
        ]
        parts.append(table(["preset", "sets"], lines) + "\n")
    parts.append(f"## Costs\n\n{costs(name)}\n")
    parts.append(f"## Kinds of layers\n\n{table(['kind', 'acts on it'], kinds)}\n")
    traits = ", ".join(f"{k} {_shown(v)}" for k, v in row["traits"].items())
    parts.append(f"Traits: {traits}.\n")
    parts.append(f"## Measured quality\n\n{_quality(name, table, measured)}\n")
    return "\n".join(parts)


def split(text: str) -> tuple[str, str]:
    """A docstring without its sentences on deviations, and these."""
    idea, deviations = [], []
    for paragraph in text.split("\n\n"):
        before, marker, after = paragraph.partition("Deviations:")
        if not marker:
            before, marker, after = paragraph.partition("Deviation:")
        if before.strip():
            idea.append(before.rstrip())
        if marker:
            after = after.strip()
            deviations.append(after[:1].upper() + after[1:])
    return "\n\n".join(idea), "\n\n".join(deviations)


def sources(text: str) -> list[str]:
    """Papers that a text names, arXiv's as links."""
    found = dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{5})", text))
    links = [f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in found]
    return links + list(dict.fromkeys(re.findall(r"(?:ICLR|NeurIPS|ICML|ACL) \d{4}", text)))


def _budget(row: dict[str, Any]) -> str:
    if row["takes"] == "none":
        return "Takes no budget."
    default = row["default"] or {}
    size = (
        f"{default['budget']:,} tokens"
        if "budget" in default
        else f"{default['ratio']:.0%} of the prompt"
    )
    return (
        f"The budget counts tokens {row['takes']} per row; without one it is {size}. `kv_error` in "
        f"its place: {row['kv_error']}."
    )


def costs(name: str) -> str:
    """From the method's own cache plan and demand, for one model and one length."""
    import torch

    from sparseengine.core.params import SparseParams
    from sparseengine.core.specs import AuxSpec
    from sparseengine.methods import METHODS, make_method, resolve_budget
    from sparseengine.models import model_spec
    from sparseengine.weights.dummy import shape_config

    spec = model_spec(shape_config(SHAPE), torch.bfloat16)
    method = make_method(name, {}, spec)
    budget = resolve_budget(METHODS.get(name), SparseParams(name), PROMPT)
    demand = method.demand(PROMPT, ANSWER, budget)
    plain = sum(sum(s.stored_dims) * s.kv_heads * 2 for s in spec.layers)

    def nbytes(aux: AuxSpec, layer: int) -> int:
        return math.prod(aux.dims(spec.layers[layer])) * aux.dtype.itemsize

    side, request = 0.0, 0
    for group in method.cache_plan():
        for layer in group.layers:
            heads = spec.layers[layer].kv_heads
            for aux in group.aux:
                if aux.per is Per.REQUEST:
                    request += nbytes(aux, layer)
                else:
                    per = 1 if aux.per is Per.SLOT else group.page_size
                    side += nbytes(aux, layer) * heads / per
    lines = [
        f"For {SHAPE} in bf16, a prompt of {PROMPT:,} tokens, an answer of {ANSWER} and the "
        f"default {'budget' if budget is not None else 'settings'}, from the method's own cache "
        "plan:\n",
        f"- tokens held per row: at most {demand.peak_tokens:,} while the prompt is read, "
        f"{demand.steady_tokens:,} at the end of the answer;",
        f"- summaries beside the KV: {side:,.0f} bytes per token ({side / plain:.1%} of its "
        f"{plain:,} bytes of KV);",
        f"- state per request: {request / 2**20:,.1f} MiB"
        + (", freed when the prompt has been read" if _is_brief(method) else "")
        + ".",
    ]
    if budget is not None and METHODS.get(name).traits.takes == "read":
        lines[-1] = lines[-1][:-1] + ";"
        lines.append(f"- tokens read per row and decode step, where it acts: {budget:,}.")
    return "\n".join(lines)


def _is_brief(method: Any) -> bool:
    sides = [a for g in method.cache_plan() for a in g.aux if a.per is Per.REQUEST]
    return bool(sides) and all(a.lifetime == "prefill" for a in sides)


def _measurements(folder: Path) -> list[dict[str, Any]]:
    """Rows of every .jsonl below docs/results that name a method, with the page they belong to."""
    found = []
    for file in sorted(folder.rglob("*.jsonl")):
        where = folder / (file.stem + ".md") if file.parent == folder else None
        if where is None or not where.exists():
            near = [p for p in folder.glob("*.md") if file.parent.name.startswith(p.stem)]
            where = near[0] if near else file
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if isinstance(row, dict) and "method" in row:
                link = where.relative_to(folder).as_posix()
                run = file.relative_to(folder).with_suffix("").as_posix()
                found.append({**row, "_link": f"../../results/{link}", "_run": run})
    return found


def _quality(name: str, table: Table, measured: list[dict[str, Any]]) -> str:
    parts = []
    for run in dict.fromkeys(row["_run"] for row in measured):
        rows = [row for row in measured if row["_run"] == run]
        wanted = [r for r in rows if r["method"] == name]
        if not wanted:
            continue
        beside = [r for r in rows if r["method"] in ("full", *CONTROLS) and r["method"] != name]
        parts.append(f"[{run}]({wanted[0]['_link']}), with dense and the controls beside it:\n")
        parts.append(table(*_figures([*wanted, *beside])) + "\n")
    return "\n".join(parts).rstrip() or NOT_MEASURED


def _figures(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """Columns and cells: what the evaluation of these rows says, under plain names."""
    first = rows[0]
    if "kl_mean" in first:
        names = {
            "budget": "budget",
            "prompt_tokens": "prompt",
            "places": "places",
            "kl_mean": "KL from dense",
            "top1_agreement": "same likeliest token",
            "perplexity": "perplexity",
        }
    elif "score" in first:
        names = {
            "protocol": "protocol",
            "task": "task",
            "length": "length",
            "budget": "budget",
            "answers": "answers",
            "score": "score",
        }
    else:  # a row of models: right with the question seen / later
        models = [k for k in first if not k.startswith("_") and k != "method"]
        cells: list[list[object]] = [
            [r["method"], *(" / ".join(f"{x:.2f}" for x in r[m]) for m in models)] for r in rows
        ]
        return ["method", *(f"{m}, question seen / later" for m in models)], cells
    lines: list[list[object]] = [[r["method"], *(_shown(r.get(k)) for k in names)] for r in rows]
    return ["method", *names.values()], lines


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if value is None or value in ([], ()):
        return "none"
    if isinstance(value, list | tuple):
        return "+".join(map(str, value))
    return str(value)
