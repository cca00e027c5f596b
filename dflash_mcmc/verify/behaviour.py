"""What an engine promises besides the law of a token: seeds, batches, log probabilities, stop strings and lengths.

Texts that should be equal are compared. A server is asked alone, again, in a batch and with options, and is judged.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.blend import Blend
from dflash_mcmc.chains import build
from dflash_mcmc.config.schema import Config
from dflash_mcmc.engine.api.endpoint import Endpoint, Refusal
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.errors import ConfigError, writing
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.process import bars
from dflash_mcmc.verify import drawn
from dflash_mcmc.verify.audit import OFF, Audit, audit, near_of, read_text

_PROMPTS, _NUM_ANSWERS, _GROUPS = 4, 3, 9
"""Problems of which a server is asked everything; answers in one request (`n`); groups of requests."""


class Finding(NamedTuple):
    """The outcome of a check: right, differs (allowed, and measured), wrong, not offered; or red, of the law."""

    check: str
    outcome: str
    says: str


def compare(model: LanguageModel, check: str, pairs: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
            greedy: bool, blend: Blend | None = None, bits: bool = False) -> Finding:
    """How often two answers to a prompt that should be equal part, where first, and by how many nats.

    The distance is that of the two tokens' log p under the target. At temperature 0 a larger one than a near-tie's is wrong,
    and so is an answer that is the beginning of the other one. With `bits` every difference is.
    """
    tokens, first, nats, cut = 0, [], [], 0
    for prompt, one, other in pairs:
        common = min(len(one), len(other))
        different = np.flatnonzero(one[:common] != other[:common])
        place = int(different[0]) if len(different) else common
        tokens += max(1, min(place + 1, common))
        if len(different) or len(one) != len(other):
            first.append(place)
            cut += not len(different)
        if len(different):
            both = [read_text(model, drawn.DrawnText("", prompt, each[: place + 1]), SamplingParams(), blend).target_log_p[-1]
                    for each in (one, other)]
            nats.append(abs(both[0] - both[1]))
    if not first:
        return Finding(check, "right", f"all {len(pairs)} pairs are equal, {tokens:,} tokens")
    worst, near = max(nats, default=0.0), near_of(model, 1.0)
    return Finding(check, "wrong" if bits or (greedy and (cut or worst > near)) else "differs",
                   f"{len(first)} of {len(pairs)} pairs part, {len(first) / tokens:.2g} a token, the first one at token "
                   f"{min(first)}; log p of the two tokens differs by at most {worst:.2g} nats (near-ties: {near:g})"
                   + f"; {cut} answers are the beginning of the other one" * bool(cut))


def twice(one: Iterable[drawn.DrawnText], other: Iterable[drawn.DrawnText]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The texts that two runs, or two files, both have: of one problem and chain, or on one line, after the same prompt."""
    known = {text.name.rpartition(": ")[2]: text for text in one}
    both = ((known[name], text) for text in other if (name := text.name.rpartition(": ")[2]) in known)
    return [(here.prompt, here.tokens, there.tokens) for here, there in both if np.array_equal(here.prompt, there.prompt)]


def against(model: LanguageModel, source: Path, texts: Sequence[drawn.DrawnText], others: Sequence[drawn.DrawnText],
            greedy: bool, blend: Blend | None = None) -> Finding:
    """How often texts part from those of another run or file. Raises ConfigError if none has a partner there."""
    if not (pairs := twice(texts, others)):
        raise ConfigError("--against", str(source), "a run with the same problems and chains, or a file with the same prompts "
                          "on the same lines: no text has a partner in it")
    found, alone = compare(model, f"the texts of {source}", pairs, greedy, blend), len(texts) + len(others) - 2 * len(pairs)
    return found._replace(says=f"{found.says}; {alone} texts have no partner") if alone else found


