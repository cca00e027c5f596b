"""`dataset=arith`: generated multi-step word problems with worked solutions, on which `model=tiny` is trained.

A problem is a start count and a few events that change it. Its level is the number of arithmetic operations, 1 to 5. The same
problem has many correct solutions. An operation can be worked in full (`7*24=140+28=168`), done at once (`7*24=168`) or
merged with the next one (`47+7*24=215`). Products can be worked first or in the order of the events. The answer can also be
given without any work. For a small model some of these ways are much more reliable than others, so the accuracy depends on how
a solution is sampled: p^alpha weighs whole solutions, and a low temperature weighs only the next token.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.components import identity, register
from dflash_mcmc.dataset import Dataset
from dflash_mcmc.rng import Key, Stream
from dflash_mcmc.types import Problem

LEVELS = (1, 2, 3, 4, 5)
NUM_TEST_BUCKETS = 16
"""Number of hash buckets of a problem's numbers and operations; one bucket is the test split."""

NUM_TEST_PROBLEMS = 300
_TEST_SEED = 2026
_STORED = Path(__file__).resolve().parent.parent / "assets" / "arith.jsonl"
_LARGEST = 9999
# How often a solution takes each way. No way dominates. A greedy decoder prefers to compute a product at once. To work it in
# full is more reliable, so the accuracy depends on the sampler.
_WITHOUT_WORK = 0.30
_MERGED_PRODUCT = 0.25
_MERGED_SUM = 0.30
_WORKED_IN_FULL = 0.36
_PEOPLE = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jon", "Kim", "Leo")
_THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "stones", "tickets")
_OPENERS = ("First ", "We have ", "Start with ", "")
_LINKS = (" Then ", " Next ", " Now ", " So ")
_CLOSERS = (" The answer is ", " Answer: ")


@register("dataset", "arith")
@dataclass(slots=True, kw_only=True)
class Arith(Dataset):
    """Generated word problems, the five levels in turn, disjoint from the embedded model's training problems.

    The first 300 are the embedded problems. A larger `num_problems` continues them with the same generator, for comparisons
    that need more problems. A question can then come twice, about once in 1,000 problems.
    """

    num_problems: int = identity(300, "number of generated problems", ge=1, le=100_000)
    max_new_tokens: int = 128
    prompt: str = "{question}"

    def all_problems(self) -> list[Problem]:
        if self.num_problems == NUM_TEST_PROBLEMS:
            return _stored_problems()
        return generated_test_problems(self.num_problems)


@cache
def _stored_problems() -> list[Problem]:
    """The embedded test problems. Generating them would add a third of a second to every start."""
    return [Problem(**json.loads(line)) for line in _STORED.read_text().splitlines()]


@cache
def generated_test_problems(number: int = NUM_TEST_PROBLEMS) -> list[Problem]:
    """The first test problems, generated. The first 300 equal the stored ones."""
    problems = []
    for index in range(number):
        level = LEVELS[index % len(LEVELS)]
        key = Key(_TEST_SEED).fold_in("test", index)
        problem = make_problem(key, level, "test")
        solution = make_solution(key, problem)
        problems.append(Problem(f"arith-{index:03d}", problem.question, str(problem.answer), level, "arithmetic", solution))
    return problems


