"""Whether the model hub can be reached: one short request, so that a machine without network gets one line of error."""

from __future__ import annotations

from functools import cache

_SECONDS = 5.0


@cache
def reachable() -> bool:
    """Sends one request to the hub. Where it fails, the hub's libraries are set to use their cache on this machine.

    By default they would ask five times, with growing pauses and a line for each.
    """
    import huggingface_hub.constants as hub

    if not hub.HF_HUB_OFFLINE:
        try:
            import httpx

            httpx.head(hub.ENDPOINT, timeout=_SECONDS)
            return True
        except Exception:  # no route, no name, a proxy that cannot be spoken to: the hub cannot be reached
            import datasets.config

            hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return False
