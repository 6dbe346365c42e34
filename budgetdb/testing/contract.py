"""How the checks say that a promise is broken."""

from __future__ import annotations

from collections.abc import Callable


class ContractError(AssertionError):
    """A plugin breaks a promise of its contract; the message says which one, and at what values."""


def require(kept: bool, broken: str) -> None:
    """Go on if a promise is kept.

    Raises:
        ContractError: it is not; `broken` says what was found.
    """
    if not kept:
        raise ContractError(broken)


def require_value_error(call: Callable[[], object], what: str) -> None:
    """Go on if `call` raises a ValueError.

    Raises:
        ContractError: it returned, or raised something else; `what` says what was asked of it.
    """
    try:
        answer = call()
    except ValueError:
        return
    except Exception as error:
        raise ContractError(f"{what} must raise a ValueError, and raised {type(error).__name__}: {error}") from error
    raise ContractError(f"{what} must raise a ValueError, and returned {answer!r}")
