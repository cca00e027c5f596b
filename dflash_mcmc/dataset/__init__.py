"""Datasets: problems with stable ids and gold answers. Datasets that are read from rows inherit from `inputs.sources`.

Stop strings are checked here, before any model is loaded. `engine/batching/stop_strings.py` finds them.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dflash_mcmc.components import Component
from dflash_mcmc.dataset.inputs import prompting
from dflash_mcmc.dataset.inputs.problems import ProblemSelection, chosen, content_hash
from dflash_mcmc.errors import ConfigError, note
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.registry import name_of, options_with
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config

_MOST_STOPS, _LONGEST_STOP = 16, 128
"""Largest number of stop strings, and their largest length in characters."""


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


def warn_of_stops(strings: Sequence[str], field: str) -> None:
    """Prints a line for a backslash and an n at the start of a word, which a shell or a file may have meant as a line feed."""
    for string in strings:
        if any(string.startswith("\\n", place) and not string[place + 2:place + 3].islower() for place in range(len(string))):
            note(f"{field}: {string!r} has a backslash and an n; for a line feed write $'{field}=[\"\\nQuestion:\"]' in bash")


@dataclass(slots=True, kw_only=True)
class Dataset(ProblemSelection, Component):
    """Base class of datasets: the selection of problems and the prompt. A leaf needs `all_problems`."""

    max_new_tokens: int = identity(1024, "longest answer in tokens", ge=1, le=1_000_000_000)
    prompt: str = identity("boxed", f"prompt: {', '.join(prompting.TEMPLATES)} (texts: dflash_mcmc/"
                           "dataset/inputs/prompting.py), or a text in which {question} is replaced by the problem")
    prompt_file: str | None = runtime(None, "text file with the prompt; it replaces dataset.prompt, and its content is part "
                                      "of the identity; null takes dataset.prompt")
    system: str | None = identity(None, "text of a system turn before everything else; null adds none", off=None)
    fewshot: int = identity(0, "number of worked examples before each problem, which are never the problem itself", ge=0,
                            off=0)
    fewshot_seed: int = identity(0, "seed of the order in which examples are chosen, the same for all problems", off=0)
    fewshot_path: str | None = runtime(None, "file of the examples, in the format of the dataset's own; its content is part "
                                       "of the identity; null takes the dataset's other problems")

    stop: list[str] = identity([], "strings that end an answer: it ends at the first token at which its text contains one, "
                               "and its text is what comes before; [] has none", off=[])

    group = "dataset"
    answers_in_text: ClassVar[bool] = True
    """Whether a gold answer is the text of an answer, so that an example can show it. Gold answers of programs are tests."""

    @abstractmethod
    def all_problems(self) -> list[Problem]:
        """Every problem of the dataset. Raises UserError if they cannot be read."""

    def num_known(self) -> int | None:
        """Number of all problems if it is known without reading them, else None."""
        return None

    def is_unread(self, config: Config) -> bool:
        """Whether the run is a dry run that need not read the problems: they are on the hub, and their number is known."""
        return config.dry_run and self.num_known() is not None

    def check(self, config: Config) -> None:
        """Checks the selection, the prompt and the stop strings. Raises ConfigError."""
        self.check_choice()
        check_stops(self.stop, "dataset.stop")
        warn_of_stops(self.stop, "dataset.stop")
        if self.stop and not config.probe.draws_with_stops:
            able = options_with("probe", "draws_with_stops")
            raise ConfigError("dataset.stop", self.stop, f"[] with probe={name_of(config.probe)}, or {able}")
        prompting.template_of(self.prompt, self.prompt_file)

    def resolved(self, config: Config) -> Dataset:
        """The dataset with its prompt as text. The name of a template and the template's text therefore give the same run."""
        return dataclasses.replace(self, prompt=prompting.template_of(self.prompt, self.prompt_file),
                                   fewshot_seed=self.fewshot_seed if self.fewshot else 0)

    def examples(self) -> list[Problem]:
        """The problems that few-shot examples are chosen from. Raises UserError."""
        if self.fewshot_path is not None:
            raise ConfigError("dataset.fewshot_path", self.fewshot_path, "null, since the dataset is not read from a file")
        return self.all_problems()

    def prompting(self) -> prompting.Prompting:
        """How the problems are presented to a model. Raises UserError if the few-shot examples cannot be read."""
        template = prompting.template_of(self.prompt, self.prompt_file)
        if not self.fewshot:
            return prompting.Prompting(template, self.system)
        examples = self.examples()
        if not self.answers_in_text:
            examples = [example for example in examples if example.solution]
        return prompting.Prompting(template, self.system, prompting.shuffled(examples, self.fewshot_seed), self.fewshot)

    def problems(self) -> list[Problem]:
        """The requested problems. Raises UserError if they cannot be read."""
        return self.chosen(self.all_problems())

    def num_all(self) -> int:
        """Number of all problems. They are read only if their number is not known otherwise."""
        number = self.num_known()
        return len(self.all_problems()) if number is None else number

    def num_chosen(self) -> int:
        """Number of requested problems. The problems are read only if their number is not known otherwise.

        Ids are counted without a check where nothing is read.
        """
        number = self.num_known()
        if number is None:
            return len(self.problems())
        asked = number if self.ids is None else len(set(self.ids))
        return len(chosen(range(asked), self.limit, self.shards, self.num_shards))

    def fingerprint(self) -> str:
        """Hash of all problems of the dataset and of the examples. Raises UserError for a problem whose prompt cannot be made.

        It covers problems that are not requested, too. A run can therefore be extended to them.
        """
        problems = self.all_problems()
        asked = self.prompting()
        for problem in problems if asked.examples or self.system is not None else []:
            asked.conversation(problem)  # finds a prompt that cannot be made, before any model is loaded
        examples = self.examples() if self.fewshot else problems
        return content_hash(problems if examples == problems else [*problems, *examples])
