"""What the commands share: flags made from the config table and SamplingParams, tables, units.

Imports nothing heavy: parsing a command line must not wait for torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparseengine.config import PARAMS, EngineConfig, collect, default_of
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.errors import ConfigError, RequestError
from sparseengine.provenance import Param, Value, load_file
from sparseengine.server_params import SERVER_PARAMS, collect_server

_ENGINE = "engine_"
_SERVER = "server_"
_SAMPLING = "sampling_"


@dataclass(frozen=True, slots=True)
class SamplingFlag:
    """One sampling flag: the field it sets, the type its text has, and its help line."""

    name: str
    kind: type | None
    doc: str


SAMPLING_FLAGS: tuple[SamplingFlag, ...] = (
    SamplingFlag("max_tokens", int, "most tokens to generate"),
    SamplingFlag("min_tokens", int, "fewest tokens before EOS or a stop string may end it"),
    SamplingFlag("temperature", float, "0 takes the most likely token"),
    SamplingFlag("top_p", float, "sample from the smallest set with this probability"),
    SamplingFlag("top_k", int, "sample from the k most likely tokens (0: all)"),
    SamplingFlag("min_p", float, "drop tokens below this fraction of the best one's probability"),
    SamplingFlag("n", int, "answers per prompt; they share the prompt's pages"),
    SamplingFlag("presence_penalty", float, "lower tokens that already occurred"),
    SamplingFlag("frequency_penalty", float, "lower tokens by how often they occurred"),
    SamplingFlag("repetition_penalty", float, "divide the logits of tokens that occurred"),
    SamplingFlag("logprobs", int, "return this many log-probabilities per generated token"),
    SamplingFlag("prompt_logprobs", int, "return this many log-probabilities per prompt token"),
    SamplingFlag("stop", list, "end at this text (may be given several times)"),
    SamplingFlag("stop_token_ids", tuple, "end at these token ids, joined by commas"),
    SamplingFlag("logit_bias", dict, 'JSON object: token id -> bias, e.g. {"42": -100}'),
    SamplingFlag("ignore_eos", None, "go on after EOS"),
    SamplingFlag("include_stop_str_in_output", None, "keep the stop text in the output"),
)


def add_engine_arguments(
    parser: argparse.ArgumentParser, *, positional_model: bool = True, skip: Sequence[str] = ()
) -> None:
    """`[MODEL]`, `--config FILE` and one flag for every row of the config table."""
    if positional_model:
        text = "a name that `pull` knows, a folder, a GGUF file, or a hub id (as --model)"
        parser.add_argument("model_positional", nargs="?", metavar="MODEL", help=text)
    group = parser.add_argument_group("engine")
    group.add_argument("--config", metavar="FILE", help="YAML or JSON file of these flags")
    for param in PARAMS:
        if param.path not in skip:
            _add_flag(group, param, _ENGINE, default_of(param.path))


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for every row of the server's table."""
    group = parser.add_argument_group("server")
    for param in SERVER_PARAMS:
        _add_flag(group, param, _SERVER, param.default)


def _add_flag(group: argparse._ArgumentGroup, param: Param, prefix: str, default: Any) -> None:
    tail = "" if default in (None, "", {}, ()) else f" [default: {default}]"
    options: dict[str, Any] = {"dest": prefix + param.keyword, "help": param.doc + tail}
    if param.kind == "bool":
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = "{" + ",".join(param.choices) + "}" if param.choices else "VALUE"
    if param.kind == "names" and prefix == _SERVER:  # as vLLM's: --api-key ONE TWO
        options["nargs"] = "+"
    group.add_argument(param.flag, default=None, **_escape(options))


def _escape(options: dict[str, Any]) -> dict[str, Any]:
    options["help"] = options["help"].replace("%", "%%")
    return options


def engine_config(args: argparse.Namespace, **extra: Any) -> EngineConfig:
    """The config that flags, --config and the environment give. `extra` wins over all of them."""
    flags = {
        name.removeprefix(_ENGINE): value
        for name, value in vars(args).items()
        if name.startswith(_ENGINE) and value is not None
    }
    positional = getattr(args, "model_positional", None)
    if positional is not None:
        flags.setdefault("model", positional)
    return collect(cli={**flags, **extra}, file=args.config)


