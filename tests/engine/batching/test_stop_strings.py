"""Stop strings: the table against the definition, bytes of tokens against tokenizers, and engines against each other."""

import functools
import itertools

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import dflash_mcmc
from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.stop_strings import FOUND, Endings, StopStrings
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.extraction import cut
from dflash_mcmc.ops import Draw, SamplingParams, stopping
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.draft_mh import DraftMH
from dflash_mcmc.tokenizer import TokenTexts, continuation, texts_of
from dflash_mcmc.types import Trajectory
from tests.cases import quick
from tests.engine.batching.test_batched import HORIZON, PROMPTS, SAMPLERS, TOLERANCE, chains, same
from tests.engine.speculative.test_speculator import drafter, match, reject
from tests.targets import RememberingReference, random_model, rows_do_not_depend_on_the_batch

STOP = ["abba", " b", "é", "\naab"]
NAMES = ["".join(letters) for length in (1, 2, 3, 4) for letters in itertools.product("ab", repeat=length)]
NAMES += ["Ã", "©", "Ã©", "aÃ", "Ġ", "Ġb", "aĠ", "Ċ", "ĊĊa", "bĊa", *"cdefghijklmnopqrstuvwxyz"][: 61 - len(NAMES)]


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 61 tokens: texts of a and b, parts of a character, spaces and line feeds."""
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(NAMES)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_piece(*steps, added=()) -> PreTrainedTokenizerFast:
    """A tokenizer with the decoder of Llama 2 (`steps` strip a space) or of Gemma (none)."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "▁▁", "ab", "▁b", "é", "a▁"]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[], unk_token="<unk>",
                                     byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps])
    tokenizer.add_special_tokens(["<s>", *added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def in_metaspace() -> PreTrainedTokenizerFast:
    names = ["▁", "▁a", "a", "b", "▁▁b"]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def first_stop(strings, texts: TokenTexts, tokens) -> int | None:
    """The number of tokens after which the text first contains a string, by the definition."""
    for number in range(1, len(tokens) + 1):
        if any(string.encode() in texts.joined(tokens[:number]) for string in strings):
            return number
    return None


def found_at(stops: StopStrings, tokens) -> int | None:
    return next((number for number in range(1, len(tokens) + 1) if stops.ends(np.array(tokens[:number]))), None)


def walked(stops: StopStrings, tokens) -> int | None:
    """As `found_at`, by one look-up a token, as on a device."""
    state = stops.state(np.array([], np.int64))
    for number, token in enumerate(tokens, start=1):
        state = int(stops.table[state, stops.classes[token]])
        if state == FOUND:
            return number
    return None


ALPHABETS = {"two letters": [b"a", b"b"], "bytes": [b"\xc3", b"\xa9", b"\xe2", b"a"],
             "blocks": [b"a", b"ab", b"ba", b"", b"aab"]}
STRINGS = [["aab"], ["ab", "aba", "b b"], ["é"], ["aé", "é"], ["abab", "ba"], ["aaaa", "aab"], ["a"], ["bab", "abba", "aabab"]]


@pytest.mark.parametrize("strings", STRINGS, ids=str)
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_the_table_finds_every_string_at_its_first_token(alphabet, strings):
    """All short texts, and long random texts of random tokens."""
    stream, parts = np.random.default_rng(1), ALPHABETS[alphabet]
    joined = (stream.integers(len(parts), size=stream.integers(1, 5)) for _ in range(12))
    pieces = (*parts, *(b"".join(parts[number] for number in numbers) for numbers in joined))
    texts = TokenTexts(pieces, {})
    stops = StopStrings(strings, texts)
    short = itertools.product(range(len(parts)), repeat={2: 6, 4: 4, 5: 3}[len(parts)])
    for tokens in itertools.chain(short, (stream.integers(len(pieces), size=25).tolist() for _ in range(20))):
        expected = first_stop(strings, texts, tokens)
        assert walked(stops, tokens) == found_at(stops, tokens[: expected or len(tokens)]) == expected


def test_the_state_after_an_end_is_that_of_the_last_bytes():
    """A text of one byte a token: reading the last tokens alone gives the state of reading all."""
    texts = TokenTexts((b"a", b"b", b""), {})
    stops, stream = StopStrings(["aabab", "bbb"], texts), np.random.default_rng(2)
    for _ in range(200):
        tokens = stream.integers(3, size=30).tolist()
        end = first_stop(stops.strings, texts, tokens)
        state = 0
        for number, token in enumerate(tokens[: end or 30], start=1):
            state = int(stops.table[state, stops.classes[token]])
            assert state == stops.state(np.array(tokens[:number]))


def test_the_table_is_small_at_a_large_vocabulary():
    """Most tokens lead to nothing from every state, so that they are one class."""
    stream = np.random.default_rng(3)
    pieces = tuple(bytes(stream.integers(97, 123, size=stream.integers(1, 9)).tolist()) for _ in range(20000))
    stops = StopStrings(["\nQuestion:", "\n\nProblem:"], TokenTexts(pieces, {}))
    assert stops.table.shape[1] < 40
    assert len(stops.table) == 2 + 9 + 10


@pytest.mark.parametrize("strings", [[*("a" * (113 + number) + "b" for number in range(15)), "a" * 127 + "c"],
                                     ["ab" * 64, "ba" * 64, "aab" * 42]], ids=["runs", "repeats"])
def test_the_longest_strings_that_overlap_have_a_small_table(strings):
    """No more states than bytes, whatever the strings share, with tokens of up to 64 such bytes."""
    stops = StopStrings(strings, TokenTexts((*(b"a" * length for length in range(1, 65)), b"b", b"c"), {}))
    assert len(stops.table) <= 1 + sum(map(len, strings))
    token_of = {"a": 0, "b": 64, "c": 65}
    for string in strings:
        assert walked(stops, [token_of[character] for character in string]) == len(string)


TOKENIZERS = {"byte-level": byte_level, "like Llama 2": lambda: sentence_piece(decoders.Strip(" ", 1, 0)),
              "like Gemma": sentence_piece, "metaspace": in_metaspace,
              "embedded": lambda: AutoTokenizer.from_pretrained(dflash_mcmc.component("model", "tiny").path)}


def behind(tokenizer, tokens: list[int]) -> str:
    """What tokens add to the text of another token, which has no space."""
    before = [tokenizer.convert_tokens_to_ids("a")]
    return tokenizer.decode([*before, *tokens], skip_special_tokens=True)[len(tokenizer.decode(before)):]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_tokens_are_the_tokenizers_text(name):
    tokenizer, stream = TOKENIZERS[name](), np.random.default_rng(4)
    texts = texts_of(tokenizer, len(tokenizer) + 7)
    assert len(texts.pieces) == len(tokenizer) + 7
    # A decoder of SentencePiece replaces each byte of a broken character, and bytes do not know this.
    known = [token for token in range(len(tokenizer)) if name in ("byte-level", "embedded") or texts.pieces[token].isascii()]
    for _ in range(120):
        tokens = stream.choice(known, stream.integers(1, 12)).tolist()
        assert texts.joined(tokens).decode(errors="replace") == behind(tokenizer, tokens) == continuation(tokenizer, tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_string_of_a_decoded_text_is_found(name):
    """The definition with the tokenizer's own text, for stops with leading spaces, at the start of a text too."""
    tokenizer, stream = TOKENIZERS[name](), np.random.default_rng(5)
    texts, strings = texts_of(tokenizer, len(tokenizer)), [" a", "ab", "b ", "  b"]
    stops = StopStrings(strings, texts)
    known = [token for token in range(len(tokenizer)) if set(texts.pieces[token]) <= set(b" ab\n")]
    found = 0
    for _ in range(120):
        tokens = stream.choice(known, 8).tolist()
        first = next((number for number in range(1, 9) if any(
            string in behind(tokenizer, tokens[:number]) for string in strings)), None)
        assert walked(stops, tokens) == first
        found += first is not None
    assert found > 40


def test_a_character_of_byte_tokens_is_found():
    tokenizer = sentence_piece(decoders.Strip(" ", 1, 0))
    stops = StopStrings(["é", "\n"], texts_of(tokenizer, len(tokenizer)))
    first, second, line = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>", "<0x0A>"])
    found = [stops.ends(np.array(tokens)) for tokens in ([first], [second], [first, second], [line])]
    assert found == [False, False, True, True]


def test_a_special_token_is_found_by_its_text_and_adds_none():
    tokenizer = sentence_piece(added=["<end>"])
    stops = StopStrings(["<end>", "ab"], texts_of(tokenizer, len(tokenizer)))
    end, start, a, b = tokenizer.convert_tokens_to_ids(["<end>", "<s>", "a", "b"])
    assert [stops.ends(np.array(tokens)) for tokens in ([b, end], [a, start], [a, start, b])] == [True, False, True]


def test_a_tokenizer_of_another_kind_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    with pytest.raises(UserError, match=r"dataset\.stop: needs a tokenizer whose text is that of its tokens"):
        texts_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 3)


def test_an_added_token_that_is_not_special_is_text():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("a  b", normalized=False)])
    texts = texts_of(tokenizer, len(tokenizer))
    assert texts.pieces[-2:] == (b"<think>", b"a  b")


