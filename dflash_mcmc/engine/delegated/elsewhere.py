"""Engines that carry out the operations of their chains elsewhere, in vLLM or on a server: target and chains in progress.

The target is read from a checkpoint's other files than its weights.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers

from dflash_mcmc.engine.batching.chains import ChainPool, LiveChain, RequestPart
from dflash_mcmc.engine.batching.interface import NOT_NUMBERS, ChainRunner, Finished, Meter, Tag
from dflash_mcmc.engine.batching.stop_strings import StopStrings
from dflash_mcmc.errors import UserError, reason_of
from dflash_mcmc.grading.extraction import cut
from dflash_mcmc.model.files import precision_name, stop_ids_of
from dflash_mcmc.ops import Chain
from dflash_mcmc.tokenizer import PromptEncoder, continuation, encode, texts_of
from dflash_mcmc.types import Trajectory


class UnloadedTarget(NamedTuple):
    """A checkpoint and its tokenizer.

    Attributes:
        folder: the checkpoint.
        dtype: name of the precision of weights and activations.
        device: device name for PyTorch.
        config: the configuration of transformers, of the text model.
        max_positions: longest sequence, prompt included. A sliding window is no limit, since these engines compute it.
        vocab_size: number of logits.
        stop_ids, stop_strings: see `LanguageModel`.
        forbidden: ids without a token (padding rows of the head), which can never be drawn.
    """

    folder: Path
    dtype: str
    device: str
    config: Any
    tokenizer: Any
    max_positions: int | None
    vocab_size: int
    stop_ids: tuple[int, ...]
    forbidden: tuple[int, ...]
    stop_strings: StopStrings | None = None

    def stopping_at(self, strings: Sequence[str]) -> "UnloadedTarget":
        """The same target, whose generations end at these strings too. Raises UserError."""
        return self._replace(stop_strings=StopStrings(strings, texts_of(self.tokenizer, self.vocab_size)) if strings else None)

    def ends(self, tokens: np.ndarray) -> bool:
        """Whether generated tokens, int64 (n,), end with a stop id or with the token that completes a stop string."""
        return int(tokens[-1]) in self.stop_ids or (self.stop_strings is not None and self.stop_strings.ends(tokens))

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        """Token ids of a prompt, int64. Set `add_special_tokens` for text without a chat template."""
        return encode(self.tokenizer, text, add_special_tokens, self.max_positions, self.vocab_size)

    def decode(self, tokens: np.ndarray) -> str:
        """Text of generated tokens, without special tokens, up to a stop string."""
        text = continuation(self.tokenizer, tokens.tolist())
        return text if self.stop_strings is None else cut(text, self.stop_strings.strings)


def read(folder: Path, dtype: str, device: str, tokenizer: Any) -> UnloadedTarget:
    """Reads the target's files, but not its weights. Raises UserError.

    Args:
        dtype: `auto` or a name of PyTorch's types.
    """
    outer = configuration(folder)
    config = outer.get_text_config()
    token_ids, sources = set(tokenizer.get_vocab().values()), [outer, config, tokenizer]
    if (folder / "generation_config.json").is_file():
        sources.insert(0, transformers.GenerationConfig.from_pretrained(folder))
    if dtype == "auto":
        dtype = precision_name(getattr(config, "dtype", None) or getattr(outer, "dtype", None) or "float32")
    return UnloadedTarget(folder, dtype, device, config, tokenizer, positions(config), config.vocab_size,
                      tuple(sorted(stop_ids_of(sources))),
                      tuple(token for token in range(config.vocab_size) if token not in token_ids))


def configuration(folder: Path) -> Any:
    """The configuration of transformers. Raises UserError."""
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen types here; all mean that this file cannot be used
        reason = reason_of(error, 300)
        raise UserError(f"model.path: cannot read config.json in {str(folder)!r}: {reason}") from error


def positions(config: Any) -> int | None:
    """Longest sequence of a configuration, without regard to sliding windows; None without a limit."""
    return getattr(config, "max_position_embeddings", None)


def prompt_encoder(model: Any) -> PromptEncoder | None:
    """The encoder of a model's prompts, with its positions as of `positions`; None if its configuration is not here."""
    encoder = model.prompt_encoder()
    shape = None if encoder is None else model.shape("cpu")
    return encoder if encoder is None or shape is None else encoder._replace(max_positions=positions(shape.config))


class DelegatedRunner(ChainRunner):
    """Runs chains whose operations are requests to something else.

    Args:
        num_chains: chains in progress at once.
    """

    model: UnloadedTarget

    def __init__(self, num_chains: int):
        super().__init__()
        self._num_chains, self._asked = num_chains, dict[Any, RequestPart]()

    def steps(self, chains: Iterable[tuple[Tag, Chain] | None]) -> Generator[Finished[Tag] | None, None, None]:
        self._meter.reset_clock()
        self._dropped.clear()
        run = LiveChains(chains, self._num_chains, self._begin, self._meter)
        try:
            yield from run.fill()
            while run.chains:
                self._step(run)
                run.end_dropped(self._dropped)
                self._dropped.clear()
                self._abort([request for request, part in self._asked.items() if part.chain.ended])
                yield from run.fill()
                yield None
        finally:
            self._abort(list(self._asked))

    @abstractmethod
    def _begin(self, chain: LiveChain) -> None:
        """Asks for the operations of a chain's new request, but for those that are answered at once."""

    @abstractmethod
    def _step(self, run: "LiveChains") -> None:
        """Gives chains the answers to requests that have ended, and takes these out of `_asked`."""

    @abstractmethod
    def _abort(self, requests: list[Any]) -> None:
        """Ends requests, and takes them out of `_asked`."""


class LiveChains(ChainPool):
    """The chains of one run, for an engine whose operations are carried out elsewhere.

    Args:
        source: as of `ChainRunner.run`.
        num_chains: chains in progress at once.
        begin: begins the operations of a chain's new request.
    """

    def __init__(self, source: Iterable[tuple[Hashable, Chain] | None], num_chains: int, begin: Callable[[LiveChain], None],
                 meter: Meter):
        super().__init__(source, meter)
        self._num_chains, self._asks, self._clocks = num_chains, begin, dict[LiveChain, float]()

    def fill(self) -> list[Finished]:
        """Goes on with chains that have paused, and begins chains while there is room. Returns the chains that have ended."""
        self.resume()
        while self.more and len(self.chains) < self._num_chains and (entry := self._next()) is not None:
            chain = LiveChain(entry.tag, entry.generator)
            self.chains[chain], self._clocks[chain] = None, self._meter.clock
            chain.ask(entry.request)
            self._begin(chain)
            self.advance(chain)
        return self.take_finished()

    def end(self, part: RequestPart, answer: Trajectory | None, failure: str = NOT_NUMBERS) -> None:
        """Gives a chain the answer to an operation of its request; None ends it, for this reason."""
        if part.chain.ended:
            return
        if answer is None:
            self._give_up(part.chain, failure)
            return
        part.answer = answer
        self.advance(part.chain)

    def fail(self, chain: LiveChain, error: Exception) -> None:
        """Raises an error in a chain. One that catches it ends, and another ends the run."""
        if chain.ended:
            return
        with contextlib.suppress(StopIteration):
            chain.generator.throw(error)
        self._give_up(chain, str(error))

    def _begin(self, chain: LiveChain) -> None:
        self._asks(chain)

    def _release(self, chain: LiveChain) -> None:
        chain.seconds = self._meter.clock - self._clocks.pop(chain)
