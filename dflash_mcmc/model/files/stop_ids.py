"""Stop ids of a checkpoint's configurations, checked for what can be a token id."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_mcmc.errors import UserError

_BITS = 63


def check_stop_ids(field: str, source: str, given: object) -> tuple[int, ...]:
    """The stop ids of a value of `eos_token_id`: none, one, or a list.

    An id outside the vocabulary is allowed, because configurations have one by default. It is never drawn.

    Args:
        field: name in errors.
        source: where the value stands.

    Raises:
        UserError: for anything that is no whole number, or no number of 64 bits.
    """
    ids = tuple(given) if isinstance(given, (list, tuple)) else () if given is None else (given,)
    for token in ids:
        if type(token) is not int or not -2**_BITS <= token < 2**_BITS:
            raise UserError(f"{field}: given eos_token_id {given!r:.60} in {source}; allowed: null, a token id, or a list of "
                            "token ids")
    return ids


def stop_ids_of(sources: Iterable[object]) -> set[int]:
    """All stop ids of configurations and a tokenizer, from their attribute `eos_token_id`. Raises UserError."""
    return {token for source in sources
            for token in check_stop_ids("model.path", type(source).__name__, getattr(source, "eos_token_id", None))}
