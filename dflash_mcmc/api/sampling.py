"""Samples from Python: of a model that is loaded for one call, or of an engine that stays loaded."""

import sys
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from dflash_mcmc.api import prompts as read_prompts
from dflash_mcmc.api.choices import LoadedModel, configuration, evaluating, known_only, model_of, named_by_argument, turn_of
from dflash_mcmc.api.prompts import Prompts
from dflash_mcmc.blend import Blend
from dflash_mcmc.chains import build
from dflash_mcmc.config.schema import Config, checked
from dflash_mcmc.dataset import stop_strings
from dflash_mcmc.decoder import Decoder
from dflash_mcmc.draft import Draft
from dflash_mcmc.engine import Engine
from dflash_mcmc.engine.batching.interface import ChainTarget, Finished
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.verdicts import NOT_DRAWN, TOO_LONG
from dflash_mcmc.hardware import Hardware
from dflash_mcmc.model import Model
from dflash_mcmc.ops import Chain
from dflash_mcmc.process import bars
from dflash_mcmc.runner.fitting import TooLong
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.store import records
from dflash_mcmc.types import ChainResult, Cost, Trajectory

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LoadedEngine:
    """A model that stays loaded, and draws samples with any sampler. `import dflash_mcmc as dm` calls it `dm.Engine`.

    The first call that draws loads the weights, after its arguments are checked. Threads can share an engine or a model: one
    draws at a time, and each gets the samples that it gets alone. Runs of `dm.run` take turns with engines in the same way.
    The engine is a context manager.

    Args:
        model: a loaded `transformers` causal language model; or an option such as "tiny", a folder or a hub name; or a
            component of the group `model`.
        tokenizer: the tokenizer of a loaded model; None otherwise.
        engine: a component or a name; None takes the engine of slots. Only that one takes a loaded model.
        hardware: a component or a name, such as `dm.Local(num_slots=8)` or "gpu"; None takes `hardware=local`. The device of
            a loaded model is its own.
        chat: whether texts and messages go through the tokenizer's chat template, with thinking off. A component of the group
            `model` has this option itself.

    Raises:
        UserError: for values that do not fit together, with the message of the command line.
    """

    @known_only
    def __init__(self, model: "PreTrainedModel | str | Path | Model", tokenizer: "PreTrainedTokenizerBase | None" = None, *,
                 engine: Engine | str | None = None, hardware: Hardware | str | None = None, chat: bool = True):
        self._config: Config | None = configuration({"engine": engine, "hardware": hardware}, {})
        with named_by_argument():
            self._config.model = model_of(model, tokenizer, chat)
            self._config.model.check(self._config)
        self._loaded: Any = model if isinstance(self._config.model, LoadedModel) else None
        self._held: Any = None
        self._loading = threading.Lock()

    @known_only
    def sample(self, prompts: Prompts, *, sampler: Sampler | str | None = None, blend: Blend | str | None = None,
               decoder: Decoder | str | None = None, draft: Draft | str | None = None, num_chains: int = 1,
               max_new_tokens: int = 128, stop: Sequence[str] = (), seed: int = 0,
               progress: bool = True) -> "SampleList":
        """A sample for each prompt and chain, in this order; see `sample`. Ctrl-C returns those that are finished."""
        finished: list[Sample] = []
        with closing(self.stream(prompts, sampler=sampler, blend=blend, decoder=decoder, draft=draft, num_chains=num_chains,
                                 max_new_tokens=max_new_tokens, stop=stop, seed=seed, progress=progress)) as stream:
            try:
                for drawn in stream:
                    finished.append(drawn)
            except KeyboardInterrupt:
                print(f"stopped: {len(finished)} of {len(prompts) * num_chains} samples are finished", file=sys.stderr)
        return SampleList(sorted(finished, key=lambda drawn: (drawn.prompt, drawn.chain)))

    @known_only
    def stream(self, prompts: Prompts, *, sampler: Sampler | str | None = None, blend: Blend | str | None = None,
               decoder: Decoder | str | None = None, draft: Draft | str | None = None, num_chains: int = 1,
               max_new_tokens: int = 128, stop: Sequence[str] = (), seed: int = 0,
               progress: bool = False) -> "Generator[Sample, None, None]":
        """Yields each sample when its chain ends; see `sample` for the arguments. They are checked at once.

        Other calls with the same model wait until the stream has ended or is closed.
        """
        asked = read_prompts.by_id(prompts)
        config = self._configured({"sampler": sampler, "blend": blend, "decoder": decoder, "draft": draft},
                                  {"seed": seed, "num_chains": num_chains, "dataset.max_new_tokens": max_new_tokens,
                                   "dataset.stop": stop_strings(stop, "stop")})
        target = self._target
        token_ids, too_long = read_prompts.all_token_ids(config, target, asked)
        return self._drawn(config, target, list(asked), token_ids, too_long, progress)

    def _configured(self, chosen: Mapping[str, Any], values: Mapping[str, Any]) -> Config:
        """The checked configuration with this engine's model and hardware. Raises UserError."""
        with named_by_argument():
            loaded, config = self._known(), configuration(chosen, values)
            config.model, config.engine, config.hardware = loaded.model, loaded.engine, loaded.hardware
            return checked(config)

    def _drawn(self, config: Config, target: ChainTarget, names: list[str], token_ids: Mapping[str, np.ndarray],
               too_long: Mapping[str, TooLong], progress: bool) -> "Generator[Sample, None, None]":
        """Yields the samples of prompts that are too long first, which are empty.

        Args:
            names: ids of all prompts in order.
        """
        tags = [(index, chain) for index in range(len(names)) for chain in range(config.num_chains)]
        # The empty sample of a prompt that does not fit into the model
        yield from (Sample(index, names[index], chain, "", [], 0.0, 0.0, 0, 0, 0, Cost(), TOO_LONG, (),
                           too_long[names[index]].reason) for index, chain in tags if names[index] in too_long)
        chains = (((index, chain), build.chain(config, config.sampler, names[index], chain, token_ids[names[index]], target))
                  for index, chain in tags if names[index] in token_ids)
        total, longest = len(token_ids) * config.num_chains, max(map(len, token_ids.values()))
        with closing(self._run(config, target, chains, longest, total, progress)) as running:
            for done, model in running:
                yield of_chain(done, names, token_ids, model)

    def _run(self, config: Config, target: ChainTarget, chains: Iterable[tuple[Any, Chain]], longest: int, total: int,
             progress: bool) -> Generator[tuple[Finished[Any], ChainTarget], None, None]:
        """Yields each chain that has ended, and the model that decodes its tokens. The longest prompt has `longest` tokens."""
        evaluated = nullcontext() if self._loaded is None else evaluating(self._loaded)
        with turn_of(config.engine.resource(target)).taken(nests=False), evaluated:
            runner = config.engine.start(config, target, longest, total)
            with closing(runner), bars.Bar(total, "sample", shown=progress) as bar:
                for done in runner.run(chains):
                    bar.update()
                    yield done, runner.model

    def _known(self) -> Config:
        if self._config is None:
            raise UserError("engine: is closed; allowed: calls before close() or inside its `with`")
        return self._config

    @property
    def _target(self) -> Any:
        """The target. The first thread that needs it loads it, and others wait."""
        with self._loading:
            config = self._known()
            if self._held is None:
                device = str(self._loaded.device) if self._loaded is not None else config.hardware.resolve()
                with named_by_argument():
                    self._held = config.engine.load(config, device)
            return self._held

    def close(self) -> None:
        """Lets go of the model. Later calls raise UserError."""
        with self._loading:
            self._config = self._loaded = self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@known_only