def server_values(args: argparse.Namespace) -> dict[str, Value]:
    """The server's parameters by keyword: from flags, --config and the environment."""
    flags = {n.removeprefix(_SERVER): v for n, v in vars(args).items() if n.startswith(_SERVER)}
    return collect_server(flags, args.config, load_file)


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, skip: Sequence[str] = (), **defaults: Any
) -> None:
    """Sampling flags with vLLM's names; `defaults` replaces a default."""
    group = parser.add_argument_group("sampling")
    for flag in SAMPLING_FLAGS:
        if flag.name in skip:
            continue
        name, dest = "--" + flag.name.replace("_", "-"), _SAMPLING + flag.name
        default = defaults.get(flag.name)
        tail = "" if default is None else f" [default: {default}]"
        if flag.kind is None:
            group.add_argument(name, dest=dest, action="store_true", default=None, help=flag.doc)
        elif flag.kind is list:
            group.add_argument(name, dest=dest, action="append", metavar="TEXT", help=flag.doc)
        else:
            kind = flag.kind if flag.kind in (int, float) else str
            group.add_argument(
                name, dest=dest, type=kind, default=default, metavar="VALUE", help=flag.doc + tail
            )


def given_engine_flags(args: argparse.Namespace) -> list[str]:
    """Names of the engine flags on the command line."""
    return [n for n, v in vars(args).items() if n.startswith(_ENGINE) and v is not None]


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The SamplingParams the flags ask for. Raises `RequestError` for values out of range."""
    return SamplingParams.from_dict(given_sampling(args))


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling fields by name, those with a flag or a default."""
    values: dict[str, Any] = {}
    for flag in SAMPLING_FLAGS:
        value = getattr(args, _SAMPLING + flag.name, None)
        if value is None:
            continue
        name = "--" + flag.name.replace("_", "-")
        if flag.kind is dict:
            value = _json_object(name, value)
        elif flag.kind is tuple:
            value = _token_ids(name, value)
        values[flag.name] = value
    return values


def _json_object(flag: str, text: str) -> dict[int, float]:
    try:
        data = json.loads(text)
        return {int(key): value for key, value in data.items()}
    except (ValueError, AttributeError):
        raise RequestError(
            f'{flag} {text!r} is not a JSON object of token ids, e.g. {{"42": -100}}'
        ) from None


def _token_ids(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"{flag} {text!r} is not a list of token ids such as 2,32000") from None


def sparse_params(config: EngineConfig, *, record: bool = False) -> SparseParams:
    """The engine's default method as a request's parameters."""
    sparse = config.sparse
    return SparseParams(
        sparse.method,
        budget=sparse.budget,
        ratio=sparse.ratio,
        record=record,
        prefill=sparse.prefill,
        prefill_config=sparse.prefill_knobs,
        **sparse.knobs,
    )


def hyper_params(text: str | None) -> dict[str, dict[str, Any]]:
    """--hyper-params: knobs per method, by its proper name. Raises `ConfigError`."""
    from sparseengine.methods import METHODS

    if text is None:
        return {}
    try:
        data = json.loads(text)
        return {METHODS.canonical(name): dict(knobs) for name, knobs in data.items()}
    except (ValueError, AttributeError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--hyper-params {text!r} is not JSON of knobs per method") from None


def positive(text: str) -> int:
    """argparse type: an integer >= 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be 1 or more")
    return value


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows as aligned text; numbers to the right, everything else to the left."""
    names = list(columns or rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(r[i]) for r in [names, *cells]) for i in range(len(names))]
    right = [all(_is_number(row.get(name)) for row in rows) for name in names]

    def line(parts: Sequence[str]) -> str:
        aligned = [
            part.rjust(width) if is_right else part.ljust(width)
            for part, width, is_right in zip(parts, widths, right, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(names), "  ".join("-" * w for w in widths), *map(line, cells)])


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def print_json(data: Any, *, indent: int | None = 2) -> None:
    """One JSON document on standard output; NaN is an error, not invalid JSON."""
    print(json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False), flush=True)


def note(text: str) -> None:
    """Progress for people: standard error, so that standard output stays parsable."""
    print(text, file=sys.stderr, flush=True)
