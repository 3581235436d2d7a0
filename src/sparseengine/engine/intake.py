"""From what a caller asks to requests that can run: every check, before anything is queued."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from sparseengine.core.method import SparseMethod, Vocabulary
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import Request
from sparseengine.core.prefill import PrefillPattern
from sparseengine.core.specs import CacheGroup, ModelSpec
from sparseengine.engine.grammars import Grammar
from sparseengine.engine.sampling import SamplingExtras
from sparseengine.engine.structured import TIMEOUT_S, Constraint, GrammarCompiler, result_of
from sparseengine.errors import ConfigError, RequestError
from sparseengine.methods import METHODS, check_storage, make_method, resolve_budget
from sparseengine.methods.prefill import PATTERNS, make_pattern

RECENT = 32  # instances that stay although no request uses them, for each kind

_T = TypeVar("_T")


class _Recent(OrderedDict[str, _T]):
    """Strong references to the newest few, so that a weak mapping keeps them."""

    def note(self, key: str, value: _T) -> _T:
        self[key] = value
        self.move_to_end(key)
        while len(self) > RECENT:
            self.popitem(last=False)
        return value


class MethodTable:
    """Method instances by key. Requests with the same method and knobs share one.

    `instances` is the mapping that the controller and the scheduler read. Clients choose knobs, so
    it must not keep everything: an instance lives as long as a `Submission` that uses it, and the
    `RECENT` used last live on, as does the default. The storage was planned at start-up, so knobs
    that need other storage are refused.
    `patterns` is the same for prefill patterns; dense: why prompts cannot have one, if they cannot.
    vocabulary: what methods learn words from; None for a model without a tokenizer.
    """

    def __init__(
        self,
        model: ModelSpec,
        enabled: Sequence[str],
        groups: tuple[CacheGroup, ...],
        default: SparseParams | None = None,
        dense: str | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.patterns: WeakValueDictionary[str, PrefillPattern] = WeakValueDictionary()
        self._recent_patterns: _Recent[PrefillPattern] = _Recent()
        self._dense = dense
        self.enabled = tuple(METHODS.canonical(name) for name in enabled)
        self.groups = groups
        self.default = default or SparseParams(self.enabled[0])
        self.instances: WeakValueDictionary[str, SparseMethod] = WeakValueDictionary()
        self._recent: _Recent[SparseMethod] = _Recent()
        self._default: SparseMethod | None = None
        self._page_size = max((g.page_size for g in groups), default=16)

    def resolve(self, sparse: SparseParams, prompt_len: int) -> tuple[str, int | None]:
        """(key of the instance, budget in tokens). Raises `RequestError`."""
        try:
            name = METHODS.canonical(sparse.method)
        except ConfigError as error:  # an unknown name; here it is one request's fault
            raise RequestError(str(error)) from None
        if name not in self.enabled:
            raise RequestError(
                f"method {sparse.method!r} is not enabled in this engine, which was started with "
                f"{', '.join(self.enabled)}; add it to enable_methods"
            )
        key = _key(name, sparse.knobs)
        method = self.instances.get(key)
        if method is None:
            method = make_method(name, sparse.knobs, self.model, page_size=self._page_size)
            check_storage(method, self.groups)
            if self.vocabulary is not None:
                method.read(self.vocabulary)
            self.instances[key] = method
        self._recent.note(key, method)
        if sparse is self.default:
            self._default = method
        return key, resolve_budget(method, sparse, prompt_len)

    def resolve_prefill(self, sparse: SparseParams) -> tuple[str, int]:
        """(key of the pattern, tokens per block). Raises `RequestError`."""
        try:
            name = PATTERNS.canonical(sparse.prefill)
        except ConfigError as error:  # an unknown name; here it is one request's fault
            raise RequestError(str(error)) from None
        key = _key(name, sparse.prefill_config)
        pattern = self.patterns.get(key)
        if pattern is None:
            pattern = make_pattern(name, sparse.prefill_config, self.model)
            if self._dense is not None and type(pattern).pattern is not PrefillPattern.pattern:
                raise RequestError(f"prefill={sparse.prefill!r} is not possible: {self._dense}")
            self.patterns[key] = pattern
        self._recent_patterns.note(key, pattern)
        return key, pattern.block


def _key(name: str, knobs: Mapping[str, Any]) -> str:
    return name + (repr(sorted(knobs.items())) if knobs else "")


def _is_integer(value: object) -> bool:
    if type(value) is int:  # the quick way: a long prompt asks once per token
        return True
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One prompt, checked: its n requests (the first is the parent) and their sampling extras.

    grammar: what must be compiled before they can run, None when there is nothing to wait for.
    method, pattern: what their keys stand for; held here so that the table keeps them.
    """

    request_id: str
    prompt: str | None
    requests: tuple[Request, ...]
    extras: tuple[SamplingExtras, ...]
    method: SparseMethod
    pattern: PrefillPattern
    stream: bool = False
    grammar: Future[Grammar] | None = None