def under_load(server: Endpoint, config: Config, model: LanguageModel, law: SamplingParams, level: float, file: Path,
               concurrency: Sequence[int], bits: bool, processed: bool) -> tuple[Audit, list[Finding]]:
    """The law, the seeds and log p of a server's texts by the number of requests at once.

    Each number has an equal share of the level. The audit is that of the first number that is red, or else of the last one.

    Args:
        bits: whether the server promises the same text for a seed at any number.
        processed: as in `audit`.
    """
    texts, audits, findings, greedy = [], [], list[Finding](), law.temperature == 0.0
    for number in concurrency:
        texts.append(drawn.draw(server, config, model, law, file, number))
        found = audit(model, texts[-1], law, level / len(concurrency), config.blend, processed=processed)
        audits.append(found._replace(at=f"{number} requests at once" if number > 1 else "1 request at a time"))
        said = [f"{found.tokens:,} tokens", f"evidence 10^{found.together.evidence:.1f}"]
        if found.together.red_at is not None:
            said.append(f"red after {found.together.red_at:,}")
        if outside := len(found.outside) - found.near_ties:
            said.append(f"{outside} that the law cannot draw")
        is_red = found._replace(log_p_error=None).is_red
        findings.append(Finding(f"the law, {number} at once", "red" if is_red else "right", ", ".join(said)))
        if found.log_p_error is not None:
            findings.append(Finding(f"log p, {number} at once", "wrong" if found.log_p_error[0] > OFF else "right",
                                    f"off by {found.log_p_error[0]:.1g} nats a token on average"))
        if len(texts) > 1:
            findings.append(compare(model, f"the same seed, {number} at once and {concurrency[0]}", twice(texts[0], texts[-1]),
                                    greedy, config.blend, bits))
    return next((found for found in audits if found.is_red), audits[-1]), findings


def ask(server: Endpoint, config: Config, model: LanguageModel, law: SamplingParams, file: Path) -> dict[str, Any]:
    """A server's answers by request, from a file where the same ones are known. A refused request has the reason, a text.

    Raises UserError for a server that is down, limits requests or fails. What it has answered is in the file.
    """
    prompts = [ids.tolist() for ids in build.prompts(config, model, config.dataset.problems()).values()][:_PROMPTS]
    common = {**drawn.asked_of(server, law), "max_tokens": config.dataset.max_new_tokens, "seed": config.seed}
    kept = {json.dumps([row.get("request"), row.get("body")]): row.get("answer") for _, row in drawn.kept_rows(file)}
    known: dict[str, Any] = {}

    def sent(body: dict[str, Any]) -> Any:
        try:
            return drawn.completed(server, body)
        except Refusal as refused:
            return str(refused)

    file.parent.mkdir(parents=True, exist_ok=True)
    with (ThreadPoolExecutor(len(prompts)) as pool, writing(file), file.open("a", encoding="utf-8") as lines,
          bars.Bar(_GROUPS, "check", "checking") as bar):
        for name, bodies in _requests(common, prompts, known):
            rows = {f"{name} {place}": body for place, body in bodies.items()}
            known |= {key: kept[asked] for key, body in rows.items() if (asked := json.dumps([key, body])) in kept}
            missing = {key: body for key, body in rows.items() if key not in known}
            for key, answer in zip(missing, (pool.map if "together" in name else map)(sent, missing.values()), strict=True):
                known[key] = answer
                lines.write(json.dumps({"request": key, "body": missing[key], "answer": answer}) + "\n")
                lines.flush()
            bar.update()
    return known | {"prompts": prompts}


def _requests(common: dict[str, Any], prompts: list[list[int]],
              known: dict[str, Any]) -> Iterator[tuple[str, dict[int, dict[str, Any]]]]:
    """Groups of requests by number. Those of "together" are sent at the same time, and the last ones read earlier answers."""
    greedy, asked = {"temperature": 0.0, "top_p": 1.0}, {place: {**common, "prompt": ids} for place, ids in enumerate(prompts)}
    for name, more in (("alone", {}), ("again", {}), ("together", {}), ("logprobs", {"logprobs": common.get("logprobs", 0)}),
                       ("greedy", greedy), ("greedy together", greedy)):
        yield name, {place: {**body, **more} for place, body in asked.items()}
    yield "n", {0: {**asked[0], "n": _NUM_ANSWERS}}
    cuts = {place: _cut(answer[0]) for place in asked if isinstance(answer := known[f"alone {place}"], list)}
    yield "max_tokens", {place: {**asked[place], "max_tokens": limit} for place, (limit, _) in cuts.items() if limit}
    yield "stop", {place: {**asked[place], "stop": [string]} for place, (_, string) in cuts.items() if string}


