"""What the evaluations share: flags, the cases they ask for, engines that run them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from sparseengine.config import EngineConfig, default_of
from sparseengine.console import (
    add_engine_arguments,
    engine_config,
    hyper_params,
    note,
    positive,
    table,
)
from sparseengine.core.params import DENSE_PREFILL, SparseParams
from sparseengine.errors import ConfigError, SparseEngineError, UnsupportedError
from sparseengine.provenance import read_size

if TYPE_CHECKING:
    from pathlib import Path

    from sparseengine.core.specs import CacheGroup
    from sparseengine.llm import LLM

_NOT_KNOBS = ("budget", "ratio", "record", "prefill", "prefill_config")
_SPARSE = ("sparse.method", "sparse.budget", "sparse.knobs", "sparse.enable_methods")
_MIB = float(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One method with one budget: tokens, a fraction of the prompt, or None where none is taken.

    variant: the knobs that --methods gives it there, as they are written; `knobs` has them, too.
    prefill: the pattern of its prompts, with its knobs.
    """

    method: str
    budget: int | float | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    prefill: str = DENSE_PREFILL
    prefill_knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method, its variant and the pattern, where there are any."""
        name = f"{self.method}:{self.variant}" if self.variant else self.method
        return name if self.prefill == DENSE_PREFILL else f"{name}+{self.prefill}"

    @property
    def label(self) -> str:
        return self.name if self.budget is None else f"{self.name} {self.budget}"

    def params(self, *, record: bool = False) -> SparseParams:
        ratio = self.budget if isinstance(self.budget, float) else None
        budget = self.budget if isinstance(self.budget, int) else None
        return SparseParams(
            self.method,
            budget=budget,
            ratio=ratio,
            record=record,
            prefill=self.prefill,
            prefill_config=self.prefill_knobs,
            **self.knobs,
        )


def add_eval_arguments(parser: argparse.ArgumentParser, *, controls: bool = True) -> None:
    parser.add_argument(
        "--methods",
        default="",
        metavar="A,B",
        help="methods, or all; one may be there again with other knobs: a,a:knob=1:preset=paper; "
        f"{'dense and two controls are' if controls else 'dense is'} always measured beside them",
    )
    parser.add_argument(
        "--budgets",
        default="0.25",
        metavar="B,B",
        help="of every method: 512 is tokens, 0.25 a fraction of the prompt [default: 0.25]",
    )
    parser.add_argument(
        "--num-texts",
        "--samples",
        type=positive,
        default=3,
        metavar="N",
        help="different texts [default: 3]",
    )
    parser.add_argument(
        "--hyper-params", metavar="JSON", help='knobs per method: {"method": {"knob": 1}}'
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="write run_info.json, raw.jsonl, aggregate.json and plot.svg there",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run that --output holds, with the same settings",
    )
    add_engine_arguments(parser, skip=_SPARSE)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What every evaluation must not change when it is resumed, engine flags among it."""
    flags = {
        name: str(value)
        for name, value in vars(args).items()
        if name.startswith("engine_") and value is not None
    }
    return {
        "model": engine_config(args).model.model,
        "texts": args.num_texts,
        "hyper_params": args.hyper_params,
        **flags,
    }


