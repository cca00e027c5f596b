"""Values that the parts of the framework exchange."""

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar

import numpy as np

_END = 1e-12
_N = TypeVar("_N", int, float)


class Message(TypedDict):
    """A turn of a conversation, as the chat templates of transformers read it."""

    role: str
    """`system`, `user`, `assistant`, `tool`, or another role that the chat template knows."""
    content: NotRequired[str]
    """The text; a turn with `tool_calls` may have none."""
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


class Example(NamedTuple):
    """An example of a program, as the question of a problem has it."""

    call: str
    """A call of the function with literal arguments; empty where there is none."""
    check: str
    """A statement that fails if the program is wrong, such as `assert f(1) == 2`; empty where no result is known."""


class Problem(NamedTuple):
    """A problem of a dataset. `id` is stable: it is the key of the problem's randomness and records."""

    id: str
    question: str
    """The question. For a conversation this is the last turn of the user."""
    answer: str
    """The gold answer, as written in the dataset."""
    level: int | None = None
    subject: str | None = None
    solution: str | None = None
    """A worked solution, as written in the dataset. Probes can teacher-force it."""
    messages: tuple[Message, ...] = ()
    """The turns of a conversation up to the one that the model answers; empty where the question is the only turn."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the model may call, as JSON schemas for the chat template."""
    second: str | None = None
    """The question of the second prompt of `blend=prompt`, such as the question without its context."""
    examples: tuple[Example, ...] = ()
    """The examples that the question of a program shows."""


class Trajectory(NamedTuple):
    """A prompt and the tokens generated after it. It is immutable, so that a prefix needs no copy.

    `tokens` (int64), `log_p` and `log_q` (float64) have shape (length,): the generated part only, without the prompt.
    `log_p[t]` is log p_g(x_t | prompt, x_<t) of the (blended) target at temperature 1, and `log_q[t]` the log-probability
    under the law that the token was drawn from, both in nats. `interval` (float64, (length, 2)) gives the uniforms that this
    law maps to the token, from `interval[t, 0]` to `interval[t, 1]`; (0, 0) where they are not known. `ended` says whether
    the last token is a stop id or completes a stop string. `laws`, `entropy` and `kept` are None unless an operation asks for
    them: `laws` (float64, (length, K, 3)) has log q and the two ends of the interval under each of its K further laws,
    `entropy` (float64, (length,)) has the entropy of p_g( . | prompt, x_<t) in nats, and `kept` (float64, (length, top_k, 2))
    the tokens that the law of the draw keeps, by id, with their log q; -1 and -inf fill it up.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    log_p: np.ndarray
    log_q: np.ndarray
    interval: np.ndarray
    ended: bool = False
    laws: np.ndarray | None = None
    entropy: np.ndarray | None = None
    kept: np.ndarray | None = None
    evidence: float = 0.0
    """Log of the factor that a potential gives to this answer, in nats; 0 for a text that is not complete."""

    @property
    def length(self) -> int:
        """Generated tokens."""
        return len(self.tokens)

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and generated tokens, int64."""
        return np.concatenate([self.prompt, self.tokens])

    @property
    def sequence_length(self) -> int:
        """Tokens of prompt and generation."""
        return len(self.prompt) + len(self.tokens)

    def complete(self, horizon: int) -> bool:
        """Whether no token can follow: the trajectory has ended, or has `horizon` tokens."""
        return self.ended or self.length >= horizon

    def prefix(self, length: int) -> "Trajectory":
        """The first `length` generated tokens."""
        whole = length >= self.length
        laws, entropy, kept = (None if column is None else column[:length] for column in self[6:9])
        return Trajectory(self.prompt, self.tokens[:length], self.log_p[:length], self.log_q[:length], self.interval[:length],
                          self.ended and whole, laws, entropy, kept, self.evidence if whole else 0.0)

    def extended(self, tokens: np.ndarray, log_p: np.ndarray, log_q: np.ndarray, interval: np.ndarray, ended: bool,
                 *columns: np.ndarray | None) -> "Trajectory":
        """This trajectory with more tokens. Raises ValueError if earlier tokens lack a column that is given.

        Args:
            columns: `laws`, `entropy` and `kept`, or the first of them.
        """
        return Trajectory(
            self.prompt, np.concatenate([self.tokens, tokens]),
            np.concatenate([self.log_p, log_p]), np.concatenate([self.log_q, log_q]),
            np.concatenate([self.interval, interval]), ended,
            *map(self._joined, self[6:9], columns),  # type: ignore[arg-type]  # at most three, before `evidence`
        )

    def under(self, number: int) -> "Trajectory":
        """This trajectory with `log_q` and `interval` of law `number` of `laws`. Raises ValueError without laws."""
        if self.laws is None:
            raise ValueError("this trajectory has no log q under further laws")
        return self._replace(log_q=self.laws[:, number, 0], interval=self.laws[:, number, 1:])

    def _joined(self, column: np.ndarray | None, more: np.ndarray | None) -> np.ndarray | None:
        if more is None or not self.length:
            return more
        if column is None:
            raise ValueError("a draw that asks for further laws, entropy or kept sets continues a trajectory that lacks them")
        return np.concatenate([column, more])

    def sampling_mask(self) -> dict[str, list[list[Any]]]:
        """The kept sets by the names of vLLM: `sampling_mask`, the ids of each token's set, and `sampling_mask_logprobs`.

        The latter has their log q in nats. Empty where none are known.
        """
        if self.kept is None:
            return {}
        sets = [rows[rows[:, 0] >= 0.0] for rows in self.kept]
        return {"sampling_mask": [rows[:, 0].astype(int).tolist() for rows in sets],
                "sampling_mask_logprobs": [rows[:, 1].tolist() for rows in sets]}

    def weight(self, alpha: float, start: int = 0) -> float:
        """W: the sum of alpha * log p - log q over the tokens from `start` on, and the evidence, in float64."""
        return float(np.sum(alpha * self.log_p[start:] - self.log_q[start:])) + self.evidence

    def drawn_again(self, start: int, uniforms: np.ndarray) -> int:
        """Number of tokens from `start` on that these uniforms, (length - start,), draw again before the first difference.

        A uniform within 1e-12 of an interval's end counts as different, so that rounding cannot make two draws equal.
        """
        low, high = self.interval[start:].T
        other = np.flatnonzero((uniforms < low + _END) | (uniforms > high - _END))
        return int(other[0]) if len(other) else self.length - start

    @staticmethod
    def start(prompt: np.ndarray) -> "Trajectory":
        """The empty trajectory after a prompt (int64 token ids)."""
        return Trajectory(np.asarray(prompt, dtype=np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0),
                          np.empty((0, 2)))


