"""Tests whether a draft's block can be the proposal of Metropolis-Hastings on p^alpha.

The protocol is from the document "Speculative MCMC Probe: Can a Draft Model Serve as an MCMC Proposal?" (sections 2 to 5).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dflash_mcmc.chains import cost
from dflash_mcmc.components import Settings, identity, register, runtime
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.probe import ForcedProbe, Summary, Unit, Work, check_block, rounded
from dflash_mcmc.probe.speculative_mcmc import tables
from dflash_mcmc.rng import Key
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import TargetShape
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter

PROPOSALS = 4
"""Number of proposals of a timed chain. The first one is not counted (`weighing.seconds_of`)."""


@register("probe", "speculative_mcmc")
@dataclass(slots=True, kw_only=True)
class SpeculativeMCMC(ForcedProbe):
    """Distance of the draft's blocks from p^alpha along greedy answers, and the behaviour of chains that propose the blocks.

    An answer is teacher-forced in whole blocks, whose first token is the anchor. For each token the probe measures KL and
    total variation between p_alpha, the sharpened distribution of the target, and the draft's distribution at several
    temperatures. For each block it draws `num_samples` blocks from the draft, computes their importance weights, and
    simulates independence Metropolis-Hastings with them.
    """
    alpha: float = identity(4.0, "power of the target p^alpha", ge=1)
    draft_temperatures: list[float] | None = identity(None, "temperatures of the draft; null uses 1, 0.5 and 1/alpha", gt=0)
    num_samples: int = identity(100, "blocks drawn for each block of the answer; a chain starts at the first one and proposes "
                                "the others", ge=2, le=1_000_000)
    weights: Literal["reference", "joint"] = identity(
        "joint", "reference = p of a drawn token given the reference tokens before it, as published; joint = these weights "
        "and also weights with p given the drawn tokens before it, which are ratios of two distributions of blocks")
    autoregressive: bool = identity(True, "also draw blocks from the target, token by token at temperature 1/alpha, as the "
                                    "proposal for comparison; its weights are joint")
    timed_rows: int = runtime(8, "chains that propose at once while both proposals are timed, for every answer; 0 = no "
                              "timing. Tables use only timings of this number of chains", ge=0, le=65_536)
    position_edges: list[int] = runtime([10, 30], "indices of the first middle block and of the first late block")

    tables_in = f"{__name__}.tables"
    needs_draft = True

    def check(self, config: Settings) -> None:
        super().check(config)
        listed = self.draft_temperatures
        if listed is not None and (not listed or len(set(listed)) < len(listed)):
            raise ConfigError("probe.draft_temperatures", listed, "different numbers > 0, or null for 1, 0.5 and 1/alpha")
        temperatures = self.temperatures()
        if len({f"{each:g}" for each in temperatures}) < len(temperatures):  # equal names would share an entry in a record
            raise ConfigError("probe.draft_temperatures", temperatures, "numbers that differ in their first six digits")
        edges = self.position_edges
        if len(edges) != 2 or not 0 < edges[0] < edges[1]:
            raise ConfigError("probe.position_edges", edges, "two numbers of blocks, the smaller first, such as [10, 30]")

    def check_target(self, target: "TargetShape") -> None:
        """See `Probe.check_target`. Raises UserError for a target with recurrent layers if continuations are read together."""
        from dflash_mcmc.forcing import sequences

        if target.cache_shape.recurrent is not None and (self.weights == "joint" or self.autoregressive):
            sequences.refuse()

    def temperatures(self) -> list[float]:
        """The temperatures of the draft, from the highest to the lowest."""
        temperatures = [1.0, 0.5, 1.0 / self.alpha] if self.draft_temperatures is None else self.draft_temperatures
        return sorted(set(temperatures), reverse=True)

    def canonical(self, config: Settings) -> dict[str, object]:
        """The temperatures, with null replaced by its meaning."""
        return {"draft_temperatures": self.temperatures()}

    def expected_cost(self, config: Settings) -> UnitCost:
        """The cost of drawing the greedy answer, reading it once, reading the drawn blocks, and timing the proposals.

        All tokens of a drawn block except the last are read. Common beginnings are read once (`config.assumed.shared`).
        """
        answer = cost.forced(config)
        drafted = answer.block_size - 1
        kinds = (len(self.temperatures()) if self.weights == "joint" else 0) + self.autoregressive
        read = answer.blocks * kinds * self.num_samples * max(0, drafted - 1)
        read *= 1.0 - config.assumed.shared
        timed = 2 * self.timed_rows * (answer.prompt + answer.length / 2 + PROPOSALS * drafted)
        return UnitCost(answer.drawing + answer.prompt + answer.length + read + timed,
                        answer.blocks + self.timed_rows * PROPOSALS)

    def recorder(self, config: Settings, model: "LanguageModel", draft: "DFlashDrafter | None",
                 work: Work) -> Callable[[Unit, Answer], dict]:
        """Measures a greedy answer, and times proposals at its middle. Raises ConfigError for answers shorter than a block."""
        import torch

        from dflash_mcmc.probe.speculative_mcmc.weighing import seconds_of

        assert draft is not None  # `needs_draft`
        check_block(config, draft.num_drafted + 1)
        sharpened = SamplingParams(temperature=1.0 / self.alpha)

        def record(unit: Unit, answer: Answer) -> dict:
            with torch.inference_mode():
                found = self.record(model, draft, answer, Key(config.seed).fold_in("speculative_mcmc", unit.problem))
            for name, source in (("target", "blended"), ("draft", "draft")) if self.timed_rows else ():
                found[f"seconds_{name}"] = seconds_of(config.hardware.options(), model, draft, answer, source, sharpened,
                                                      self.timed_rows, PROPOSALS)
                found["timed_rows"] = self.timed_rows
            return found

        return record

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """The document's tables, and three additions: joint weights, moves, and the floor of a simulated acceptance."""
        return tables.summary(records, self.num_samples, self.position_edges, self.timed_rows)

    def record(self, model: "LanguageModel", drafter: "DFlashDrafter", answer: Answer, key: Key) -> dict:
        """The record of an answer. Its lists have an entry per predicted token or per block. Raises NotNumbers.

        `p` has the distances of the draft from the unsharpened target (`weighing.distances`), and `proposals`, by temperature
        of the draft or `target`, those from p^alpha and, by kind of weights, the chain of each block (`weighing.chains`).
        """
        import torch

        from dflash_mcmc.forcing import sequences
        from dflash_mcmc.probe.speculative_mcmc import weighing

        n, samples, joint = drafter.num_drafted, self.num_samples, self.weights == "joint"
        forced = sequences.forced_blocks(drafter, answer.prompt, answer.tokens, keep_cache=joint or self.autoregressive)
        anchors, count = forced.anchors, len(forced.anchors)
        # Distances for every predicted token, and drawn blocks, both by temperature. Distances of `p`: the plain target
        names = {f"{temperature:g}": temperature for temperature in self.temperatures()}
        # For all blocks at once: the numbers of a block must not depend on how many blocks are read together.
        uniforms = {name: torch.from_numpy(key.fold_in("draft", name).uniforms(0, count * n * samples)).view(-1, samples)
                    for name in names}
        laws: dict[str, dict[str, list[float]]] = {name: {"kl": [], "tvd": []} for name in ("p", *names)}
        drawn: dict[str, list] = {name: [] for name in names}
        step = sequences.positions_at_once(model.vocab_size, n) // n
        for start in range(0, count, step):
            target = sequences.checked(model.logits(forced.target[start : start + step].flatten(0, 1)))
            draft = sequences.checked(drafter.logits(forced.draft[start : start + step].flatten(0, 1)))
            for name, alpha, temperature in (("p", 1.0, 1.0), *((name, self.alpha, names[name]) for name in names)):
                for column, values in zip(("kl", "tvd"), weighing.distances(target, draft, alpha, temperature), strict=True):
                    laws[name][column] += rounded(values)
            for name, temperature in names.items():
                mine = uniforms[name][start * n : (start + step) * n].to(target.device)
                found, log_q = weighing.draw(draft, temperature, mine)
                log_p = target.gather(1, found).double() - torch.logsumexp(target.double(), dim=-1, keepdim=True)
                drawn[name].append((found, log_p, log_q))
        proposed = {name: weighing.Proposed(*(
            torch.cat(pieces).view(count, n, samples).transpose(1, 2).cpu().numpy() for pieces in zip(*parts, strict=True)))
            for name, parts in drawn.items()}
        weighed = {(name, "reference"): blocks for name, blocks in proposed.items()}
        if joint:
            every = np.concatenate([blocks.tokens for blocks in proposed.values()], axis=1)
            along = np.stack([weighing.joint_log_p(model, forced.reading, anchor, tokens)
                              for anchor, tokens in zip(anchors, every, strict=True)])
            for index, (name, blocks) in enumerate(proposed.items()):
                joined = blocks._replace(log_p=along[:, index * samples : (index + 1) * samples])
                weighed[name, "joint"] = weighing.ended(joined, model.stop_ids)
        if self.autoregressive:  # blocks drawn from the target, token by token
            mine = torch.from_numpy(key.fold_in("target").uniforms(0, count * samples * n)).view(count, samples, n)
            places = [weighing.draw_from_target(model, forced.reading, anchor, 1.0 / self.alpha, own)
                      for anchor, own in zip(anchors, mine.to(model.device), strict=True)]
            weighed["target", "joint"] = weighing.ended(
                weighing.Proposed(*map(np.concatenate, zip(*places, strict=True))), model.stop_ids)
        # The chains of all proposals are simulated together. Both kinds of weights use the same uniforms.
        accepting = [key.fold_in("accept", name).uniforms(0, count * (samples - 1)).reshape(count, -1) for name, _ in weighed]
        columns = weighing.chains(weighing.Proposed(*map(np.concatenate, zip(*weighed.values(), strict=True))), self.alpha,
                                  np.concatenate(accepting))
        entries: dict[str, dict[str, Any]] = {name: {**laws.get(name, {})} for name, _ in weighed}
        for index, (name, weights) in enumerate(weighed):
            entries[name][weights] = {field: rounded(column[index * count : (index + 1) * count])
                                      for field, column in columns.items()}
        return {"num_tokens": len(answer.tokens), "blocks": count, "block_size": n + 1, "p": laws["p"], "proposals": entries}
