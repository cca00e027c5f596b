"""Datasets: problems with stable ids and gold answers. Datasets that are read from rows inherit from `inputs.sources`.

A list of problems has checks, a hash of its content, and what a run requests of it: by id, by shard and by number.

Stop strings are checked here, before any model is loaded. `engine/batching/stop_strings.py` finds them.
"""

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from dflash_mcmc.components import Component, Settings, groups_of, identity, name_of, options_with, runtime
from dflash_mcmc.dataset.inputs import conversations
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, note
from dflash_mcmc.rng import Key, Stream
from dflash_mcmc.types import Problem

_MOST_STOPS, _LONGEST_STOP = 16, 128
"""Largest number of stop strings, and their largest length in characters."""
T = TypeVar("T")


def stop_strings(strings: Sequence[str], field: str) -> list[str]:
    """The strings as a list. Raises ConfigError for one string alone, and for what is no text."""
    if isinstance(strings, (str, bytes)) or not all(isinstance(string, str) for string in strings):
        raise ConfigError(field, strings, "a list of texts")
    check_stops(strings, field)
    return list(strings)


def check_stops(strings: Sequence[str], field: str) -> None:
    """Checks stop strings. Raises ConfigError."""
    if len(strings) > _MOST_STOPS:
        raise ConfigError(field, f"{len(strings)} strings", f"at most {_MOST_STOPS}")
    for string in strings:
        if not string:
            raise ConfigError(field, "", "texts of at least one character, since every text contains the empty one")
        if len(string) > _LONGEST_STOP:
            raise ConfigError(field, f"a text of {len(string)} characters", f"at most {_LONGEST_STOP} characters each")
        if "\ufffd" in string or any("\ud800" <= character <= "\udfff" for character in string):
            raise ConfigError(field, string, "texts of whole characters, without U+FFFD and lone surrogates")


def checked(problems: list[Problem]) -> list[Problem]:
    """The problems, after a check that each has its own id and parts of the right type. Raises UserError."""
    seen: set[str] = set()
    for problem in problems:
        for name in ("id", "question", "answer", "solution", "subject", "second"):
            value = problem._asdict()[name]
            if not is_text(value) and (value is not None or name not in ("solution", "subject", "second")):
                raise UserError(f"dataset.path: problem {problem.id!r} has {value!r:.80} for its {name}; allowed: a text")
        if problem.id in seen:
            raise UserError(f"dataset.path: the id {problem.id!r} occurs twice; allowed: a different id for each problem")
        seen.add(problem.id)
        if problem.level is not None and type(problem.level) is not int:
            raise UserError(f"dataset.path: problem {problem.id!r} has {problem.level!r:.80} for its level; allowed: a whole "
                            "number")
    return problems


