"""Checks with one short request whether the model hub can be reached. Without a network the user gets one line of error."""

from __future__ import annotations

from functools import cache

_SECONDS = 5.0


@cache
def reachable() -> bool:
    """Whether the hub can be reached. If one request fails, the hub's libraries are set to use only their local cache.

    By default the libraries would try five times, with growing pauses, and print a line for each try.
    """
    import huggingface_hub.constants as hub

    if not hub.HF_HUB_OFFLINE:
        try:
            import httpx

            httpx.head(hub.ENDPOINT, timeout=_SECONDS)
            return True
        except Exception:  # no route, no DNS entry, an unusable proxy: the hub cannot be reached
            import datasets.config

            hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return False
