"""Audits: does an engine draw its tokens from the law that it states?

    from dflash_mcmc.verify import verify
    found = verify("outputs/models/smollm2", prompts, answers, temperature=0.8, top_p=0.95)
    print(found.is_red)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.ops import LawFunction, SamplingParams

if TYPE_CHECKING:
    from dflash_mcmc.hardware import Hardware
    from dflash_mcmc.verify import audit


def verify(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, tokenizer: Any = None,
           hardware: "Hardware | None" = None, level: float = 1e-3, function: LawFunction | None = None,
           **law: float) -> "audit.Audit":
    """Audits the tokens that an engine drew against the law that it states.

    Args:
        model: the target: a folder, a hub name, or a loaded model of transformers with its tokenizer.
        prompts: token ids of each prompt, at least one token.
        answers: token ids of the answer to each prompt. A stop id that was drawn belongs to it.
        tokenizer: of a loaded model.
        hardware: a component, such as `dm.Local(device="cuda")`, whose device computes; None takes the CPU. A loaded model
            stays where it is.
        level: the probability of a false alarm that is allowed, whenever one looks, in (0, 1).
        function: any other law of a token, in place of `law`: from float32 logits (vocabulary,) and the ids before the token
            to log weights (vocabulary,), -inf for a token that cannot be drawn.
        law: the stated fields of `SamplingParams`, such as `temperature` and `top_p`; temperature 1 without truncation unless
            given. Temperature 0 may have penalties.

    Raises:
        UserError: for ids that the model does not know, another level, a field that the law does not have, and a function
            that fails.
    """
    from numbers import Real

    import dflash_mcmc as dm
    from dflash_mcmc.api.choices import evaluating, model_of
    from dflash_mcmc.api.prompts import array_of
    from dflash_mcmc.verify import audit, drawn

    if unknown := [name for name in law if name not in SamplingParams().fields()]:
        raise ConfigError(unknown[0], law[unknown[0]], f"a field of the law: {', '.join(SamplingParams().fields())}")
    if not isinstance(level, Real) or not 0.0 < level < 1.0:
        raise ConfigError("level", level, "a probability between 0 and 1")
    if function is not None and law:
        raise ConfigError("function", function, f"without {', '.join(law)}: it is the whole law")
    greedy = law.get("temperature") == 0.0  # which the sampler's temperature cannot state; other fields are checked alike
    fields = {"temperature": 1.0, **law, **({"temperature": 1.0} if greedy else {})}
    counts = "prompt+answer" if fields.pop("counts_prompt", False) else "answer"
    stated = dm.component("sampler", "temperature", **fields, penalty_counts=counts).law()
    target = model_of(model, tokenizer, chat=False).load("cpu" if hardware is None else hardware.resolve())
    if not len(prompts) or len(prompts) != len(answers):
        raise ConfigError("answers", f"{len(answers)} for {len(prompts)} prompts", "one for each prompt, and at least one")

    def ids_of(field: str, given: Sequence[int]) -> np.ndarray:
        tokens, most = array_of(given), target.vocab_size - 1
        if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > most:
            raise ConfigError(field, given, f"lists of at least one token id, each from 0 to {most}")
        return tokens.astype(np.int64)

    texts = [drawn.DrawnText(f"answer {index}", ids_of("prompts", prompt), ids_of("answers", answer))
             for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))]
    for text in texts:
        if target.max_positions is not None and len(text.prompt) + len(text.tokens) > target.max_positions:
            raise ConfigError("answers", f"{text.name} of {len(text.tokens)} tokens after {len(text.prompt)}",
                              f"{target.max_positions} tokens together, the model's positions")
    with evaluating(target.decoder):
        law_of_token = stated._replace(temperature=0.0) if greedy else stated._replace(function=function)
        return audit.audit(target, texts, law_of_token, float(level))