def test_the_text_ends_before_the_first_string():
    assert [cut(text, ["b", "ab"]) for text in ("cab", "cb", "ccc", "b")] == ["c", "c", "ccc", ""]


@pytest.fixture(scope="module")
def parts():
    """A random model of 61 tokens whose texts are those of `byte_level`."""
    model = random_model("qwen3")
    return model, LanguageModel(model, byte_level(), stop_ids=(3, 7)).stopping_at(STOP)


@pytest.fixture(scope="module")
def reference(parts):
    return RememberingReference(*parts, NoBlend())


def run(parts, sampler, slots=8, decoder=None, draft=None, mixed=False, **options):
    model, stopping = parts
    made = None if draft is None else drafter(draft, stopping, model)
    engine = BatchedEngine(stopping, NoBlend(), slots, max(map(len, PROMPTS)) + HORIZON, Options(**options), None,
                           None if decoder is None else decoder.speculation(made), made if mixed else None)
    return {done.tag: done.result for done in engine.run(list(chains(sampler)))}


def agree(found, sampler, reference):
    """Compares one chain for each prompt. Returns why they ended."""
    reasons = set()
    for tag, chain in itertools.islice(chains(sampler), len(PROMPTS)):
        same(found[tag], reference.run(chain))
        drawn = found[tag].trajectory
        reasons.add("length" if not drawn.ended else "id" if drawn.tokens[-1] in reference.parts.stop_ids else "string")
    return reasons


