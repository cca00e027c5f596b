"""The texts to audit: those of a run folder, of a JSON Lines file, or of a server that is asked for them.

And crafted cases for any engine, a small model and prompts whose answers show a mistake within few draws.
"""

import importlib.util
import json
import shutil
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_mcmc.chains import build
from dflash_mcmc.config.identity import configuration_of
from dflash_mcmc.config.schema import Config
from dflash_mcmc.dataset.inputs.conversations import PromptText
from dflash_mcmc.dataset.inputs.sources import lines_of
from dflash_mcmc.engine.api import Api
from dflash_mcmc.engine.api.endpoint import OURS, VLLM, Endpoint, tokens_of
from dflash_mcmc.errors import ConfigError, UserError, note, reason_of, writing
from dflash_mcmc.grading.verdicts import NOT_DRAWN
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.process import bars
from dflash_mcmc.store import files, records

if TYPE_CHECKING:
    import torch

    from dflash_mcmc.engine.batching.language_model import LanguageModel

_AT_ONCE = 8
"""Requests that are sent to a server at a time."""
_SECONDS, _PATIENCE = 600.0, 60.0
"""Seconds to wait for an answer, and for a server that is busy or down."""
_LIMITS = (1, 2, 4)
"""What the limits of mixed lengths are divided by, in turn."""
_LEAVING, _PAUSE = 0.25, 0.25
"""Beside other requests: the share of texts before which a client leaves its own request, and the mean pause before a request,
as a share of the time of a usual one."""
_OTHER_SEEDS = 1 << 20
"""How far the seeds of requests whose clients leave lie behind those of texts."""
_ALLOWED = 'one JSON object a line with "prompt_ids" or "prompt", and with "ids"'

_CASES = {"plain": (0, "", SamplingParams(temperature=1.5), 4000, 4),
          "cut": (0, "", SamplingParams(temperature=1.5, top_p=0.9), 4000, 4),
          "penalty": (14, "We have 74+13+53=", SamplingParams(temperature=1.0, frequency_penalty=2.0), 400, 6),
          "block": (44, "8*46=380+48=428. So 16*94=", SamplingParams(temperature=0.5), 4000, 4),
          "long": (0, "", SamplingParams(temperature=1.5), 400, 24)}
"""Of each crafted case the problem, the start of the answer that belongs to the prompt, the law, the answers to ask for and
the tokens of each. A high temperature parts a target from its draft, which makes a draft's mistakes large. The starts stand
before digits: the target likes to write 11, which a penalty of the first 1 forbids, and doubts what `close/` is sure of."""
_TINY = Path(__file__).parents[1] / "assets" / "tiny"


class DrawnText(NamedTuple):
    """A text that an engine drew, token ids int64."""

    name: str
    """The place it comes from, for messages."""
    prompt: np.ndarray
    tokens: np.ndarray
    """The tokens that were drawn. A stop id that was drawn belongs to them."""
    log_p: float | None = None
    """The log probability that the engine states, in nats; None if it states none."""
    steps: tuple[int, ...] | None = None
    """The number of tokens of each step of an engine that speculates; None if it is not stated."""


def of_run(folder: Path, model: "LanguageModel", chat: bool) -> tuple[list[DrawnText], int]:
    """The texts of a run's records by problem and chain, up to the first one that is missing, and how many are left out.

    The records are in the order in which chains have ended, which depends on what they drew: with blocks of a draft, answers
    of likely tokens end first. An audit that may stop at any text needs an order that does not. For the same reason a run that
    is not complete has too many short and likely answers. Those before the first missing one begin a sequence that the texts
    do not choose. A test martingale keeps its promise at all places of it together (Ville 1939), wherever the run has stopped.

    Raises UserError for a run without tokens or prompts, and for one that lacks its first sample.
    """
    prompts = {name: model.encode(PromptText.of(problem["prompt"], problem.get("plain", ())), not chat)
               for name, problem in records.read_problems(folder).items()}
    drawn = {records.key_of(record): record for _, record in records.each_record(folder)
             if record.get("verdict") != NOT_DRAWN}
    for problem, chain in drawn:
        if problem not in prompts or "tokens" not in drawn[problem, chain]:
            raise UserError(f"{folder}: the record of {problem}, chain {chain} has no prompt or no tokens; allowed: a run of "
                            "samples")
    chains = configuration_of(folder).get("num_chains") or 1
    asked = ((problem, chain) for problem in prompts for chain in range(chains))
    read = list(takewhile(lambda key: key in drawn, asked))
    if not read:
        raise UserError(f"{folder}: lacks its first sample, and later ones are no fair choice of its texts; allowed: a run "
                        "that has it (the command of the run goes on where it stopped)")
    return [DrawnText(f"{key[0]}, chain {key[1]}", prompts[key[0]], np.array(tokens, np.int64), drawn[key]["log_p"])
            for key in read if (tokens := drawn[key].get("tokens"))], len(drawn) - len(read)