class Intake:
    """Checks prompts and parameters, resolves methods and seeds, makes requests."""

    def __init__(
        self,
        model: ModelSpec,
        methods: MethodTable,
        tokenizer: Any,
        *,
        max_model_len: int,
        eos_ids: Sequence[int] = (),
        max_logprobs: int = 20,
        seed: int = 0,
        grammar_timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.model = model
        self.methods = methods
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.eos_ids = tuple(eos_ids)
        self.max_logprobs = max_logprobs
        self.seed = seed
        self.grammars = GrammarCompiler(
            tokenizer, model.vocab_size, self._enders(), timeout_s=grammar_timeout_s
        )
        self._next_id = 0

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        sparse: SparseParams | None = None,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str = "",
    ) -> Submission:
        """Check one prompt. Raises `RequestError`; nothing is queued yet."""
        ids = self._check_prompt(prompt_token_ids)
        sampling = sampling or SamplingParams()
        sparse = sparse or self.methods.default
        self._check_sampling(sampling)
        key, budget = self.methods.resolve(sparse, len(ids))
        prefill, align = self.methods.resolve_prefill(sparse)
        room = self.max_model_len - len(ids)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        words = self._bad_words(sampling)
        stop_ids = frozenset((*self.eos_ids, *sampling.stop_token_ids))
        grammar = self._grammar(sampling)
        parent = self._next_id
        first = Request(
            id=parent,
            tokens=ids,
            prompt_len=len(ids),
            max_tokens=max_tokens,
            sampling=sampling,
            sparse=sparse,
            method=key,
            budget=budget,
            arrival=parent,
            prefill=prefill,
            align=align,
            salt=cache_salt,
        )
        requests, extras = [first], []
        for i in range(1, sampling.n):
            requests.append(replace(first, id=parent + i, tokens=list(ids), parent=parent))
        for i in range(sampling.n):
            constraint = None if grammar is None else self._constraint(grammar, sampling)
            seed = self._seed(sampling, parent, i)
            extras.append(
                SamplingExtras(seed=seed, stop_ids=stop_ids, bad_words=words, constraint=constraint)
            )
        self._next_id += sampling.n
        return Submission(
            request_id=str(parent) if request_id is None else request_id,
            prompt=prompt,
            requests=tuple(requests),
            extras=tuple(extras),
            method=self.methods.instances[key],
            pattern=self.methods.patterns[prefill],
            stream=stream,
            grammar=grammar,
        )

    def _grammar(self, sampling: SamplingParams) -> Future[Grammar] | None:
        """Start compiling what the text must look like; known faults raise at once."""
        if sampling.structured_outputs is None:
            return None
        grammar = self.grammars.start(sampling.structured_outputs)
        if grammar.done():
            result_of(grammar)
        return grammar

    def _constraint(self, grammar: Future[Grammar], sampling: SamplingParams) -> Constraint:
        spec, is_free = sampling.structured_outputs, None
        if spec is not None and spec.after is not None:
            backend, mark = self.tokenizer.backend_tokenizer, spec.after

            def is_free(ids: Sequence[int]) -> bool:
                tail = ids[-4 * len(mark.encode()) :]  # a mark has at most as many tokens as bytes
                return mark not in backend.decode(list(tail), skip_special_tokens=False)

        return Constraint(grammar, self.model.vocab_size, self._enders(), is_free)

    def _enders(self) -> tuple[int, ...]:
        """EOS ids that the model can sample; configs name others, too."""
        return tuple(t for t in self.eos_ids if 0 <= t < self.model.vocab_size)

    def _seed(self, sampling: SamplingParams, parent: int, index: int) -> int:
        """A request's own seed, plus the completion's index; else one that follows the engine's."""
        if sampling.seed is not None:
            return sampling.seed + index
        return ((self.seed << 40) ^ 0x9E3779B97F4A7C15) + ((parent + index) << 1)

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        ids = [int(t) if _is_integer(t) else t for t in prompt_token_ids]
        if not ids:
            raise RequestError("the prompt is empty; it must hold at least one token")
        vocab = self.model.vocab_size
        for i, t in enumerate(ids):
            if not _is_integer(t) or not 0 <= t < vocab:
                raise RequestError(
                    f"prompt token {i} is {t!r}; token ids must be integers in [0, {vocab - 1}]"
                )
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but max_model_len={self.max_model_len} leaves "
                f"room for {self.max_model_len - 1} and one to generate; shorten it or raise "
                "max_model_len"
            )
        return ids

    def _check_sampling(self, p: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(p, name)
            if value is not None and value > self.max_logprobs:
                raise RequestError(
                    f"{name}={value} is above this engine's max_logprobs={self.max_logprobs}"
                )
        vocab = self.model.vocab_size
        given: Mapping[str, Sequence[int]] = {
            "allowed_token_ids": p.allowed_token_ids or (),
            "stop_token_ids": p.stop_token_ids,
            "logit_bias": tuple(p.logit_bias or ()),
        }
        for name, ids in given.items():
            wrong = [t for t in ids if t >= vocab]
            if wrong:
                raise RequestError(f"{name} holds {wrong[0]}; token ids end at {vocab - 1}")
        if p.stop and not p.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids without it")
        if (p.stop or p.bad_words) and self.tokenizer is None:
            raise RequestError(
                "stop and bad_words need a tokenizer, and this model has none; use stop_token_ids "
                "and logit_bias"
            )

    def _bad_words(self, p: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each bad word, at the start of a text and behind a space (as vLLM)."""
        found: list[tuple[int, ...]] = []
        for word in p.bad_words:
            bare = self._encode(word.lstrip())
            spaced = self._encode(" " + word.lstrip())
            found.append(bare)
            if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
        return tuple(w for w in found if w)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))
