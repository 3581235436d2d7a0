"""What steps were like, as plain numbers that add up."""

from __future__ import annotations

from bisect import bisect_left

from sparseengine.core.plan import Purpose, StepPlan

TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepStats:
    """A histogram of the tokens of a step, and how many steps of decodes were not replayed.

    counts: steps with at most TOKEN_BOUNDS[i] tokens and more than the bound before; the last
    entry has those above all bounds.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(TOKEN_BOUNDS) + 1)
        self.num_tokens = 0
        self.num_eager_decodes = 0
        self._replays = 0

    def note(self, plan: StepPlan, num_replays: int | None) -> None:
        """A step was launched. num_replays: of captured graphs so far; None: there are none."""
        tokens = plan.num_tokens
        self.counts[bisect_left(TOKEN_BOUNDS, tokens)] += 1
        self.num_tokens += tokens
        if num_replays is None:
            return
        if num_replays == self._replays and plan.chunks[-1].purpose is Purpose.DECODE:
            self.num_eager_decodes += 1
        self._replays = num_replays

    def values(self) -> dict[str, float]:
        """By name: each bound's count, those above, the sum, the eager steps."""
        found: dict[str, float] = {
            f"iteration_tokens_le_{bound}": count
            for bound, count in zip((*TOKEN_BOUNDS, "inf"), self.counts, strict=True)
        }
        found["iteration_tokens_sum"] = self.num_tokens
        found["route_fallback_decode_graph"] = self.num_eager_decodes
        return found