class Event(NamedTuple):
    """One change of the running count: `count = count sign (times * number)`, or a scaling, or a final split."""

    kind: str
    """`plain` (count + or - number), `boxes` (count + or - times * number), `scale` (count * number), `split` (/ number)."""
    sign: str
    times: int
    number: int

    @property
    def num_operations(self) -> int:
        return 2 if self.kind == "boxes" else 1

    def apply(self, count: int) -> int:
        amount = self.times * self.number if self.kind == "boxes" else self.number
        return {"+": count + amount, "-": count - amount, "*": count * amount, "/": count // amount}[self.sign]


class WordProblem(NamedTuple):
    """A generated problem: its text, its answer, and the data for writing its solutions."""

    question: str
    answer: int
    level: int
    start: int
    events: tuple[Event, ...]

    @property
    def split(self) -> str:
        """`test` or `train`, by a hash of the numbers and operations. The wording has no effect."""
        numbers = repr((self.start, [tuple(event) for event in self.events])).encode()
        return "test" if hashlib.blake2b(numbers, digest_size=8).digest()[0] % NUM_TEST_BUCKETS == 0 else "train"


def make_problem(key: Key, level: int, split: str) -> WordProblem:
    """The problem of this key, level (1 to 5) and split (`train` or `test`): drawn again until it falls into the split."""
    if level not in LEVELS or split not in ("train", "test"):
        raise ValueError(f"make_problem: level {level}, split {split!r}; allowed: levels 1 to 5, 'train' or 'test'")
    for attempt in range(10_000):
        stream = Stream(key.fold_in("problem", level, attempt))
        problem = _draw_problem(stream, level)
        if problem is not None and problem.split == split:
            return problem
    raise RuntimeError(f"no problem of level {level} fell into the split {split!r} in 10,000 attempts")


def make_solution(key: Key, problem: WordProblem) -> str:
    """One of the many correct solutions of the problem, with a style drawn from the key. Ends in `\\boxed{answer}.`"""
    stream = Stream(key.fold_in("solution"))
    closing = stream.choice(_CLOSERS) + f"\\boxed{{{problem.answer}}}."
    if stream.uniform() < _WITHOUT_WORK / problem.level:
        return closing.strip()
    # The sentences of a worked solution, without opener, links and closing
    sentences: list[str] = []
    products_first = stream.uniform() < 0.3 and sum(event.kind == "boxes" for event in problem.events) > 0
    if products_first:
        sentences += [_product(stream, event) for event in problem.events if event.kind == "boxes"]
    count, merged = problem.start, ""
    for index, event in enumerate(problem.events):
        left = merged or str(count)
        count, merged = event.apply(count), ""
        amount = event.number
        if event.kind == "boxes":
            amount = event.times * event.number
            merge_product = not products_first and stream.uniform() < _MERGED_PRODUCT
            if merge_product:
                sentences.append(f"{left}{event.sign}{event.times}*{event.number}={count}.")
                continue
            if not products_first:
                sentences.append(_product(stream, event))
        follower = problem.events[index + 1] if index + 1 < len(problem.events) else None
        if event.sign in "+-" and follower is not None and follower.kind == "plain" and stream.uniform() < _MERGED_SUM:
            merged = f"{left}{event.sign}{amount}"
            continue
        sentences.append(_in_full(amount, int(left)) if event.sign == "*" and left.isdigit() and int(left) % 10
                         and int(left) > 10 and stream.uniform() < _WORKED_IN_FULL else f"{left}{event.sign}{amount}={count}.")
    text = stream.choice(_OPENERS) + sentences[0]
    for sentence in sentences[1:]:
        text += stream.choice(_LINKS) + sentence
    return text + closing


def _draw_problem(stream: Stream, level: int) -> WordProblem | None:
    person, thing = stream.choice(_PEOPLE), stream.choice(_THINGS)
    start = stream.integer(12, 99)
    count = start
    events: list[Event] = []
    while (left := level - sum(event.num_operations for event in events)) > 0:
        kinds = {"plain": 0.35, "scale": 0.15, "boxes": 0.40 if left >= 2 else 0.0, "split": 0.25 if left == 1 else 0.0}
        kind = stream.choice(list(kinds), list(kinds.values()))
        if kind == "plain":
            event = Event(kind, stream.choice("+-"), 1, stream.integer(11, 99))
        elif kind == "boxes":
            event = Event(kind, stream.choice("+-", (0.65, 0.35)), stream.integer(3, 19), stream.integer(12, 98))
        elif kind == "scale":
            event = Event(kind, "*", 1, stream.integer(2, 9))
        else:
            divisors = [d for d in range(2, 13) if count % d == 0]
            if not divisors:
                return None
            event = Event(kind, "/", 1, stream.choice(divisors))
        events.append(event)
        count = event.apply(count)
        if not 0 < count <= _LARGEST:
            return None
    told = [f"{person} has {start} {thing}."]
    for event in events:
        number, times = event.number, event.times
        told.append(stream.choice({
            "plain+": (f"{person} buys {number} more.", f"{person} finds {number} more."),
            "plain-": (f"{person} gives away {number}.", f"{person} loses {number}."),
            "boxes+": (f"{person} buys {times} boxes of {number}.", f"{person} gets {times} bags of {number}."),
            "boxes-": (f"{person} sells {times} boxes of {number}.", f"{person} gives away {times} bags of {number}."),
            "scale*": (f"The number grows to {number} times as many.", f"It becomes {number} times as much."),
            "split/": (f"They are shared equally by {number} friends.", f"They go equally into {number} jars."),
        }[event.kind + event.sign]))
    who = "each get" if events[-1].kind == "split" else f"{person} have"
    told.append(f"How many {thing} does {who}?")
    return WordProblem(" ".join(told), count, level, start, tuple(events))


def _product(stream: Stream, event: Event) -> str:
    """`7*24=168.` or the same in full, split over the tens and ones of one factor."""
    times, number = event.times, event.number
    if stream.uniform() < _WORKED_IN_FULL and (times if times > 10 else number) % 10:
        return _in_full(times, number)
    return f"{times}*{number}={times * number}."


def _in_full(times: int, number: int) -> str:
    """`17*24=240+168=408.`: one factor is split into tens and ones, the first factor if it has both."""
    if times > 10:
        tens, ones = times - times % 10, times % 10
        products = (tens * number, ones * number)
    else:
        tens, ones = number - number % 10, number % 10
        products = (times * tens, times * ones)
    return f"{times}*{number}={products[0]}+{products[1]}={times * number}."