@pytest.mark.parametrize("name", quick(SAMPLERS, "power_mh_early"))
def test_batched_is_reference(parts, reference, name):
    assert "string" in agree(run(parts, SAMPLERS[name]), SAMPLERS[name], reference)


SWITCHES = [{"slots": 3}, {"skip_identical": False}, {"steps_between_checks": 3}]


@pytest.fixture(scope="module")
def plain(parts):
    """Results with the default options, drawn once: plain("isir")."""
    return functools.cache(lambda name: run(parts, SAMPLERS[name]))


@pytest.mark.parametrize(("name", "options"), quick([
    *itertools.product(("temperature", "isir"), [{"slots": 3, "steps_between_checks": 3}]),
    *itertools.product(("power_mh", "lookahead"), SWITCHES)], "temperature"), ids=str)
def test_slots_and_switches_change_nothing(parts, plain, name, options):
    """With stops that end some draws between two checks, and in rows that share forwards."""
    tolerance = 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE
    other = run(parts, SAMPLERS[name], **options)
    for tag, result in plain(name).items():
        same(other[tag], result, tolerance)


@pytest.mark.parametrize(("draft", "name", "decoder"), quick([
    (draft, *way) for draft in ("dflash", "self", "ngram") for way in (("temperature", match()), ("power_mh_early", match()), (
        "greedy", reject()), ("greedy", reject(verification="block")))],
    ("dflash", "temperature", match()), ("self", "greedy", reject(verification="block"))))
def test_drafted_tokens_after_a_stop_are_dropped(parts, plain, name, decoder, draft):
    speculative = run(parts, SAMPLERS[name], decoder=decoder, draft=draft)
    for tag, result in plain(name).items():
        same(speculative[tag], result)


