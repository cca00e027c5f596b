"""What was in progress when processes died is named, and what was given up is not."""

import pytest

from dflash_mcmc.store.folder import Attempts, RunStore

KEY, OTHER = ("a", 0), ("b", 1)


@pytest.fixture
def die(tmp_path):
    """Begins samples and ends without a word."""
    def begin(*keys):
        with RunStore.open(tmp_path) as store:
            attempts = Attempts(store)
            for key in keys:
                attempts.note(key, begun=True)

    return begin


def suspects(folder, *pending) -> str | None:
    with RunStore.open(folder) as store:
        return Attempts(store).suspects(pending)


def test_what_was_in_progress_at_two_deaths_is_named_the_most_deaths_first(tmp_path, die):
    die(KEY, OTHER)
    assert suspects(tmp_path, KEY, OTHER) is None
    die(KEY)
    assert suspects(tmp_path, KEY, OTHER).startswith("begun and never finished: problem a, chain 0 (2 times); if one")
    for _ in range(2):
        die(OTHER, *[("c", chain) for chain in range(4)])
    assert suspects(tmp_path, KEY, OTHER, *[("c", chain) for chain in range(4)]).startswith(
        "begun and never finished: problem b, chain 1 (3 times), problem a, chain 0 (2 times), problem c, chain 0 (2 times) "
        "and 3 more; if one")
    assert suspects(tmp_path, ("d", 0)) is None


def test_what_is_given_up_is_no_death(tmp_path, die):
    for _ in range(5):
        die(KEY)
        with RunStore.open(tmp_path) as store:
            Attempts(store).note(KEY, begun=False)
    assert suspects(tmp_path, KEY) is None


def test_a_torn_line_is_none_and_the_next_one_is_whole(tmp_path, die):
    die(KEY)
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('["b", 1, tr')
    die(KEY)
    assert "problem a, chain 0 (2 times)" in suspects(tmp_path, KEY)
    assert (tmp_path / "attempts.jsonl").read_text().count("\n") == 2


def test_when_a_run_is_complete_the_files_go(tmp_path, die):
    die(KEY)
    with RunStore.open(tmp_path) as store:
        Attempts(store).close(complete=False)
        assert len(list(tmp_path.glob("attempts*"))) == 1
        Attempts(store).close(complete=True)
    assert not list(tmp_path.glob("attempts*"))