def sizes(flag: str, text: str) -> tuple[int, ...]:
    """Numbers of tokens, joined by commas."""
    try:
        values = tuple(dict.fromkeys(read_size(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} is not allowed; it must be {error}") from None
    if min(values) < 1:
        raise ConfigError(f"{flag} {text!r} is not allowed; it must be 1 or more")
    return values


def budgets(text: str) -> tuple[int | float, ...]:
    """Budgets, joined by commas: with a point a fraction in (0, 1], else tokens."""
    found: list[int | float] = []
    for part in text.split(","):
        try:
            value = float(part) if "." in part else int(part)
        except ValueError:
            value = 0
        if not (0 < value <= 1 if isinstance(value, float) else value >= 1):
            raise ConfigError(
                f"--budgets {text!r}: {part.strip()!r} is neither a number of tokens (512) nor a "
                "fraction of the prompt in (0, 1] with a point (0.25)"
            )
        found.append(value)
    # 1 is a token and 1.0 is everything, though they are equal
    return tuple({(type(value), value): value for value in found}.values())


def cases_of(args: argparse.Namespace, *, controls: bool = True) -> list[Case]:
    """Dense, the controls, then the methods asked for, each with every budget it can take.

    --sparse-prefill adds dense attention behind such a prefill, and holds for the methods asked
    for, not for what they are compared with.
    """
    from sparseengine.methods import METHODS
    from sparseengine.methods.prefill import PATTERNS

    sizes_ = budgets(args.budgets)
    given = [part.strip() for part in args.methods.split(",") if part.strip()]
    wanted = [Case(method=name) for name in METHODS] if _is_all(args) else map(_variant, given)
    names = [METHODS.canonical(default_of("sparse.method"))]
    if controls:
        names += json.loads((files("sparseengine.evals") / "controls.json").read_text())
    beside = _with_knobs(args, (Case(method=name) for name in names))
    rows = _with_knobs(args, wanted)
    _check_hyper_params(args, [*beside, *rows])
    sparse = engine_config(args).sparse
    prefill = PATTERNS.canonical(sparse.prefill)
    if prefill != DENSE_PREFILL:
        both = [beside[0], *rows]
        rows = [replace(c, prefill=prefill, prefill_knobs=sparse.prefill_knobs) for c in both]
    found: dict[str, Case] = {}
    for case in [*beside, *rows]:
        takes_none = METHODS.get(case.method).traits.takes == "none"
        for size in (None,) if takes_none else sizes_:
            one = replace(case, budget=size)
            found.setdefault(f"{one.name} {size!r}", one)
    return list(found.values())


def _variant(text: str) -> Case:
    """name:knob=value:knob=value; a value is JSON, or else a string. Raises `ConfigError`."""
    from sparseengine.methods import METHODS

    name, *parts = (part.strip() for part in text.split(":"))
    knobs: dict[str, Any] = {}
    for part in parts:
        knob, equals, value = part.partition("=")
        if not (knob and equals and value):
            raise ConfigError(
                f"--methods {text!r}: {part!r} is not a knob; give name:knob=value:knob=value"
            )
        try:
            knobs[knob] = json.loads(value)
        except ValueError:
            knobs[knob] = value
    return Case(method=METHODS.canonical(name), knobs=knobs, variant=":".join(parts))


def _with_knobs(args: argparse.Namespace, cases: Iterable[Case]) -> list[Case]:
    """With those of --hyper-params for all rows of a method; a row's own win."""
    knobs = hyper_params(args.hyper_params)
    return [replace(c, knobs={**knobs.get(c.method, {}), **c.knobs}) for c in cases]


def _check_hyper_params(args: argparse.Namespace, cases: Sequence[Case]) -> None:
    names = [case.method for case in cases]
    unused = [name for name in hyper_params(args.hyper_params) if name not in names]
    if unused:
        raise ConfigError(
            f"--hyper-params has knobs for {unused[0]!r}, which is not among --methods"
        )
    for case in cases:
        for knob in case.knobs:
            if knob in _NOT_KNOBS:
                raise ConfigError(
                    f"{knob!r} is not a knob of {case.method!r}; give --budgets, or "
                    "--sparse-prefill with --sparse-prefill-config"
                )


def _is_all(args: argparse.Namespace) -> bool:
    return bool(args.methods.strip() == "all")


@dataclass(slots=True, kw_only=True)
class _Shared:
    """Cases for one engine, and how that stores their KV."""

    config: EngineConfig
    storage: tuple[CacheGroup, ...]
    cases: list[Case]


def engines(
    args: argparse.Namespace, cases: Sequence[Case], skipped: dict[str, str]
) -> Iterator[tuple[LLM, list[Case]]]:
    """Engines with the cases that each runs, all cases once, the first case first.

    Methods share one if it stores their KV as an engine of their own would, so that bytes are their
    own. Selections have engines of their own: captured decode steps hold one method's at most.
    With --methods all, a method that cannot run on the model is put into `skipped` with the reason,
    and so should be a case whose requests are refused (see `leave_out`).
    """
    from sparseengine.llm import LLM

    for shared in _shared(args, cases, skipped):
        try:
            llm = LLM.from_config(shared.config, quiet=True)
        except UnsupportedError as error:
            for case in shared.cases:
                leave_out(args, case, error, skipped, case.name)
            continue
        with llm:
            check_tokenizer(llm)
            yield llm, shared.cases


def _shared(
    args: argparse.Namespace, cases: Sequence[Case], skipped: dict[str, str]
) -> list[_Shared]:
    from sparseengine.resolve import resolve

    by_name: dict[str, list[Case]] = {}
    for case in cases:
        by_name.setdefault(f"{case.method}:{case.variant}", []).append(case)
    found: list[_Shared] = []
    for group in by_name.values():
        config = _config(args, group[0])
        try:
            storage = resolve(config).groups
        except UnsupportedError as error:
            leave_out(args, group[0], error, skipped, group[0].name)
            continue
        for other in found:
            names = [*dict.fromkeys(c.method for c in (*other.cases, *group))]
            if other.storage == storage and _may_share(names):
                joint = other.config.with_values({"sparse.enable_methods": tuple(names)})
                if resolve(joint).groups == storage:
                    other.config = joint
                    other.cases.extend(group)
                    break
        else:
            found.append(_Shared(config=config, storage=storage, cases=group))
    return found


def _may_share(names: Sequence[str]) -> bool:
    from sparseengine.methods import METHODS

    selects = [METHODS.get(name).traits.family == "selection" for name in names]
    return len(names) == 1 or not any(selects)


def leave_out(
    args: argparse.Namespace,
    case: Case,
    error: SparseEngineError,
    skipped: dict[str, str],
    label: str,
) -> None:
    """Note why --methods all goes on without a method or case; raise the error otherwise."""
    if not _is_all(args) or case.budget is None:
        raise error
    skipped[label] = str(error)
    note(f"{label}: left out: {error}")


def _config(args: argparse.Namespace, case: Case) -> EngineConfig:
    extra: dict[str, Any] = {"sparse_config": dict(case.knobs)} if case.knobs else {}
    return engine_config(args, sparse_method=case.method, **extra)


def check_tokenizer(llm: LLM) -> None:
    if llm.tokenizer is None:
        raise ConfigError(
            f"{llm.resolved.source.name!r} has no tokenizer, and an evaluation needs text"
        )


def mib(count: float | None) -> float | None:
    return None if count is None else count / _MIB


def finish(
    name: str,
    folder: Path | None,
    facts: Mapping[str, Any],
    raw: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    shown: Sequence[Mapping[str, Any]],
    footnote: str,
) -> None:
    """Artefacts if a folder was given, the table, and one JSON line at the end."""
    from sparseengine.report import machine, write_artefacts

    info = {**machine(), **facts}
    if folder is not None:
        write_artefacts(folder, info, raw, rows)
    print(table(shown))
    print(f"\n{footnote}")
    print(json.dumps({"eval": name, **info, "rows": rows}), flush=True)
