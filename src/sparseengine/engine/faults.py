"""The boundary at which one request's failure stops.

An exception inside a step may come from a method, a grammar or one request's data. Code that knows
whose work it does names the requests with `blame`; `isolated_step` ends the one that is to blame
and runs the others again from their tokens. When several may be to blame, the scheduler runs each
of them alone until it is past the point of failure, and whoever fails alone is ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sparseengine.engine.engine import Engine
    from sparseengine.engine.outputs import RequestOutput

_log = logging.getLogger("sparseengine.engine")
_ATTRIBUTE = "sparseengine_requests"


def blame(error: BaseException, request_ids: Iterable[int]) -> None:
    """Note on an exception whose work was being done; the innermost note stays."""
    if not hasattr(error, _ATTRIBUTE):
        setattr(error, _ATTRIBUTE, tuple(request_ids))


def blamed(error: BaseException) -> tuple[int, ...]:
    """Ids of the requests that an exception was blamed on, maybe none."""
    found: tuple[int, ...] = getattr(error, _ATTRIBUTE, ())
    return found


def is_fatal(error: BaseException) -> bool:
    """Whether the device is lost: nothing can run after that."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def describe(error: BaseException) -> str:
    """One line for the client: what failed, without a traceback."""
    lines = str(error).strip().splitlines()
    detail = f": {lines[0][:200]}" if lines else ""
    return f"the request failed inside the engine ({type(error).__name__}{detail})"


def attempt(action: Callable[[], object]) -> bool:
    """Run a clean-up; its failure is logged and must not stop the others'."""
    try:
        action()
    except Exception as error:
        if is_fatal(error):
            raise
        _log.exception("a clean-up failed")
        return False
    return True


def isolated_step(engine: Engine) -> list[RequestOutput]:
    """`engine.step()`, except that a failure ends the request that caused it and no other.

    Raises only when the device is lost.
    """
    try:
        return engine.step()
    except Exception as error:
        if is_fatal(error):
            raise
        _log.exception("a step failed; blamed requests: %s", blamed(error) or "all that run")
        engine.recover(error)
        return engine.report()