def sample(model: "PreTrainedModel | str | Path | Model", tokenizer: "PreTrainedTokenizerBase | None", prompts: Prompts, *,
           sampler: Sampler | str | None = None, blend: Blend | str | None = None, decoder: Decoder | str | None = None,
           draft: Draft | str | None = None, engine: Engine | str | None = None, hardware: Hardware | str | None = None,
           num_chains: int = 1, max_new_tokens: int = 128, stop: Sequence[str] = (), seed: int = 0, chat: bool = True,
           progress: bool = True) -> "SampleList":
    """Draws `num_chains` samples of each prompt, all chains in one batch.

    The same seed and prompt ids give the tokens of the command line. The prompts of a list have the ids "00000", "00001",
    ..., like the rows of a file with `dataset=jsonl`. The keys of a mapping are the ids of its prompts.

    Args:
        model: a loaded model; an option, a folder or a hub name; or a component; see `LoadedEngine`.
        tokenizer: the tokenizer of a loaded model; None otherwise.
        prompts: texts; conversations, each a list of messages with `role` and `content`; or token ids, which are used as they
            are. In order, or by id.
        sampler: a component, such as `dm.PowerMH(alpha=4)`, or the name of a sampler or a condition ("ps"); None takes
            `power_mh`.
        blend: a component or a name; None leaves the target as it is.
        decoder: a component or a name; None decodes token by token.
        draft: a component or a name, for a decoder, blend or sampler that needs one.
        engine: a component or a name; see `LoadedEngine`.
        hardware: a component or a name; see `LoadedEngine`.
        num_chains: samples of each prompt.
        max_new_tokens: longest answer in tokens.
        stop: strings that end an answer (`dataset.stop` of the command line). An answer ends at the first token at which its
            text contains one.
        seed: seed of all randomness.
        chat: whether the chat template is used; see `LoadedEngine`.
        progress: whether a progress bar is shown.

    Returns:
        A list with a sample for each prompt and chain, in this order, which a notebook shows as a table. Those of a prompt
        that does not fit into the model are empty, with `finish_reason="too_long"`. After Ctrl-C while chains are drawn,
        those that are finished.

    Raises:
        UserError: for values that do not fit together, with the message of the command line, and if no prompt fits.
    """
    with LoadedEngine(model, tokenizer, engine=engine, hardware=hardware, chat=chat) as loaded:
        return loaded.sample(prompts, sampler=sampler, blend=blend, decoder=decoder, draft=draft, num_chains=num_chains,
                             max_new_tokens=max_new_tokens, stop=stop, seed=seed, progress=progress)