class ChainResult(NamedTuple):
    """The value that a sampler's generator returns for one chain."""

    trajectory: Trajectory
    proposals: int = 0
    """Metropolis-Hastings proposals made; 0 for a sampler without them."""
    accepted: int = 0
    moved: int = 0
    """Accepted proposals that differ from the state they replace."""
    abandoned: int = 0
    """Rejected proposals that were abandoned before they were complete."""
    law_error: float = 0.0
    """Bound on the total variation between the law of this result and the sampler's stated law; 0 where exact."""
    trace: tuple[dict[str, float | int | str], ...] = ()
    """Diagnostics: an entry for each proposal (block, step, cut, lengths, log ratio, decision, log p of the state), or for
    each candidate of best_of_n."""
    measures: Mapping[str, float] = {}
    """Diagnostics of the whole chain, by name."""


class Cost(NamedTuple):
    """Work done for a chain, counted by the engine."""

    tokens_drawn: int = 0
    """Tokens drawn from a law, including those of rejected proposals."""
    target_forwards: int = 0
    """Forward passes of the target that this chain took part in: its sequential depth."""
    token_forwards: int = 0
    """Positions at which the target was evaluated for this chain: prompt, prefixes read again and drawn tokens."""
    tokens_skipped: int = 0
    """Tokens of proposals that were drawn without the target, since they repeat the current sequence."""
    blocks_drafted: int = 0
    """Blocks that a draft proposed, each in one forward of the draft, or in one for each token with `draft=model`."""
    tokens_drafted: int = 0
    tokens_kept: int = 0
    """Drafted tokens that were kept."""
    tokens_shared: int = 0
    """Positions at which the target was not evaluated again, because draws asked for together had the same tokens."""
    blocks_verified: int = 0
    """Blocks that a decoder verified, if its sampler uses the draft too; else 0."""
    tokens_verified: int = 0
    """Tokens that these blocks gave: the accepted ones, and the target's own after them."""
    companion_forwards: int = 0
    """Positions at which models beside the target, of a blend or `draft=model`, were evaluated for this chain; else 0."""
    prompt_forwards: int = 0
    """The part of `token_forwards` that reads the prompt, and that chains of a prompt share: each is charged for it, and the
    engine evaluates it once for all. 0 for engine=vllm, which charges a chain for what its cache lacks."""

    @staticmethod
    def together(costs: Sequence[tuple[_N, _N]]) -> _N:
        """Token-forwards that the engine evaluates for chains of one prompt together, whose prompt is read once.

        Args:
            costs: `token_forwards` and `prompt_forwards` of each chain; at least one.
        """
        shared = [prompt for _, prompt in costs]
        return sum(forwards for forwards, _ in costs) - (sum(shared) - max(shared))


class ExpectedCost(NamedTuple):
    """The expected cost of one chain, in tokens except `num_draws`."""

    extended: float
    """Tokens drawn outside proposals."""
    proposed: float = 0.0
    """Tokens of Metropolis-Hastings proposals, each drawn from its cut to its end."""
    scored: float = 0.0
    """Tokens scored without being drawn."""
    num_draws: float = 1.0
    """Draws and scorings, including those of proposals."""
    drafts: float = 0.0
    """Number of draws and scorings in which the draft proposes blocks for the sampler."""
    drafted: float = 0.0
    """Tokens of these draws if they are not all tokens that are drawn; 0 if they are."""


