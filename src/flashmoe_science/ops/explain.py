"""Explaining a call: the public function runs as usual, and ends with the decision where it would launch.

A function mode is on meanwhile, so that no launch is looked up or stored (calls.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import Config

_PACKAGE = __name__.partition(".")[0]
_EXPLAINING = ContextVar("explaining", default=False)


class Explained(Exception):
    """Raised in the place of a launch that is explained."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(str(decision))
        self.decision = decision


class _NoLaunches(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def is_explaining() -> bool:
    """Whether the call is one of ``explained``'s. Only calls that are not plain need to ask."""
    return not torch.compiler.is_compiling() and _EXPLAINING.get()


def explained(function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Decision:
    """What serves the first call of ours in a call of ``function``, and why. Raises what that call would, and TypeError if it
    is not a function of this package and calls none."""
    token = _EXPLAINING.set(True)
    try:
        with _NoLaunches(), torch.compiler.set_stance("force_eager"):  # of a compiled function the function itself
            function(*arguments, **options)
    except Explained as found:
        return found.decision
    finally:
        _EXPLAINING.reset(token)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if not f"{getattr(function, '__module__', '')}.".startswith(f"{_PACKAGE}."):
        raise TypeError(
            f"explain is given {name}, which is no function of {_PACKAGE} and calls none; give one of its functions"
        )
    return Decision("pytorch", Config(), "PyTorch's operators compute it, and no kernel of ours does", "required")