def _cut(answer: dict[str, Any]) -> tuple[int, str]:
    """Half of an answer's tokens and the middle of its text: limit and stop string with which it is asked for again."""
    return len(answer["ids"]) // 2, answer["text"][len(answer["text"]) // 2 :][:3]


def judge(model: LanguageModel, answers: dict[str, Any], law: SamplingParams, level: float,
          blend: Blend | None = None) -> list[Finding]:
    """The findings about a server's answers (`ask`). `level`: the probability of a false alarm for equal answers."""
    prompts = [np.array(ids) for ids in answers["prompts"]]

    def of(name: str) -> dict[int, dict[str, Any]]:
        known = {place: answers.get(f"{name} {place}") for place in range(len(prompts))}
        return {place: choices[0] for place, choices in known.items() if isinstance(choices, list)}

    def told(check: str, name: str, wrong: list[str], right: str) -> Finding:
        if isinstance(refusal := answers.get(f"{name} 0"), str):
            return Finding(check, "not offered", refusal)
        return Finding(check, "wrong" if wrong else "right", wrong[0] if wrong else right)

    findings = []
    for check, one, other in (("the same seed again", "alone", "again"), ("the same seed in a batch", "alone", "together"),
                              ("temperature 0, alone and in a batch", "greedy", "greedy together")):
        both = [(prompts[place], np.array(each["ids"]), np.array(of(other)[place]["ids"]))
                for place, each in of(one).items() if place in of(other)]
        findings.append(compare(model, check, both, one == "greedy", blend) if both else told(check, one, [], ""))
    alone = of("alone")
    some = choices if isinstance(choices := answers.get("n 0"), list) else []
    wrong = [f"{len(some)} answers for n={_NUM_ANSWERS}"] if len(some) != _NUM_ANSWERS else []
    if not wrong and len({tuple(each["ids"]) for each in some}) == 1:
        log_p = read_text(model, drawn.DrawnText("", prompts[0], np.array(some[0]["ids"])), law, blend).log_p
        again = (_NUM_ANSWERS - 1) * float(log_p[np.isfinite(log_p)].sum())  # that the others equal the first one
        wrong = [f"all {_NUM_ANSWERS} answers are equal: probability {np.exp(again):.1g}"] if again < np.log(level) else []
    findings.append(told("n", "n", wrong, f"{len(some)} answers"))
    long = [f"{len(each['ids'])} tokens for max_tokens={limit}" for place, each in of("max_tokens").items()
            if len(each["ids"]) > (limit := _cut(alone[place])[0])]
    findings.append(told("max_tokens", "max_tokens", long, f"{len(of('max_tokens'))} answers keep to it"))
    past = [f"a text has {string!r}, its stop string" for place, each in of("stop").items()
            if (string := _cut(alone[place])[1]) in each["text"]]
    findings.append(told("stop strings", "stop", past, f"{len(of('stop'))} texts end before theirs"))
    every = [each for key, choices in answers.items() if key != "prompts" and isinstance(choices, list) for each in choices]
    after = [f"tokens follow the stop id {token}" for each in every for token in each["ids"][:-1] if token in model.stop_ids]
    findings.append(told("stop ids", "alone", after, f"no token follows one in {len(every)} answers"))
    # Whether returned log p of the returned tokens are the target's (raw) or the law's (processed)
    off, answered, wrong = {"raw": 0.0, "processed": 0.0}, of("logprobs"), list[str]()
    tokens = sum(len(each["ids"]) for each in answered.values())
    for place, each in answered.items():
        if len(each["logprobs"]) != len(each["ids"]):
            wrong.append(f"{len(each['logprobs'])} values for {len(each['ids'])} tokens")
            continue
        paid = read_text(model, drawn.DrawnText("", prompts[place], np.array(each["ids"])), law, blend)
        for name, known in (("raw", paid.target_log_p), ("processed", paid.log_p)):
            off[name] += float(np.abs(known - np.array(each["logprobs"])).sum()) / tokens
    best = min(off, key=lambda name: off[name]) if law != SamplingParams() else "raw"
    if off[best] > OFF:
        wrong.append(f"off by {off['raw']:.2g} nats a token from the target's, and by {off['processed']:.2g} from the stated "
                     "law's")
    right = f"{best}, within {off[best]:.1g} nats a token on average, of {tokens:,} tokens"
    return [*findings, told("log p", "logprobs", wrong, right)]