class Lengths(NamedTuple):
    """What is counted of a job's problems before a plan is made."""

    share: float = 1.0
    """The share of the problems that fit into the model's positions; 1 where no prompt is read."""
    prompt: float | None = None
    """Mean tokens of the prompts that fit; None where none is read."""
    solution: float | None = None
    """Mean tokens of their solutions, where these are the answers of a probe."""


class UnitCost(NamedTuple):
    """The expected cost of one unit of a probe."""

    token_forwards: float
    """Positions at which the target is evaluated."""
    draft_blocks: float = 0.0
    """Blocks that the draft proposes, each in one forward of the draft."""


class Grade(NamedTuple):
    """The result of grading a sample. Every verdict except `correct` counts as wrong, and is counted by its name."""

    verdict: str
    """One of `grading.verdicts.VERDICTS`."""
    answer: str | None
    """The extracted final answer; None without one."""
    rule: str = ""
    """The rule that decided; for `unsupported` the limit that was reached."""
    reason: str = ""
    """A reason where the rule gives none: the name of an exception, a signal, or why the sample was not drawn."""
    same_string: bool | None = None
    """The result of `grading.math.string_rule`, for comparison only; None if it was not applied."""
    walls: tuple[str, ...] = ()
    """The layers of the sandbox around a program that was run."""
    grade_seconds: float | None = None
    """Seconds that finding the verdict took, without waiting; None if they were not measured."""
    passed: float | None = None
    """The share of its question's examples that a program passes; None without examples, or if they were not run."""
    behaviour: str | None = None
    """A hash of what a program returns on the calls of the examples, and on changed ones; None as of `passed`, and for a
    program that does not end or raises on every call."""

    def shown(self) -> dict[str, Any]:
        """What is known of the question's examples, by the names of records."""
        return {name: value for name in ("passed", "behaviour") if (value := getattr(self, name)) is not None}


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two sequences of token ids."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


class Unit(NamedTuple):
    """The key of one measurement, which is one line of the records. Like the key of a sample it has a problem and a number."""

    problem: str
    chain: int = 0


class Work:
    """The units that a probe measures. Each iteration claims a unit, so a probe iterates only when it can start a unit.

    Attributes:
        units: all units that the iteration can yield. Other processes may claim some of them.
        device: device name for PyTorch.

    Args:
        claimed: an iterator that claims units as it is consumed; None to yield all of `units`.
    """

    def __init__(self, units: Sequence[Unit], device: str, claimed: Iterable[Unit] | None = None):
        self.units, self.device = units, device
        self._claimed = units if claimed is None else claimed

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._claimed)


class Summary(NamedTuple):
    """The results that a probe derives from its records. Values are JSON values; None means that no number exists."""

    values: Mapping[str, float | int | str | None]
    """Numbers for `summary.json` and the tracker."""
    tables: dict[str, list[dict]]
    """Tables by name, as rows with the same keys. They are printed and written to `summary.json` and to CSV files."""
    data: dict[str, list[dict]]
    """Tables that are written to CSV files only. Figures are drawn from them."""

    def number(self, name: str) -> float:
        """The value of that name. Raises TypeError if it is not a number."""
        value = self.values[name]
        if value is None or isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, not a number")
        return value


class RunResult(NamedTuple):
    """The state of a run after this start."""

    folder: Path
    summary: dict
    """Empty if `num_left` is not 0."""
    num_new: int
    """Tasks recorded since this start, by this or another process."""
    num_elsewhere: int
    """Those of them that other processes have recorded."""
    num_beyond: int
    """Tasks of earlier starts that this start did not request. The summary covers them."""
    num_left: int = 0
    """Tasks that other processes are still doing. The last of these processes writes the summary."""
    unit: str = "sample"
    """The word for one task."""
    table: Callable[[list[Path]], str] = lambda folders: ""
    """Renders one table for all folders whose results have this same function."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table([self.folder]) or self.line())}</pre>"

    def line(self) -> str:
        """The result in a line."""
        units = self.unit + "s" * (self.num_new != 1)
        nothing = "nothing drawn" if self.num_left else "already complete, nothing drawn"
        elsewhere = f", {self.num_elsewhere} of them drawn by other processes" if self.num_elsewhere else ""
        drawn = f"{self.num_new} new {units}{elsewhere}" if self.num_new else nothing
        beyond = (f"; {self.num_beyond} recorded {self.unit}s that were not requested are counted as well"
                  if self.num_beyond else "")
        left = f"; {self.num_left} more are being drawn by other processes" if self.num_left else ""
        return f"{self.folder}: {drawn}{beyond}{left}"