def of_file(file: Path, model: "LanguageModel", law: SamplingParams) -> Iterator[DrawnText]:
    """The texts of a JSON Lines file. Raises UserError for a line that is none, or that states another law."""
    texts = (_of_row(row, where, model, law) for where, row in _rows(file))
    return (text for text in texts if text is not None)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        for number, line in lines_of(file):
            where = f"{file}: line {number}"
            try:
                row = files.loaded(line)
            except ValueError as error:
                raise UserError(f"{where} is not JSON: {reason_of(error, 120)}; allowed: {_ALLOWED}") from error
            if not isinstance(row, dict):
                raise UserError(f"{where} is no JSON object; allowed: {_ALLOWED}")
            yield where, row
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read: {reason_of(error, 120)}; allowed: a JSON Lines file") from error


def _of_row(row: dict[str, Any], where: str, model: "LanguageModel", law: SamplingParams) -> DrawnText | None:
    for name, stated in law.fields().items():
        if name in row and row[name] != stated:
            raise UserError(f"{where}: {name} is {row[name]!r}, and the stated law has {stated:g}; allowed: texts of one law "
                            f"({_stating(name, row[name], law)})")
    asked = "prompt" if row.get("prompt_ids") is None else "prompt_ids"
    for name, lacks in (("ids", "ids"), (asked, "prompt_ids or prompt")):
        if row.get(name) is None:
            why = ": several sequences of tokens have the same text, and each has a law of its own" * ("text" in row)
            raise UserError(f"{where} lacks {lacks}{why}; allowed: {_ALLOWED}")
    start, tokens = (_ids(row[name], f"{where}: {name}", model) for name in (asked, "ids"))
    if len(start) + len(tokens) > (longest := model.max_positions or len(start) + len(tokens)) or not len(start):
        raise UserError(f"{where}: given {len(tokens)} tokens after a prompt of {len(start)}; allowed: a prompt of at least "
                        f"one token, and {longest} tokens together (the model's positions)")
    steps = row.get("steps")
    if steps is not None and not (isinstance(steps, list) and all(type(size) is int and size > 0 for size in steps)
                                  and sum(steps) == len(tokens)):
        raise UserError(f"{where}: steps: given {steps!r:.60}; allowed: whole numbers > 0, the tokens of each step of the "
                        f"engine, whose sum is {len(tokens)}")
    return DrawnText(where, start, tokens, steps=tuple(steps) if steps else None) if len(tokens) else None


def _stating(name: str, value: object, law: SamplingParams) -> str:
    if name == "temperature":
        return "sampler=greedy" if value == 0 else f"sampler=temperature sampler.temperature={value!r}"
    if law.temperature == 0.0:
        return f"in Python: dflash_mcmc.verify.verify(..., temperature=0.0, {name}={value!r})"
    if name == "counts_prompt":
        return f"sampler.penalty_counts={'prompt+' * bool(value)}answer"
    return f"sampler.{name}={value!r}"


def _ids(value: object, where: str, model: "LanguageModel") -> np.ndarray:
    if where.endswith(": prompt"):
        if not isinstance(value, str) or any("\ud800" <= sign <= "\udfff" for sign in value):
            raise UserError(f"{where}: given {value!a:.60}; allowed: a text of valid Unicode")
        return model.encode(value, True)
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < model.vocab_size for token in value):
        raise UserError(f"{where}: given {value!r:.60}; allowed: a list of token ids from 0 to {model.vocab_size - 1} (the "
                        "model's)")
    return np.array(value, np.int64)