class Sample(NamedTuple):
    """The result of one chain."""

    prompt: int
    """Index of the prompt in the order given."""
    id: str
    """Name of the prompt, which the randomness depends on."""
    chain: int
    text: str
    """Generated text without special tokens, up to a string of `stop`."""
    tokens: list[int]
    """Generated token ids, with all tokens of a stop string."""
    log_p: float
    """Log probability of the tokens under the (blended) target at temperature 1, in nats."""
    log_q: float
    """Log probability of the tokens under the sampling parameters that they were drawn with, in nats."""
    proposals: int
    """Metropolis-Hastings proposals."""
    accepted: int
    """Accepted proposals."""
    moved: int
    """Accepted proposals that differ from the sequence they replace."""
    cost: Cost
    """Tokens and forward passes that the chain used."""
    finish_reason: str
    """Why the sequence ended: `stop_id` = with a stop id of the model, `stop_string` = with a string of `stop`, `length` = at
    `max_new_tokens`, `not_drawn` = see `failure`, `too_long` = the prompt leaves too few of the model's positions."""
    trace: tuple[dict[str, Any], ...]
    """One entry for each proposal: block, step, cut, lengths, log ratio, decision."""
    failure: str = ""
    """Why the chain could not be drawn; the other fields are then empty."""
    sampling_mask: list[list[int]] | None = None
    """For each token, the ids that the law of the draw kept, with `dm.Temperature(sampling_mask=True)`."""
    sampling_mask_logprobs: list[list[float]] | None = None
    """Their log probabilities under that law, in nats."""

    def _repr_html_(self) -> str:
        return SampleList([self])._repr_html_()


class SampleList(list[Sample]):
    """Samples in order. A notebook shows them as a table."""

    def to_pandas(self) -> "pd.DataFrame":
        """A table with a row for each sample and a column for each field; the fields of `cost` are columns of their own."""
        import pandas as pd

        rows = [{**one._asdict(), **one.cost._asdict()} for one in self]
        return pd.DataFrame(rows).drop(columns="cost", errors="ignore")

    def to_hf_dataset(self) -> "datasets.Dataset":
        """The same table as a dataset of Hugging Face."""
        import datasets

        return datasets.Dataset.from_pandas(self.to_pandas(), preserve_index=False)

    def _repr_html_(self) -> str:
        from tabulate import tabulate

        rows = [(one.id, one.chain, one.text or one.failure, f"{one.log_p:.2f}", f"{one.accepted} of {one.proposals}",
                 len(one.tokens), one.finish_reason) for one in self]
        headers = ("id", "chain", "text", "log p", "accepted", "tokens", "end")
        return str(tabulate(rows, headers, tablefmt="html", disable_numparse=True))


def of_chain(done: Finished[tuple[int, int]], names: list[str], token_ids: Mapping[str, np.ndarray],
             target: ChainTarget) -> Sample:
    """The sample of a chain that has ended.

    Args:
        done: its tag is (index of the prompt, number of the chain).
        names: ids of all prompts in order.
        token_ids: prompts by id.
        target: decodes the tokens.
    """
    index, chain = done.tag
    result = done.result or ChainResult(Trajectory.start(token_ids[names[index]]))
    drawn = result.trajectory
    reason = NOT_DRAWN if done.result is None else records.finish_of(drawn, target.stop_ids)
    return Sample(index, names[index], chain, target.decode(drawn.tokens), drawn.tokens.tolist(), float(drawn.log_p.sum()),
                  float(drawn.log_q.sum()), result.proposals, result.accepted, result.moved, done.cost, reason, result.trace,
                  done.failure, **drawn.sampling_mask())
