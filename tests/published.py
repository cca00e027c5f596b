"""Records that satisfy all counts of the guided-power-sampling document at once, with every field of real records.

Six conditions on 104 problems reproduce tables 4.1 (accuracy, tokens, times, acceptance), 4.2 (by greedy correctness), 4.3
(overlap of ps and blend_ps), 4.4 (interaction) and 6.3 (draft). Values that the document does not contain are made up by fixed
rules, not at random.
"""

from typing import NamedTuple

NUM_PROBLEMS, NUM_EASY = 104, 74
BLOCKS, STEPS, BLOCK_LENGTH = 16, 2, 64
_SUBJECTS = ("Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory", "Prealgebra",
             "Precalculus")


class Condition(NamedTuple):
    """Results of a condition in the document."""

    solved: frozenset[int]
    """Numbers of the solved problems. Problems 0 to 73 are easy, which means that greedy solves them."""
    mean_tokens: int
    mean_seconds: int
    accepted: int | None = None
    """Number of accepted proposals out of 3,328: 104 problems of 16 blocks of 2 steps."""


def _solved(easy: range, hard: range) -> frozenset[int]:
    return frozenset({*easy, *hard})


CONDITIONS = {
    "greedy": Condition(_solved(range(74), range(0)), 626, 64),
    "temp": Condition(_solved(range(72), range(74, 75)), 626, 65),
    # blend_ps solves all 70 easy and 4 of the 5 hard problems that ps solves: 74 by both, 1 only by ps, 7 only by blend_ps.
    "ps": Condition(_solved(range(70), range(74, 79)), 613, 511, 1857),
    "blend_greedy": Condition(_solved(range(68), range(74, 77)), 627, 62),
    "blend_ps": Condition(_solved(range(73), range(75, 83)), 604, 471, 1677),
    # The document has only the sum, 75. Tokens and times are copied from ps.
    "draft_blend_ps": Condition(_solved(range(71), range(76, 80)), 613, 511, 1717),
}


def records(name: str) -> list[dict]:
    """The records of a condition, one per problem."""
    return [_record(CONDITIONS[name], number) for number in range(NUM_PROBLEMS)]


def problem(number: int) -> dict:
    """Id, level, subject and gold answer of a problem; hard problems have higher levels."""
    level = 1 + number % 4 if number < NUM_EASY else 3 + number % 3
    return {"problem": f"test/{_SUBJECTS[number % 7].lower().replace(' ', '_')}/{number}.json", "level": level,
            "subject": _SUBJECTS[number % 7], "gold": str(number + 2)}


def _record(condition: Condition, number: int) -> dict:
    about, correct = problem(number), number in condition.solved
    silent = not correct and number % 5 == 0  # some wrong samples reach the limit without an answer
    answer = about["gold"] if correct else None if silent else str(number + 3)
    length = condition.mean_tokens + _spread(number, 300)
    proposals = BLOCKS * STEPS if condition.accepted is not None else 0
    trace = _trace(condition.accepted, number, length) if proposals else []
    accepted = sum(entry["decision"] in ("accept", "identical") for entry in trace)
    drawn = length + sum(entry["proposal_length"] - entry["cut"] for entry in trace)
    log_p = trace[-1]["log_p"] if trace else -0.1 * length
    return {
        "problem": about["problem"], "chain": 0, "level": about["level"], "subject": about["subject"],
        "verdict": "correct" if correct else "no_answer" if silent else "wrong", "answer": answer,
        "rule": "no_box" if silent else "integer",
        "reason": "", "same_string": correct, "walls": [], "gold": about["gold"],
        "text": "" if silent else f"The answer is \\boxed{{{answer}}}.",
        "num_tokens": length, "ended": not silent, "finish_reason": "length" if silent else "stop_id",
        "log_p": log_p, "log_q": 0.4 * log_p, "proposals": proposals,
        "accepted": accepted, "moved": sum(entry["decision"] == "accept" for entry in trace), "abandoned": 0, "law_error": 0.0,
        "tokens_drawn": drawn, "target_forwards": drawn, "token_forwards": drawn + 120, "tokens_skipped": 0,
        "blocks_drafted": 0, "tokens_drafted": 0, "tokens_kept": 0,
        "seconds": float(condition.mean_seconds + _spread(number, 20)),
        "share_seconds": float(condition.mean_seconds + _spread(number, 20)) / 8,
        "tokens": [number % 50] * length, "trace": trace, "grader": "math",
    }


def _spread(number: int, width: int) -> int:
    """A whole number between -width and width, different for each problem. The sum over all problems is 0."""
    half = number % (NUM_PROBLEMS // 2)
    size = 1 + half * 37 % width
    return size if number < NUM_PROBLEMS // 2 else -size


def _trace(accepted: int, number: int, length: int) -> list[dict]:
    """32 steps. Over all problems, `accepted` steps are accepted in total."""
    entries, log_p = [], -0.1 * length - 32.0
    for place in range(BLOCKS * STEPS):
        block, step = place // STEPS + 1, place % STEPS + 1
        proposal_length = min(length, block * BLOCK_LENGTH)
        index = place * NUM_PROBLEMS + number
        total = BLOCKS * STEPS * NUM_PROBLEMS
        taken = (index + 1) * accepted // total > index * accepted // total
        decision = ("identical" if place % 4 == 0 else "accept") if taken else "reject"
        log_p += 1.0 if decision == "accept" else 0.0
        entries.append({"block": block, "step": step, "cut": proposal_length * (index % 7) // 8, "length": proposal_length,
                        "proposal_length": proposal_length, "log_ratio": 0.5 if taken else -1.5 - place % 3,
                        "decision": decision, "log_p": log_p})
    return entries