def write_cases(config: Config, folder: Path) -> None:
    """Writes the crafted cases, of problems of a configuration, to a folder. Raises UserError.

    `target/` is the embedded model. Two draft models are the lower layers of it: `assistant/` half of them, `close/` all but
    the last. Each is a GGUF file too, where the package `gguf` is installed. Each NAME.jsonl has the prompt, its token ids,
    the law to draw with, and the number of answers and their tokens.
    """
    from safetensors.torch import load_file, save_file

    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError("cases", str(folder), "an empty folder, or a new one: files would be replaced")
    target, prompting, problems = config.model.load("cpu"), config.dataset.prompting(), config.dataset.problems()
    whole, tensors = json.loads((_TINY / "config.json").read_text()), load_file(_TINY / "model.safetensors")
    depth = whole["num_hidden_layers"]
    with writing(folder):
        for name, layers in {"target": depth, "assistant": depth // 2, "close": depth - 1}.items():
            shutil.copytree(_TINY, folder / name, dirs_exist_ok=True)
            kept = {**whole, "num_hidden_layers": layers, "layer_types": whole["layer_types"][:layers]}
            (folder / name / "config.json").write_text(json.dumps(kept, indent=1) + "\n")
            weights = {name: tensor for name, tensor in tensors.items()
                       if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers}
            save_file(weights, folder / name / "model.safetensors", {"format": "pt"})
            if importlib.util.find_spec("gguf") is not None:
                _write_gguf(kept, weights, folder / f"{name}.gguf")
        for name, (place, start, law, number, tokens) in _CASES.items():
            text = config.model.render(target.tokenizer, prompting.conversation(problems[place])) + start
            case = {"prompt": text, "prompt_ids": target.encode(text).tolist(), "n": number, "max_tokens": tokens,
                    **stated(law)}
            (folder / f"{name}.jsonl").write_text(json.dumps(case) + "\n")


def _write_gguf(config: dict[str, Any], weights: "dict[str, torch.Tensor]", file: Path) -> None:
    import gguf

    tokenizer = json.loads((_TINY / "tokenizer.json").read_text())
    special = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    names = {number: text for text, number in tokenizer["model"]["vocab"].items()} | special
    kinds, every = gguf.TokenType, range(config["vocab_size"])
    out = gguf.GGUFWriter(str(file), config["model_type"])
    for add, field in ((out.add_block_count, "num_hidden_layers"), (out.add_context_length, "max_position_embeddings"),
                       (out.add_embedding_length, "hidden_size"), (out.add_feed_forward_length, "intermediate_size"),
                       (out.add_head_count, "num_attention_heads"), (out.add_head_count_kv, "num_key_value_heads"),
                       (out.add_layer_norm_rms_eps, "rms_norm_eps"), (out.add_key_length, "head_dim"),
                       (out.add_value_length, "head_dim")):
        add(config[field])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list([names.get(number, f"<unused{number}>") for number in every])
    out.add_token_types([int(kinds.CONTROL if number in special else kinds.NORMAL if number in names else kinds.UNUSED)
                         for number in every])
    out.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]])
    out.add_add_bos_token(False)
    out.add_eos_token_id(json.loads((_TINY / "generation_config.json").read_text())["eos_token_id"][0])
    named = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in weights.items():
        stem, suffix = name.rsplit(".", 1)
        out.add_tensor(f"{named.get_name(stem)}.{suffix}", tensor.float().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def connected(url: str) -> Endpoint:
    """The server at an address. Raises UserError for one that cannot be reached or is no OpenAI-style server."""
    return Endpoint(Api(url=url, timeout_seconds=_SECONDS, patience_seconds=_PATIENCE), "TARGET")


def draw(server: Endpoint, config: Config, model: "LanguageModel", law: SamplingParams, file: Path,
         concurrency: int | None = None) -> list[DrawnText]:
    """Asks a server for the texts of the configured problems, and appends each to a file.

    It asks for `num_chains` texts of each problem. Each has a seed of its own, the smallest one that no text of the file
    has: with one seed, first tokens of several prompts depend on one another. Texts that the file has for the same requests
    are not asked for again, and those for other requests are passed over. The server is an OpenAI-style one, `/completions`,
    that takes prompts as token ids and returns the ids that it drew.

    Args:
        concurrency: requests at once, at most. The texts have mixed lengths then and their log p, and at each number of
            requests the same seeds. Beside other requests there are pauses, and clients that leave before their reply:
            neither depends on what was drawn for a text. None asks for texts of one longest length.

    Raises:
        UserError: if the server cannot be reached, refuses a request, or returns no token ids.
    """
    prompts, longest = build.prompts(config, model, config.dataset.problems()), config.dataset.max_new_tokens
    common = {"model": server.model, **law.fields()}
    keys = [(problem, chain) for problem in prompts for chain in range(config.num_chains)]
    every = {key: {"prompt_ids": prompts[key[0]].tolist(), **common, "max_tokens": longest if concurrency is None else max(
        1, longest // _LIMITS[place % len(_LIMITS)])} for place, key in enumerate(keys)}

    def known() -> list[tuple[tuple[str, int], str, dict[str, Any]]]:
        """The rows of the file for the same texts, with their places, at any number of requests at once."""
        return [(key, where, row) for where, row in kept_rows(file) if (key := (row.get("problem"), row.get("chain"))) in every
                and all(row.get(name) == value for name, value in every[key].items())]

    there = known()
    done = {key for key, _, row in there if row.get("concurrency") == concurrency}
    if done:
        note(f"{len(done)} texts of an earlier audit are audited, and not asked for again: {file}; delete it for another "
             "engine")
    taken, seeds = {row.get("seed") for _, row in kept_rows(file)}, {key: row["seed"] for key, _, row in there}
    fresh = (seed for seed in count(config.seed) if seed not in taken)
    seeds |= {key: next(fresh) for key in every if key not in seeds}
    wanted, seconds = [key for key in every if key not in done], [0.0]
    file.parent.mkdir(parents=True, exist_ok=True)

    def ask(key: tuple[str, int]) -> dict[str, object]:
        body = {**asked_of(server, law), "max_tokens": every[key]["max_tokens"], "prompt": every[key]["prompt_ids"],
                "seed": seeds[key]}
        if concurrency is not None:
            body.setdefault("logprobs", 0)
        if (concurrency or 1) > 1:
            rng, usual = np.random.default_rng([seeds[key], concurrency or 1]), float(np.mean(seconds))
            time.sleep(rng.exponential(_PAUSE * usual))
            if rng.random() < _LEAVING:
                server.leave({**body, "seed": seeds[key] + _OTHER_SEEDS, "max_tokens": longest}, rng.uniform(0.0, usual))
        began = time.monotonic()
        (answer,) = completed(server, body)
        seconds.append(time.monotonic() - began)
        stated = answer["logprobs"] if len(answer["logprobs"]) == len(answer["ids"]) and concurrency is not None else []
        return {"problem": key[0], "chain": key[1], "seed": seeds[key], "concurrency": concurrency, "ids": answer["ids"],
                "log_p": sum(stated) if stated and None not in stated else None, **every[key]}

    with (ThreadPoolExecutor(concurrency or _AT_ONCE) as pool, writing(file), file.open("a", encoding="utf-8") as lines,
          bars.Bar(len(wanted), "text", f"asking, {concurrency or _AT_ONCE} at once", shown=bool(wanted)) as bar):
        for row in pool.map(ask, wanted):
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            bar.update()
    texts = {key: text._replace(name=f"{key[0]}, chain {key[1]}", log_p=row.get("log_p")) for key, where, row in known()
             if row.get("concurrency") == concurrency and (text := _of_row(row, where, model, law)) is not None}
    return [texts[key] for key in every if key in texts]


def asked_of(server: Endpoint, law: SamplingParams) -> dict[str, Any]:
    """The fields of every request. llama.cpp lists token ids with log probabilities alone."""
    listed = {} if server.kind in (OURS, VLLM) else {"logprobs": 1}
    return {"model": server.model, "return_token_ids": True, **listed, **stated(law)}


def stated(law: SamplingParams) -> dict[str, float]:
    """The parameters of a law. What has no effect is not sent: servers refuse what they do not know."""
    always = ("temperature", "top_p")
    return {name: value for name, value in law.fields().items() if name in always or value != getattr(SamplingParams(), name)}


def kept_rows(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Place and row of each line of an earlier audit's file. A last line that a killed process left unfinished is cut off."""
    if not file.exists():
        return []
    with writing(file), file.open("rb+") as lines:
        lines.truncate(lines.read().rfind(b"\n") + 1)
    return list(_rows(file))


def completed(server: Endpoint, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The `ids`, `text` and `logprobs` of each answer of a server. Raises UserError where there are no ids."""
    found, answers = server.ask("/completions", body), list[dict[str, Any]]()
    kinds: dict[str, tuple[str, tuple[type, ...]]] = {
        "ids": ("token_ids", (int,)), "logprobs": ("token_logprobs", (int, float, type(None)))}
    try:
        for choice in found["choices"]:
            ids, values = tokens_of(choice)
            answers.append({"text": choice.get("text") or "", "ids": ids, "logprobs": values})
            for field, (name, kind) in kinds.items():
                if not isinstance(given := answers[-1][field], list) or not all(isinstance(each, kind) for each in given):
                    raise ValueError(f"{name} {str(given)[:60]!r}, which is no list of numbers")
            if not isinstance(answers[-1]["text"], str):
                raise ValueError(f"text {str(answers[-1]['text'])[:60]!r}, which is no text")
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{server.url}: its answer has no choice; allowed: an OpenAI-style server") from error
    except ValueError as error:
        raise UserError(f"{server.url}: its answer has {error}; allowed: an OpenAI-style server") from error
    if answers and all(each["ids"] for each in answers):
        return answers
    raise UserError(f"{server.url}: returns no token ids; allowed: a server that returns them (return_token_ids of vLLM and "
                    "python -m dflash_mcmc.serve, logprobs of llama.cpp), or a JSON Lines file of texts")
