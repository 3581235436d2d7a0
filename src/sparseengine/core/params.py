"""What a caller may ask of one request: sampling and sparsity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from sparseengine.errors import RequestError, nearest

MAX_TOKENS_LIMIT = 1 << 24
MAX_N = 1024
DENSE_PREFILL = "dense"  # the pattern that leaves prefill as it is
GRAMMAR_BACKENDS = ("auto", "xgrammar", "llguidance")
_STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{name}={value!r} is not allowed; it must be {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What a generated text must look like: exactly one of five, named as vLLM names them.

    json: a JSON schema, as a mapping or its text (kept as text). json_object: any JSON object.
    regex: an expression that the whole text matches. choice: one of these texts. grammar: EBNF, in
    the notation of the backend (GBNF with a rule `root` for xgrammar, Lark for llguidance).
    `backend`: "auto" takes xgrammar, and llguidance for what xgrammar cannot compile. `after`: the
    structure begins behind the first appearance of this text (</think>, of a model that thinks
    first); what comes before is free, but may not end the output.
    Raises `RequestError`; whether a schema or grammar compiles is found out when it is used.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    backend: str = "auto"
    after: str | None = None

    def __post_init__(self) -> None:
        _require(
            self.backend in GRAMMAR_BACKENDS,
            "structured_outputs.backend",
            self.backend,
            f"one of {', '.join(GRAMMAR_BACKENDS)}",
        )
        flag = self.json_object
        ok = flag is None or isinstance(flag, bool)
        _require(ok, "structured_outputs.json_object", flag, "True")
        given = [n for n in _STRUCTURES if getattr(self, n) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(_STRUCTURES)} (json_object as "
                f"True); given: {', '.join(given) or 'none'}"
            )
        object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar", "after"):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, str) and value.strip() != "")
            _require(ok, f"structured_outputs.{name}", value, "a non-empty text")
        if self.choice is not None:
            texts = () if isinstance(self.choice, str) else tuple(self.choice)
            ok = bool(texts) and all(isinstance(t, str) and t for t in texts)
            _require(ok, "structured_outputs.choice", self.choice, "a list of non-empty texts")
            object.__setattr__(self, "choice", texts)

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(n for n in _STRUCTURES if getattr(self, n) not in (None, False))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StructuredOutputs:
        """Build from untrusted keys; an unknown key names the nearest field."""
        known = {f.name for f in fields(cls)}
        for key in values:
            if key not in known:
                raise RequestError(
                    f"unknown field {key!r} in structured_outputs; {nearest(key, known)}"
                )
        return cls(**values)


def _schema_text(schema: object) -> str | None:
    """A JSON schema as text. Raises `RequestError` for what is no schema."""
    if schema is None or schema is False:
        return None
    allowed = "a JSON schema: a mapping, or the JSON text of one"
    value = schema
    if isinstance(schema, str):
        try:
            value = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"structured_outputs.json is not JSON ({error}); it must be {allowed}"
            ) from error
    _require(isinstance(value, Mapping), "structured_outputs.json", schema, allowed)
    try:
        return schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not JSON: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """vLLM's sampling fields, with vLLM's defaults. Wrong values raise `RequestError`.

    `max_tokens=None` means "as many as fit into max_model_len". `structured_outputs`
    constrains the text to a schema, expression, list or grammar.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "bad_words"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        _require(
            _is_int(self.n) and 1 <= self.n <= MAX_N, "n", self.n, f"an integer in [1, {MAX_N}]"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            v = getattr(self, name)
            _require(_is_real(v) and -2 <= v <= 2, name, v, "a number in [-2, 2]")
        v = self.repetition_penalty
        _require(_is_real(v) and 0 < v <= 10, "repetition_penalty", v, "a number in (0, 10]")
        v = self.temperature
        _require(_is_real(v) and 0 <= v <= 100, "temperature", v, "a number in [0, 100]")
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(
            _is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "0 or -1 (all), or > 0"
        )
        _require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        if self.seed is not None:
            ok = _is_int(self.seed) and -(1 << 63) <= self.seed < 1 << 63
            _require(ok, "seed", self.seed, "a 64-bit integer")
        if self.max_tokens is not None:
            ok = _is_int(self.max_tokens) and 1 <= self.max_tokens <= MAX_TOKENS_LIMIT
            _require(ok, "max_tokens", self.max_tokens, f"an integer in [1, {MAX_TOKENS_LIMIT}]")
        ok = _is_int(self.min_tokens) and self.min_tokens >= 0
        _require(ok, "min_tokens", self.min_tokens, "an integer >= 0")
        if self.max_tokens is not None:
            ok = self.min_tokens <= self.max_tokens
            _require(ok, "min_tokens", self.min_tokens, f"<= max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            v = getattr(self, name)
            _require(v is None or (_is_int(v) and 0 <= v <= 100), name, v, "None or in [0, 100]")

    def _check_lists(self) -> None:
        _require(
            all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "non-empty strings"
        )
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            ok = ids is None or all(_is_int(t) and t >= 0 for t in ids)
            _require(ok, name, ids, "a list of token ids >= 0")
        _require(self.allowed_token_ids != (), "allowed_token_ids", (), "None or a non-empty list")
        words = all(isinstance(w, str) and w for w in self.bad_words)
        _require(words, "bad_words", self.bad_words, "non-empty strings")
        if self.logit_bias is not None:
            bias = {int(k): v for k, v in self.logit_bias.items()}
            ok = all(k >= 0 and _is_real(v) and -100 <= v <= 100 for k, v in bias.items())
            _require(ok, "logit_bias", dict(self.logit_bias), "token id -> a number in [-100, 100]")
            object.__setattr__(self, "logit_bias", MappingProxyType(bias))
        given = self.structured_outputs
        if isinstance(given, Mapping):
            given = StructuredOutputs.from_dict(given)
            object.__setattr__(self, "structured_outputs", given)
        ok = given is None or isinstance(given, StructuredOutputs)
        _require(ok, "structured_outputs", given, "a StructuredOutputs or a mapping of its fields")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from untrusted keys; an unknown key names the nearest field."""
        known = {f.name for f in fields(cls)}
        for key in values:
            if key not in known:
                raise RequestError(f"unknown sampling field {key!r}; {nearest(key, known)}")
        return cls(**values)


@dataclass(frozen=True, slots=True, init=False)
class SparseParams:
    """Which sparse method a request uses, and with what.

    `budget` is in tokens per row; `ratio` is the fraction of the prompt that is KEPT (kvpress'
    compression_ratio is the fraction removed). Give at most one. `knobs` are fields of the method's
    Config, and further stages of a pipeline (`allocate`, `select`, ...: docs/compose.md); they are
    checked when the request is resolved. `prefill` names the pattern that prompts
    are prefilled with ("dense": every query reads all keys before it), whatever the method is;
    `prefill_config` are the pattern's knobs. `record=True` returns what was kept and
    read in `RequestOutput.outputs[i].sparse` (slow: it copies decisions to the host).

    `kv_error` in place of a budget lets every row retain as few tokens as lose at most this part of
    the attention that the method measures; a budget or ratio beside it is the most a row retains.

    Methods that evict may keep digests of what they drop. `dropped_mass=True` estimates from them
    how much attention each decode step would have paid to evicted tokens and reports it in
    `outputs[i].sparse.dropped_mass`; `compensate=True` lets decode steps attend to the digests.

    `save_prefix=True` keeps what the method's eviction left, for later prompts with the same
    parameters that begin with the whole of this one, and begins with such rows if there are any.
    """

    method: str
    budget: int | None
    ratio: float | None
    record: bool
    kv_error: float | None
    dropped_mass: bool
    compensate: bool
    save_prefix: bool
    prefill: str
    prefill_config: Mapping[str, Any] = field(hash=False)
    knobs: Mapping[str, Any] = field(hash=False)

    def __init__(
        self,
        method: str = "full",
        *,
        budget: int | None = None,
        ratio: float | None = None,
        record: bool = False,
        kv_error: float | None = None,
        dropped_mass: bool = False,
        compensate: bool = False,
        save_prefix: bool = False,
        prefill: str = DENSE_PREFILL,
        prefill_config: Mapping[str, Any] | None = None,
        **knobs: Any,
    ) -> None:
        ok = isinstance(method, str) and method != ""
        _require(ok, "method", method, "the name of a method (see `sparseengine methods`)")
        if budget is not None:
            _require(_is_int(budget) and budget >= 1, "budget", budget, "a number of tokens >= 1")
        if ratio is not None:
            ok = _is_real(ratio) and 0 < ratio <= 1
            _require(ok, "ratio", ratio, "the fraction of the prompt to keep, in (0, 1]")
        if budget is not None and ratio is not None:
            raise RequestError(f"give budget or ratio, not both (budget={budget}, ratio={ratio})")
        if kv_error is not None:
            ok = _is_real(kv_error) and 0 <= kv_error <= 1
            _require(ok, "kv_error", kv_error, "the part of attention to lose, in [0, 1]")
        object.__setattr__(self, "kv_error", kv_error)
        flags = {"record": record, "dropped_mass": dropped_mass, "compensate": compensate}
        flags["save_prefix"] = save_prefix
        for name, flag in flags.items():
            _require(isinstance(flag, bool), name, flag, "True or False")
            object.__setattr__(self, name, flag)
        ok = isinstance(prefill, str) and prefill != ""
        _require(ok, "prefill", prefill, "the name of a pattern (see `sparseengine methods`)")
        ok = prefill_config is None or isinstance(prefill_config, Mapping)
        _require(ok, "prefill_config", prefill_config, "a mapping of knobs")
        for name, value in (("method", method), ("budget", budget), ("ratio", ratio)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "prefill", prefill)
        object.__setattr__(self, "prefill_config", MappingProxyType(dict(prefill_config or {})))
        object.__setattr__(self, "knobs", MappingProxyType(dict(knobs)))

    @property
    def digests(self) -> bool:
        """Whether digests of what is evicted are kept."""
        return self.dropped_mass or self.compensate
