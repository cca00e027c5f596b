"""The progress bar of what takes long. While a unit is being worked on, it shows the tokens drawn so far and their rate."""

import sys
import threading

from tqdm.auto import tqdm

_OPEN = threading.local()  # `bar` is the innermost open bar of the thread


class Bar(tqdm):
    """A progress bar on stderr, or in a notebook's page, with a text and drawn tokens behind it. `initial` units are done."""

    def __init__(self, total: int, unit: str, title: str | None = None, *, initial: int = 0, shown: bool = True):
        # Where there is neither a terminal nor a notebook, each update is a line of a log.
        seconds = 0.5 if sys.stderr.isatty() or hasattr(sys, "ps1") else 10.0
        # `miniters=0` lets an update without a unit be shown. Such updates would distort a rate that is smoothed.
        super().__init__(total=total, initial=initial, unit=unit, desc=title, smoothing=0, miniters=0, mininterval=seconds,
                         dynamic_ncols=True, disable=not shown)
        self._text, self._tokens, self._outer = "", 0, getattr(_OPEN, "bar", None)
        _OPEN.bar = self

    def update(self, n: float | None = 1, text: str | None = None, tokens: int = 0) -> bool | None:
        """Counts units that are done, and tokens; replaces the text."""
        self._text, seconds = self._text if text is None else text, self.format_dict["elapsed"]
        self._tokens += tokens
        drawn = f"{self._tokens:,} tokens, {self._tokens / seconds:,.1f} tokens/s" if self._tokens and seconds else ""
        self.set_postfix_str(", ".join(filter(None, (self._text, drawn))), refresh=False)
        return super().update(n)

    def close(self) -> None:
        if getattr(_OPEN, "bar", None) is self:
            _OPEN.bar = self._outer
        super().close()


def drew(tokens: int) -> None:
    """Tells the open bar of this thread that an engine has drawn tokens."""
    if (shown := getattr(_OPEN, "bar", None)) is not None:
        shown.update(0, tokens=tokens)
