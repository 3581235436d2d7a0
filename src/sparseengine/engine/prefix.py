"""Which rows are shared between requests: the prefix cache's rules.

A hit must equal a miss, so only rows as dense attention leaves them are kept, and a method takes
them over as far as its hooks need not see those tokens run (`SparseMethod.reusable`):

    kept       the prompt, when it is done and before a method evicts from it; at the end what was
               generated, too, if every decode step read all of it and nothing was evicted. Of
               requests with sparse prefill nothing
    looked up  every prompt of dense prefill, except where the request wants what only a run gives

With `SparseParams.save_prefix` a hit need not equal a miss: what an eviction left of a prompt is
kept, too, for prompts that begin with all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sparseengine.core.cache import CacheManager, PrefixHit
from sparseengine.core.method import SparseMethod
from sparseengine.core.params import DENSE_PREFILL
from sparseengine.core.plan import UNKNOWN, Miss, Request
from sparseengine.engine.outputs import Finish
from sparseengine.errors import RequestError


class Prefixes:
    """Looks up prompts when they are admitted, keeps rows when requests end.

    enabled: else nothing is kept or found, and no reasons are given. queries, hits: tokens of
    prompts looked up, and found. misses: requests by reason.
    """

    def __init__(
        self, cache: CacheManager, methods: Mapping[str, SparseMethod], *, enabled: bool
    ) -> None:
        self.cache = cache
        self.methods = methods
        self.enabled = enabled
        self._page = cache.reuse_step if enabled else 1
        self.queries = self.hits = 0
        self.misses: Counter[str] = Counter()

    def find(self, request: Request) -> PrefixHit:
        """What of a request that is about to be admitted is stored already."""
        if not self.enabled:
            return PrefixHit()
        method = self.methods[request.method]
        if request.sparse.save_prefix and method.saves() and not request.sparse.record:
            saved = self.cache.match(request, request.prompt_len - 1, _saved_salt(request))
            if saved.tokens:
                return saved
        # The prompt's last token is run in any case: its logits are wanted.
        limit = min(method.reusable(request.prompt_len), request.prompt_len - 1)
        why_not = _why_not(request, limit)
        if why_not is not None:
            return PrefixHit(miss=why_not)
        hit = self.cache.match(request, limit)
        return hit._replace(copies=method.traits.sharing != "radix" or method.uses("evict"))

    def note(self, request: Request, hit: PrefixHit) -> None:
        """The request was admitted with this hit."""
        if not self.enabled or request.cached is not None:
            return
        request.cached, request.miss = hit.tokens, hit.miss
        self.queries += request.prompt_len
        self.hits += hit.tokens
        if hit.miss is not None:
            self.misses[hit.miss.reason] += 1

    def keep(self, request: Request, finish: Finish) -> None:
        """The request ends, and its rows still exist: keep what others may share.

        After an error nothing is shared any more of what it has in common with others.
        """
        if not self.enabled:
            return
        if finish.reason == "error":
            self.cache.forget_kept(request.tokens, request.salt)
        if finish.reason == "error" or not request.num_generated:
            return
        known = request.tokens[:-1] if request.tokens[-1] == UNKNOWN else request.tokens
        length = min(request.computed, len(known))
        if self.methods[request.method].uses("select"):
            length = min(length, request.prompt_len)
        if _is_dense(request) and length >= request.prompt_len:
            self.cache.keep(request.id, known[:length], request.salt)
        if request.sparse.save_prefix and request.computed > request.prompt_len:
            stop = min(request.computed, len(known))
            self.cache.keep(request.id, known[:stop], _saved_salt(request), evicted=True)

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request whose `save_prefix` would do nothing."""
        if not request.sparse.save_prefix:
            return
        method, why = self.methods[request.method], None
        if not self.enabled:
            why = "the engine keeps none (enable_prefix_caching)"
        elif not _is_dense(request):
            why = "rows of sparse prefill, and those with digests, are not kept"
        elif not method.saves() and method.traits.family == "eviction":
            why = f"{method.name} goes on to evict, or evicts block by block; use one of its kind "
            why += "that cuts a prompt once, when it ends"
        if why is not None:
            raise RequestError(f"save_prefix=True is not possible: {why}")

    def prompt_done(self, request: Request) -> None:
        """The prompt has run, and nothing of it was evicted by its end: others may begin with it.

        Full pages, so that the request goes on writing into its own; where rows cannot be cut back
        all of it.
        """
        if not self.enabled or not _is_dense(request):
            return
        whole = request.prompt_len // self._page * self._page
        length = request.prompt_len if self.cache.keeps_ends_only else whole
        self.cache.keep(request.id, request.tokens[:length], request.salt)

    def prompt_cut(self, request: Request) -> None:
        """All of the prompt has run, and what its method evicts of it is gone."""
        if self.enabled:
            prompt = request.tokens[: request.prompt_len]
            self.cache.keep(request.id, prompt, _saved_salt(request), evicted=True)

    def values(self) -> dict[str, float]:
        """Counters by name."""
        found = {f"prefix_miss_{reason}": float(n) for reason, n in self.misses.items()}
        return found | {"prefix_cache_queries": self.queries, "prefix_cache_hits": self.hits}


def _saved_salt(request: Request) -> str:
    """Under what cut rows are found: by the same method, with the same knobs and budget."""
    s = request.sparse
    return repr((request.salt, request.method, s.budget, s.ratio, s.kv_error))


def _is_dense(request: Request) -> bool:
    return request.prefill == DENSE_PREFILL and not request.sparse.digests


def _why_not(request: Request, limit: int) -> Miss | None:
    """Why a prompt is not looked up; None if it is."""
    sparse, sampling = request.sparse, request.sampling
    if sampling.prompt_logprobs is not None:
        return Miss("bypassed", detail="prompt_logprobs")
    for name in ("digests", "dropped_mass"):
        if getattr(sparse, name):
            return Miss("bypassed", detail=name)
    if request.prefill != DENSE_PREFILL:
        return Miss("fingerprint", detail="prefill")
    if limit <= 0:
        is_short = request.prompt_len <= 1
        return Miss("below_page") if is_short else Miss("fingerprint", detail="method")
    return None