@pytest.mark.slow
@pytest.mark.parametrize("proposal", ["draft", "mixture"])
def test_blocks_of_the_draft_end_at_strings(parts, proposal):
    sampler = DraftMH(alpha=2.0, draft_temperature=0.8, num_blocks=3, num_steps=2, proposal=proposal,
                      draft_weight=0.5, proposal_temperature=None)
    engine = RememberingReference(*parts, NoBlend(), drafter("dflash", parts[1], parts[0]))
    assert "string" in agree(run(parts, sampler, draft="dflash", mixed=True), sampler, engine)


SETS = (None, ("b",), (), ("abba", "é"), ("\naab", " b", "a"))
"""Strings of a chain; None for those of the engine."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "decoder"), [("power_mh_early", None), ("temperature", match())])
def test_chains_with_strings_of_their_own_share_a_batch(parts, reference, name, decoder):
    """Each is as in an engine with its strings alone, to the last bit, and as in the reference engine."""
    sampler, tolerance = SAMPLERS[name], 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE
    made = None if decoder is None else decoder.speculation(drafter("dflash", parts[1], parts[0]))
    engine = BatchedEngine(parts[1], NoBlend(), 8, max(map(len, PROMPTS)) + HORIZON, Options(), None, made)
    every = [(tag, chain, SETS[tag % len(SETS)]) for tag, chain in chains(sampler)]
    found = {done.tag: done.result for done in engine.run(
        (tag, chain if stop is None else stopping(chain, stop)) for tag, chain, stop in every)}
    ended = set()
    for stop in SETS:
        alone = run((parts[0], parts[1] if stop is None else parts[1].stopping_at(stop)), sampler, decoder=decoder,
                    draft=None if decoder is None else "dflash")
        for tag in [tag for tag, _, of in every if of == stop]:
            same(found[tag], alone[tag], tolerance)
            drawn = found[tag].trajectory
            ended |= {stop} if drawn.ended and drawn.tokens[-1] not in parts[1].stop_ids else set()
    assert len(ended) >= 3
    assert () not in ended
    if decoder is None:
        for tag, chain in itertools.islice(chains(sampler), 2):
            same(found[tag], reference.run(chain if SETS[tag] is None else stopping(chain, SETS[tag])))


def test_the_joined_table_is_that_of_each_set():
    """Rows of several sets, and a row without strings, that walk the same tokens; a set is added in between."""
    stream, texts = np.random.default_rng(4), TokenTexts((b"a", b"b", b"ab", b"ba", b""), {})
    sets = [StopStrings(strings, texts) for strings in (["aab"], ["bab", "abba"], ["aaaa", "bb"])]
    endings = Endings((), None, torch.device("cpu"), lambda stop: StopStrings(stop, texts))

    def begun(strings: StopStrings | None, tokens=()) -> int:
        stop = () if strings is None else strings.strings
        draw = Draw(Trajectory.start(np.array([1])), 9, SamplingParams(), Key(0), stop=stop)
        return endings.begin(draw, np.array(tokens, np.int64))

    states = torch.tensor([begun(strings) for strings in (None, *sets[:2])])
    tokens = stream.integers(len(texts.pieces), size=(60, 30))
    for row in tokens:
        state, drawn = states.clone(), list[int]()
        for token in row.tolist():
            state, drawn = endings.after(state, torch.full_like(state, token)), [*drawn, token]
            for found, strings in zip(state.tolist(), (None, *sets), strict=False):
                end = None if strings is None else found_at(strings, drawn)
                assert (found == FOUND) == (end is not None)
                assert end is not None or found == begun(strings, drawn)
        if len(states) < 4:
            states = torch.cat([states, torch.tensor([begun(sets[2])])])


def test_the_text_of_an_answer_ends_before_a_string_and_its_tokens_do_not(parts):
    found = [result.trajectory for result in run(parts, SAMPLERS["temperature"]).values()]
    stopped = [path for path in found if path.ended and path.tokens[-1] not in parts[1].stop_ids]
    assert stopped
    for path in stopped:
        whole = parts[1].tokenizer.decode(path.tokens.tolist(), skip_special_tokens=True)
        assert whole.startswith(parts[1].decode(path.tokens))
        assert any(string in whole for string in STOP)
        assert not any(string in parts[1].decode(path.tokens) for string in STOP)
