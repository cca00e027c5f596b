"""A reward model: a checkpoint of transformers that scores a question with its answer."""

from dataclasses import dataclass
from typing import Any

from dflash_mcmc.components import MISSING, Settings, identity, register, runtime
from dflash_mcmc.errors import ConfigError, UserError, reason_of
from dflash_mcmc.model.files import Checkpoint, loading_quietly
from dflash_mcmc.potential import Evaluator, Factor
from dflash_mcmc.types import Problem


@register("potential", "reward")
@dataclass(slots=True, kw_only=True)
class RewardPotential(Factor):
    """r is the score of a checkpoint for sequence classification, which reads the question and the answer as a conversation.

    A tokenizer without a chat template reads them as a pair of texts. The checkpoint is on the run's device beside the target.
    """

    path: str | None = runtime(MISSING, "folder or hub name of a checkpoint of transformers for sequence classification; its "
                               "content is part of the identity")
    revision: str | None = runtime(None, "commit, tag or branch on the hub; null takes main")
    label: str | None = identity(None, "name of an output in config.json, whose probability is r; null takes the score of a "
                                 "checkpoint with one output")
    max_tokens: int = identity(4096, "longest question with its answer, in tokens; r of a longer one is on_failure", ge=1)

    def check(self, config: Settings) -> None:
        """Raises ConfigError for a path without a checkpoint and a label it does not have, beside every potential's checks."""
        super().check(config)
        checkpoint = self._checkpoint()
        checkpoint.check()
        values = checkpoint.config()  # None for a hub name that is not in the cache yet: it is checked when it is loaded
        if values is not None:
            named = values.get("id2label")
            self._output([str(name) for name in named.values()] if isinstance(named, dict) else ["LABEL_0", "LABEL_1"])

    def fingerprint(self) -> str:
        """A hash of the checkpoint's content."""
        return self._checkpoint().fingerprint()

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint("potential.path", self.path or "", self.revision, "Skywork/Skywork-Reward-V2-Qwen3-0.6B")

    def _output(self, names: list[str]) -> int:
        """The place of the output that r is. Raises ConfigError for a label that the checkpoint does not have."""
        if self.label is None and len(names) == 1:
            return 0
        if self.label not in names:
            raise ConfigError("potential.label", self.label, f"one of {', '.join(map(repr, names))} for {self.path!r}")
        return names.index(self.label)

    def start(self, config: Settings) -> Evaluator:
        """The evaluator, with the checkpoint on the device of the run. Raises UserError if it cannot be loaded."""
        import torch
        import transformers

        folder = self._checkpoint().local()
        try:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
            with loading_quietly():
                loaded: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
                    folder, dtype="auto", trust_remote_code=False, output_loading_info=True)
        except Exception as error:  # transformers raises a dozen types here; all mean that this checkpoint cannot be used
            reason = f"{type(error).__name__}: {reason_of(error)}"
            raise UserError(f"potential.path: cannot load {self.path!r}: {reason}") from error
        model, loading = loaded
        if lacking := sorted(loading["missing_keys"]):  # transformers draws these at random
            raise UserError(f"potential.path: given {self.path!r}, which lacks {lacking[0]}; allowed: a checkpoint that was "
                            "trained for sequence classification")
        model, names = model.to(config.hardware.found()).eval(), model.config.id2label
        output = self._output([names[place] for place in sorted(names)])

        def rate(problem: Problem, text: str) -> float:
            turns = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": text}]
            given = (tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
                     if tokenizer.chat_template else tokenizer(problem.question, text, return_tensors="pt"))
            if given["input_ids"].shape[1] > self.max_tokens:
                raise ValueError("too long")
            with torch.inference_mode():
                logits = model(**given.to(model.device)).logits[0].double()
            return float(logits[output] if self.label is None else logits.softmax(-1)[output])

        return Evaluator(rate, self.on_failure)