def is_text(value: object) -> bool:
    """Whether a tokenizer accepts a value: JSON can hold lone surrogates, and no tokenizer accepts them."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def chosen(problems: Sequence[T], limit: int | None, shards: Sequence[int] | None, num_shards: int | None) -> list[T]:
    """The first `limit` problems of these shards, or of all problems without shards, in their order. Raises ConfigError.

    Shards are strided: shard i of n is problems i, i + n, i + 2n, ..., as in the code of the guided-power-sampling
    document (maxwell-gao/flashSpeculation, `range(shard, len(dataset), n_shards)`). Shards 0 to 7 of 40 of MATH-500 are the
    document's 104 problems.
    """
    if shards is None or num_shards is None:
        return list(problems[:limit])
    kept = [problem for index, problem in enumerate(problems) if index % num_shards in shards][:limit]
    if not kept:
        raise ConfigError("dataset.shards", list(shards), f"shards with a problem in them: there are {len(problems)} problems")
    return kept


@dataclass(slots=True, kw_only=True)
class Dataset(Component):
    """Base class of datasets. A leaf needs `all_problems`.

    A run requests the first `limit` of all problems, of those with some ids, or of some shards.
    """

    limit: int | None = runtime(None, "number of problems: the first of those that ids or shards select; null takes all", ge=1)
    ids: list[str] | None = runtime(None, "problems with these ids; null takes all")
    shards: list[int] | None = runtime(None, "numbers of the shards to take, from 0; shard i of num_shards is problems i, i + "
                                       "num_shards, i + 2 num_shards, ...; null takes all")
    num_shards: int | None = runtime(None, "number of shards that the dataset is divided into; null with shards=null", ge=1)
    max_new_tokens: int = identity(1024, "longest answer in tokens", ge=1, le=1_000_000_000)
    prompt: str = identity("boxed", f"prompt: {', '.join(conversations.TEMPLATES)} (texts: dflash_mcmc/"
                           "dataset/inputs/conversations.py), or a text in which {question} is replaced by the problem")
    prompt_file: str | None = runtime(None, "text file with the prompt; it replaces dataset.prompt, and its content is part "
                                      "of the identity; null takes dataset.prompt")
    system: str | None = identity(None, "text of a system turn before everything else; null adds none")
    fewshot: int = identity(0, "number of worked examples before each problem, which are never the problem itself", ge=0)
    fewshot_seed: int = identity(0, "seed of the order in which examples are chosen, the same for all problems")
    fewshot_path: str | None = runtime(None, "file of the examples, in the format of the dataset's own; its content is part "
                                       "of the identity; null takes the dataset's other problems")

    stop: list[str] = identity([], "strings that end an answer: it ends at the first token at which its text contains one, "
                               "and its text is what comes before; [] has none")

    must_end: bool = identity(False, "whether the law has only answers that end within max_new_tokens, with a stop id or a "
                              "string of stop; an answer that does not end is drawn again, at most 16 times")

    group = "dataset"
    answers_in_text: ClassVar[bool] = True
    """Whether a gold answer is the text of an answer, so that an example can show it. Gold answers of programs are tests."""

    @abstractmethod
    def all_problems(self) -> list[Problem]:
        """Every problem of the dataset. Raises UserError if they cannot be read."""

    def num_known(self) -> int | None:
        """Number of all problems if it is known without reading them, else None."""
        return None

    def is_unread(self, config: Settings) -> bool:
        """Whether the run is a dry run that need not read the problems: they are on the hub, and their number is known."""
        return config.dry_run and self.num_known() is not None

    def check(self, config: Settings) -> None:
        """Checks the selection, the prompt, the stop strings, and that a grader of programs is there for programs.

        Raises ConfigError.
        """
        self.check_choice()
        check_stops(self.stop, "dataset.stop")
        for string in self.stop:
            if re.search(r"\\n(?![a-z])", string):  # which a shell or a file may have meant as a line feed
                note(f"dataset.stop: {string!r} has a backslash and an n; for a line feed write "
                     "$'dataset.stop=[\"\\nQuestion:\"]' in bash")
        for name, off in () if config.probe.is_null else (("stop", []), ("must_end", False)):
            if getattr(self, name) != off:
                with_probe = f"{off} with probe={name_of(config.probe)}, or none"
                raise ConfigError(f"dataset.{name}", getattr(self, name), with_probe)
        if self.must_end and config.sampler.is_deterministic:
            raise ConfigError("dataset.must_end", True, f"false with sampler={name_of(config.sampler)}, which draws the same "
                              "answer again")
        conversations.template_of(self.prompt, self.prompt_file)
        for name in ("fewshot_path", "fewshot_split"):
            if not self.fewshot and (given := getattr(self, name, None)) is not None:
                raise ConfigError(f"dataset.{name}", given, "null with dataset.fewshot=0")
        if not (self.answers_in_text or config.grader.runs_answers) and "grader" in groups_of(config):
            raise ConfigError("grader", name_of(config.grader), f"{options_with('grader', 'runs_answers')}, with "
                              f"dataset={name_of(self)}, whose answers are programs")

    def check_choice(self) -> None:
        """Checks ids and shards. Raises ConfigError."""
        chosen_by: tuple[tuple[str, Sequence[object] | None], ...] = (("ids", self.ids), ("shards", self.shards))
        for name, values in chosen_by:
            if values is None:
                continue
            if not values:
                raise ConfigError(f"dataset.{name}", [], "at least one, or null")
            doubled = next((value for value in values if values.count(value) > 1), None)
            if doubled is not None:
                raise ConfigError(f"dataset.{name}", f"{doubled} twice", "each once")
        if self.ids is not None and self.shards is not None:
            raise ConfigError("dataset.ids", self.ids, "null with dataset.shards; only one of the two can select problems")
        if (self.shards is None) != (self.num_shards is None):
            missing, other = ("num_shards", "shards") if self.num_shards is None else ("shards", "num_shards")
            raise ConfigError(f"dataset.{missing}", None, f"not null with dataset.{other}; shards count from 0 on")
        count = self.num_shards or 0
        wrong = [shard for shard in self.shards or () if not 0 <= shard < count]
        if wrong:
            raise ConfigError("dataset.shards", wrong[0], f"0 to {count - 1} with dataset.num_shards={count}")

    def chosen(self, problems: Sequence[Problem]) -> list[Problem]:
        """The requested problems, in the dataset's order. Raises ConfigError for an id that no problem has."""
        if self.ids is None:
            return chosen(problems, self.limit, self.shards, self.num_shards)
        # The problems with these ids, in their order
        own_ids = [problem.id for problem in problems]
        unknown = next((name for name in self.ids if name not in own_ids), None)
        if unknown is not None:
            raise ConfigError("dataset.ids", unknown, f"ids of the {len(own_ids)} problems, such as {own_ids[0]!r}"
                              + did_you_mean(unknown, own_ids))
        wanted = set(self.ids)
        return [problem for problem in problems if problem.id in wanted][:self.limit]

    def resolved(self, config: Settings) -> "Dataset":
        """The dataset with its prompt as text. The name of a template and the template's text therefore give the same run."""
        return replace(self, prompt=conversations.template_of(self.prompt, self.prompt_file),
                                   fewshot_seed=self.fewshot_seed if self.fewshot else 0)

    def examples(self) -> list[Problem]:
        """The problems that few-shot examples are chosen from. Raises UserError."""
        if self.fewshot_path is not None:
            raise ConfigError("dataset.fewshot_path", self.fewshot_path, "null, since the dataset is not read from a file")
        return self.all_problems()

    def prompting(self) -> conversations.Prompting:
        """How the problems are presented to a model. Raises UserError if the few-shot examples cannot be read."""
        template = conversations.template_of(self.prompt, self.prompt_file)
        if not self.fewshot:
            return conversations.Prompting(template, self.system)
        examples = self.examples()
        if not self.answers_in_text:
            examples = [example for example in examples if example.solution]
        # An order that depends on the seed and the number of examples only
        order = Stream(Key(self.fewshot_seed).fold_in("fewshot")).shuffle(list(examples))
        return conversations.Prompting(template, self.system, tuple(order), self.fewshot)

    def problems(self) -> list[Problem]:
        """The requested problems. Raises UserError if they cannot be read."""
        return self.chosen(self.all_problems())

    def num_all(self) -> int:
        """Number of all problems. They are read only if their number is not known otherwise."""
        count = self.num_known()
        return len(self.all_problems()) if count is None else count

    def num_chosen(self) -> int:
        """Number of requested problems. The problems are read only if their number is not known otherwise.

        Ids are counted without a check where nothing is read.
        """
        known = self.num_known()
        if known is None:
            return len(self.problems())
        count = known if self.ids is None else len(self.ids)
        return len(chosen(range(count), self.limit, self.shards, self.num_shards))

    def fingerprint(self) -> str:
        """Hash of all problems of the dataset and of the examples. Raises UserError for a problem whose prompt cannot be made.

        It covers problems that are not requested, too. A run can therefore be extended to them.
        """
        problems = self.all_problems()
        prompting_of_run = self.prompting()
        for problem in problems if prompting_of_run.examples or self.system is not None else []:
            prompting_of_run.conversation(problem)  # finds a prompt that cannot be made, before any model is loaded
        examples = self.examples() if self.fewshot else problems
        digest = hashlib.sha256()
        for problem in problems if examples == problems else [*problems, *examples]:
            digest.update(repr((problem.id, problem.question, problem.answer, problem.solution)).encode())
            if problem.messages or problem.tools:
                digest.update(json.dumps([problem.messages, problem.tools], sort_keys=True).encode())
            if problem.second is not None:
                digest.update(json.dumps({"second": problem.second}).encode())
        return digest.hexdigest()[:32]
