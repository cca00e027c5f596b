"""What ends a draw: stop ids, stop strings, and the last position.

A sequence ends at the first token at which its text contains a stop string. The text is made of the bytes of the generated
tokens (`tokenizer.TokenTexts`).

An automaton over bytes (Aho & Corasick 1975, "Efficient string matching") knows after each token how much of a string the
text ends with. Its steps are stored for whole tokens: `table[state, classes[token]]` is the state after the token. Tokens
with the same steps from every state are one class, and most tokens are in the class that leads to nothing. One look-up is all
that a token costs. The state depends on the last bytes of the text alone, so it need not be kept with a trajectory.

The tables of several sets of strings are joined as one (`Endings`), so that each row of a batch can have a set of its own.
A state belongs to a set. Two states belong to all sets: 0 of rows without strings, and 1 after a string was found. A row's
set is therefore known by its state alone.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from dflash_mcmc.ops import Operation
from dflash_mcmc.tokenizer import TokenTexts

_NOTHING, FOUND = 0, 1


class StopStrings:
    """The strings that end a sequence, as a table over the tokens of a vocabulary.

    Attributes:
        strings: the strings.
        classes: int32 (vocabulary,), the class of each token.
        table: int32 (states, classes), the state after a token of a class.

    Args:
        strings: at least one, each not empty. A string that is the text of a special token ends a sequence at this token.
        texts: the bytes of the tokens.
    """

    def __init__(self, strings: Sequence[str], texts: TokenTexts):
        self.strings, self._texts = tuple(strings), texts
        self._specials = [texts.specials[string] for string in strings if string in texts.specials]
        # A string that contains another one is never the first to be found.
        patterns = [string.encode() for string in strings
                    if not any(other in string for other in strings if other != string)]
        self._longest = max(map(len, patterns))
        self._steps = _steps(patterns)
        self.classes, self.table = self._compiled()

    def state(self, tokens: np.ndarray) -> int:
        """The state after generated tokens, int64 (n,). Reads only the last of them."""
        pieces, first, held = self._texts.pieces, len(tokens), 0
        last = len(pieces[tokens[-1]]) if first else 0
        while first and held < self._longest + last:
            first -= 1
            held += len(pieces[tokens[first]])
        state = _NOTHING
        for token in tokens[first:].tolist():
            state = int(self.table[state, self.classes[token]])
        return state

    def ends(self, tokens: np.ndarray) -> bool:
        """Whether the last of these generated tokens is the first at which their text contains a string."""
        return bool(len(tokens)) and self.state(tokens) == FOUND

    def _compiled(self) -> tuple[np.ndarray, np.ndarray]:
        """(classes, table). Tokens are divided further with each state from which some of them lead elsewhere."""
        length = np.array([len(piece) for piece in self._texts.pieces])
        text, start = np.frombuffer(b"".join(self._texts.pieces), np.uint8), length.cumsum() - length
        usual = self._walked(_NOTHING, np.zeros(len(length), np.int32), text, start, length)
        changes = dict[int, tuple[np.ndarray, np.ndarray]]()
        for state in range(FOUND + 1, len(self._steps)):
            after = self._walked(state, usual, text, start, length)
            tokens = np.flatnonzero(after != usual)
            changes[state] = tokens, after[tokens]
        classes = np.unique(usual, return_inverse=True)[1]
        for tokens, after in changes.values():
            _, mine = np.unique(np.stack([classes[tokens], after]), axis=1, return_inverse=True)
            classes[tokens] = classes.max() + 1 + mine
        _, places, classes = np.unique(classes, return_index=True, return_inverse=True)
        table = np.tile(usual[places], (len(self._steps), 1))
        table[FOUND] = FOUND
        for state, (tokens, after) in changes.items():
            table[state, classes[tokens]] = after
        return classes.astype(np.int32), table

    def _walked(self, state: int, usual: np.ndarray, text: np.ndarray, start: np.ndarray,
                length: np.ndarray) -> np.ndarray:
        """The states after each token from `state`. A walk that meets the one from nothing ends there, as in `usual`."""
        after, tokens, place = usual.copy(), np.arange(len(length)), 0
        here, there = np.full(len(length), state, np.int32), np.zeros(len(length), np.int32)
        while len(tokens):
            whole = length[tokens] == place
            after[tokens[whole]] = here[whole]
            tokens, here, there = tokens[~whole], here[~whole], there[~whole]
            byte = text[start[tokens] + place]
            here, there = self._steps[here, byte], self._steps[there, byte]
            if state != _NOTHING:
                apart = here != there
                tokens, here, there = tokens[apart], here[apart], there[apart]
            place += 1
        after[self._specials] = FOUND
        return after


def _steps(patterns: Sequence[bytes]) -> np.ndarray:
    """The state after each byte, int32 (states, 256). State 0 is no beginning of a pattern; state 1, a found one, stays."""
    children: list[dict[int, int]] = [{}, {}]
    whole = set[int]()
    for pattern in patterns:
        node = _NOTHING
        for byte in pattern:
            if byte not in children[node]:
                children.append({})
                children[node][byte] = len(children) - 1
            node = children[node][byte]
        whole.add(node)
    steps = np.full((len(children), 256), _NOTHING, np.int32)
    steps[FOUND] = FOUND
    shorter = [_NOTHING] * len(children)  # the longest proper ending of a node's text that is a beginning of a pattern
    level = [_NOTHING]
    while level:
        node = level.pop(0)
        if node != _NOTHING:
            steps[node] = steps[shorter[node]]
        for byte, child in children[node].items():
            shorter[child] = int(steps[shorter[node], byte]) if node != _NOTHING else _NOTHING
            if child in whole:
                steps[node, byte] = FOUND
            else:
                steps[node, byte] = child
                level.append(child)
    return steps


class Endings:
    """Finds the tokens at which draws end. The sets of stop strings are joined on a device, when they are first needed.

    Args:
        stop_ids: tokens that end a draw.
        strings: strings that end the draws of operations without strings of their own; None for none.
        compiled: the tables of the strings of an operation.
    """

    def __init__(self, stop_ids: Collection[int], strings: StopStrings | None, device: torch.device,
                 compiled: Callable[[tuple[str, ...]], StopStrings]):
        self.ids = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
        self._stop_ids, self._strings, self._compiled = frozenset(stop_ids), strings, compiled
        self._offsets: dict[tuple[str, ...], int] = {}
        self._classes, self._steps = (torch.zeros(size, dtype=torch.int32, device=device) for size in (0, 2))
        self._steps[FOUND] = FOUND
        self._vocabulary, self._row = (torch.tensor(values, device=device) for values in ([0, 0], [_NOTHING, FOUND]))

    @property
    def num_sets(self) -> int:
        """The number of sets of strings so far. The tensors are others after a set was added."""
        return len(self._offsets)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What `after` reads: places of a state's classes, classes of tokens, places of a state's row, and its states."""
        return [self._vocabulary, self._classes, self._row, self._steps]

    def begin(self, operation: Operation, tokens: np.ndarray) -> int:
        """The state of the stop strings of a draw that continues generated tokens, int64 (n,)."""
        strings = self._strings_of(operation)
        if strings is None:
            return _NOTHING
        if strings.strings not in self._offsets:
            self._add(strings)
        state = strings.state(tokens)
        return FOUND if state == FOUND else self._offsets[strings.strings] + state

    def after(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states, int64 (rows,), after a token each, int64 (rows,). There must be a set."""
        classes = self._classes[self._vocabulary[states] + tokens]
        return self._steps[self._row[states] + classes].long()

    def _add(self, strings: StopStrings) -> None:
        """Appends the classes of all tokens, and the rows of the set's table. Both are flat, since sets differ in size."""
        device = self.ids.device
        if not self._offsets:  # rows without strings have one class for every token
            self._classes = torch.zeros(len(strings.classes), dtype=torch.int32, device=device)
        states, width = strings.table.shape
        offset = self._offsets[strings.strings] = len(self._row)
        table = np.where(strings.table == FOUND, FOUND, strings.table + offset).astype(np.int32)
        rows = len(self._steps) + width * torch.arange(states, device=device)
        self._vocabulary = torch.cat([self._vocabulary, torch.full_like(rows, len(self._classes))])
        self._row = torch.cat([self._row, rows])
        self._classes, self._steps = (torch.cat([old, torch.from_numpy(more).to(device)]) for old, more in (
            (self._classes, strings.classes), (self._steps, table.ravel())))

    def ended(self, operation: Operation, tokens: np.ndarray) -> bool:
        """Whether generated tokens, int64 (n,), end with a stop id or with the token that completes a stop string."""
        strings = self._strings_of(operation)
        return int(tokens[-1]) in self._stop_ids or (strings is not None and strings.ends(tokens))

    def states(self, state: torch.Tensor, tokens: torch.Tensor, offered: torch.Tensor) -> torch.Tensor | None:
        """The state of the stop strings after each slot, int64 (rows, slots); None if no row has strings.

        Args:
            state: int64 (rows,), the state before them.
            tokens: int64 (rows, slots), consecutive tokens.
            offered: bool (rows, slots); other slots change no state.
        """
        if not self.num_sets:
            return None
        states = list[torch.Tensor]()
        for slot in range(tokens.shape[1]):
            state = torch.where(offered[:, slot], self.after(state, tokens[:, slot]), state)
            states.append(state)
        return torch.stack(states, dim=1)

    def ends(self, tokens: torch.Tensor, at: torch.Tensor, last: torch.Tensor,
             states: torch.Tensor | None) -> torch.Tensor:
        """Whether a draw ends with the token of a slot, bool (rows, slots).

        Args:
            tokens, at: int64 (rows, slots), tokens and their positions.
            last: int64 (rows,), the last positions of the draws.
            states: the result of `states`.
        """
        ended = (tokens[..., None] == self.ids).any(dim=-1) | (at >= last[:, None])
        return ended if states is None else ended | (states == FOUND)

    def _strings_of(self, operation: Operation) -> StopStrings | None:
        if operation.stop is None:
            return self._strings
        if not operation.stop:
            return None
        return self._compiled(operation.stop)
