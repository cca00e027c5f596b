"""The draw of a plain step on a GPU, in three kernels instead of 70 to 104: where the loop of `gpu_layers.py` runs.

    amax     PyTorch's: the largest logit of each row
    _weigh   sums of the weights exp(logit - maximum) over blocks of token ids
    _draw    the inverse transform, log p and log q, what ends a draw, and the state of the row

The law is that of `logits_processor.py`: float32 weights, with float64 sums first over blocks and then inside the block of the
token. Weights differ from PyTorch's by two units in the last place, and sums by their order. So a token differs only if its
uniform lies within about 1e-7 of the border of two tokens. The temperature is part of the kernels. PyTorch truncates and
penalises, since a threshold takes a sort, and takes the most likely token; the kernels draw from the logits that it leaves. A
step keeps PyTorch's draw if a row draws from other logits than the target's, or asks for further columns (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dflash_mcmc.engine.batching.rows import Group, Rows, Status, processed
from dflash_mcmc.engine.batching.stop_strings import FOUND, Endings
from dflash_mcmc.ops import SamplingParams

_BLOCK, _PART = tl.constexpr(512), 2048
"""Token ids whose weights are summed together, as in `logits_processor.py`, and those of a program."""
_LIVE, _DONE, _ABANDONED, _FAILED, _FOUND = (
    tl.constexpr(int(each)) for each in (Status.LIVE, Status.DONE, Status.ABANDONED, Status.FAILED, FOUND))


@triton.jit
def _weights(logits, inside, temperature, maximum):
    below = tl.div_rn(tl.load(logits, mask=inside, other=-float("inf")), temperature) - tl.div_rn(maximum, temperature)
    below = tl.maximum(below, -87.0)
    # exp(x) = 2^n exp(x - n log 2), with log 2 in two parts: a GPU's own exp errs by the rounding of x / log 2.
    whole = tl.floor(below * 1.4426950408889634 + 0.5)
    weights = tl.exp(below - whole * 0.693359375 + whole * 2.1219444e-4) * tl.exp2(whole)
    return tl.where(weights > 2.0**-125, weights, 0.0)  # see `logits_processor._LEAST`


@triton.jit
def _first_above(point, upto, weights, places, SIZE: tl.constexpr):
    """The first place of positive weight whose sum is above a point. Rounding may leave none: then the last one."""
    found = tl.min(tl.where((upto > point) & (weights > 0), places, SIZE), 0)
    return tl.minimum(found, tl.max(tl.where(weights > 0, places, 0), 0))


@triton.jit
def _weigh(target, own, temperature, maxima, own_maxima, sums, size, PART: tl.constexpr):
    row, part, law = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = part * PART + tl.arange(0, PART)
    logits = (target if law == 0 else own) + row.to(tl.int64) * size + at
    maximum = tl.load((maxima if law == 0 else own_maxima) + row)
    weights = _weights(logits, at < size, temperature if law == 1 else 1.0, maximum)
    blocks: tl.constexpr = PART // _BLOCK
    place = ((law * tl.num_programs(0) + row) * tl.num_programs(1) + part) * blocks + tl.arange(0, blocks)
    tl.store(sums + place, tl.sum(tl.reshape(weights, (blocks, _BLOCK)).to(tl.float64), 1))


@triton.jit
def _draw(target, own, temperature, maxima, own_maxima, sums, uniforms, drawn_tokens, tokens, scores, seen, counts, positions,
          lasts, origins, statuses, rounds, fed, matched, alphas, weights, floors, log_lengths, stop_ids, vocabularies,
          classes, class_rows, steps, size, length, blocks, num_stops, LAWS: tl.constexpr, FLOORS: tl.constexpr,
          STRINGS: tl.constexpr, SEEN: tl.constexpr, COUNTS: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr):
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    largest, maximum, at = tl.load(maxima + row), tl.load(own_maxima + row), tl.load(positions + row) + 1
    own_sums = sums + ((LAWS - 1) * tl.num_programs(0) + row) * blocks
    masses = tl.load(own_sums + number, mask=number < blocks, other=0.0)
    upto = tl.cumsum(masses, 0)
    total = tl.sum(tl.where(number == BLOCKS - 1, upto, 0.0), 0)
    of_target = total
    if LAWS == 2:
        of_target = tl.sum(tl.load(sums + row * blocks + number, mask=number < blocks, other=0.0), 0)
    point = tl.load(uniforms + row * length + at) * total
    block = _first_above(point, upto, masses, number, BLOCKS)
    before, place = tl.sum(tl.where(number == block - 1, upto, 0.0), 0), tl.arange(0, _BLOCK)
    ids = block * _BLOCK + place
    each = _weights(own + row * size + ids, ids < size, temperature, maximum).to(tl.float64)
    within = tl.cumsum(each, 0)
    chosen = _first_above(point - before, within, each, place, _BLOCK)
    token = block * _BLOCK + chosen
    low = (before + tl.sum(tl.where(place == chosen - 1, within, 0.0), 0)) / total
    high = (before + tl.sum(tl.where(place == chosen, within, 0.0), 0)) / total
    logit = tl.div_rn(tl.load(own + row * size + token), temperature)
    log_q = (logit - tl.div_rn(maximum, temperature)).to(tl.float64) - tl.log(total)
    log_p = (tl.load(target + row * size + token) - largest).to(tl.float64) - tl.log(of_target)
    tl.store(drawn_tokens + row, token)

    status = tl.load(statuses + row)
    failed = (tl.abs(largest) < float("inf")) & (tl.abs(log_q) < float("inf")) == 0
    live = status == _LIVE
    drawn = live & (failed == 0)
    slot = row * length + at
    tl.store(tokens + slot, token, mask=drawn)
    tl.store(scores + 4 * slot, log_p, mask=drawn)
    tl.store(scores + 4 * slot + 1, log_q, mask=drawn)
    tl.store(scores + 4 * slot + 2, low, mask=drawn)
    tl.store(scores + 4 * slot + 3, high, mask=drawn)
    if SEEN:
        tl.store(seen + row * size + token, 1, mask=drawn)
    if COUNTS:
        tl.store(counts + row * size + token, tl.load(counts + row * size + token) + 1.0, mask=drawn)
    tl.store(positions + row, at, mask=drawn)
    tl.store(rounds + row, tl.load(rounds + row) + 1, mask=live)
    tl.store(fed + row, tl.load(fed + row) + 1, mask=live)
    stop = tl.arange(0, STOPS)
    stops = tl.load(stop_ids + stop, mask=stop < num_stops, other=-1) == token
    ended = (tl.max(stops.to(tl.int32), 0) > 0) | (at >= tl.load(lasts + row))
    if STRINGS:
        state = tl.load(matched + row)
        kind = tl.load(classes + tl.load(vocabularies + state) + token)
        state = tl.load(steps + tl.load(class_rows + state) + kind)
        tl.store(matched + row, state, mask=drawn)
        ended = ended | (state == _FOUND)
    after = tl.where(ended, _DONE, _LIVE)
    if FLOORS:
        weight = tl.load(weights + row) + tl.where(drawn, tl.load(alphas + row) * log_p - log_q, 0.0)
        tl.store(weights + row, weight)
        bonus = tl.load(log_lengths + row)
        generated = (at - tl.load(origins + row) + 1).to(tl.float64)
        bound = weight + tl.where(tl.abs(bonus) < float("inf"), bonus - tl.log(generated), 0.0)
        after = tl.where((ended == 0) & (bound <= tl.load(floors + row)), _ABANDONED, after)
    tl.store(statuses + row, tl.where(failed, _FAILED, after), mask=live)


def drawn(state: Rows, logits: torch.Tensor, groups: Sequence[Group], endings: Endings) -> torch.Tensor:
    """Draws a token for the first rows and advances the live ones. Returns the tokens, int64 (rows,).

    Args:
        logits: float32 (rows, vocabulary), of the target.
        groups: the sampling parameters of the rows.
    """
    (rows, size), params, logits = logits.shape, groups[0].params, logits.contiguous()
    maxima = own_maxima = logits.amax(dim=-1)
    if len(groups) == 1 and params.temperature and params == SamplingParams(params.temperature):
        own, temperature = logits, float(params.temperature)
    else:
        own, temperature = processed(logits, groups, 1, state.history(rows)).contiguous(), 1.0
        own_maxima = own.amax(dim=-1)
    num_laws, parts, tables = 1 if own is logits and temperature == 1.0 else 2, triton.cdiv(size, _PART), endings.tables
    blocks = parts * (_PART // _BLOCK.value)
    tokens, sums = state.tokens.new_empty(rows), state.uniforms.new_empty(num_laws, rows, blocks)
    _weigh[(rows, parts, num_laws)](logits, own, temperature, maxima, own_maxima, sums, size, _PART)
    _draw[(rows,)](
        logits, own, temperature, maxima, own_maxima, sums, state.uniforms, tokens, state.tokens, state.scores,
        state.seen.view(torch.uint8), state.counts, state.position, state.last, state.origin, state.status, state.rounds,
        state.fed, state.matched, state.alpha, state.weight, state.floor, state.log_length, endings.ids,
        *(tables.tensors), size, state.tokens.shape[1], blocks, len(endings.ids), num_laws, state.has_floors,
        tables.version > 0, len(state.seen) > 0, len(state.counts) > 0, triton.next_power_of_2(blocks),
        max(2, triton.next_power_of_2(len(endings.ids))))
    return tokens
