"""Selection of problems by limit, id and shard, which is the same for every dataset."""

import pytest

from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.dataset import chosen
from tests.refusals import refused


def ids_of(dataset) -> list[str]:
    return [problem.id for problem in dataset.problems()]


def test_shards_divide_the_problems_without_overlap(make_config):
    every = ids_of(make_config().dataset)
    shards = [ids_of(make_config(f"dataset.shards=[{shard}]", "dataset.num_shards=7").dataset) for shard in range(7)]
    assert sorted(name for shard in shards for name in shard) == sorted(every)
    assert shards[2] == every[2::7]
    two = make_config("dataset.shards=[5,2]", "dataset.num_shards=7").dataset
    assert ids_of(two) == [name for name in every if name in shards[2] + shards[5]]
    assert two.num_chosen() == len(shards[2]) + len(shards[5])


def test_shards_equal_those_of_the_documents_code():
    """The document uses `range(shard, len(dataset), n_shards)`. Eight of 40 shards have 104 of 500 problems."""
    document = sorted(index for shard in range(8) for index in range(shard, 500, 40))
    assert chosen(range(500), None, range(8), 40) == document
    assert len(document) == 104
    assert chosen(range(500), 3, range(8), 40) == document[:3]


def test_the_selection_is_not_part_of_the_identity(make_config):
    every = make_config("sampler=greedy")
    for choice in (["dataset.ids=[arith-004]"], ["dataset.shards=[1]", "dataset.num_shards=2"], ["dataset.limit=9"]):
        one = make_config("sampler=greedy", *choice)
        assert identity_of(one) == identity_of(every)
        assert one.dataset.num_chosen() == len(ids_of(one.dataset)) < 300


@pytest.mark.parametrize(("choice", "message"), [
    (["dataset.ids=[arith-4]"], "dataset.ids: given 'arith-4'; allowed: ids of the 300 problems, such as 'arith-000'"),
    (["dataset.ids=[]"], "dataset.ids: given []; allowed: at least one, or null"),
    (["dataset.shards=[]", "dataset.num_shards=4"], "dataset.shards: given []"),
    (["dataset.shards=[1]"], "dataset.num_shards: given None; allowed: not null with dataset.shards"),
    (["dataset.num_shards=4"], "dataset.shards: given None; allowed: not null with dataset.num_shards"),
    (["dataset.shards=[0,4]", "dataset.num_shards=4"], "dataset.shards: given 4; allowed: 0 to 3 with dataset.num_shards=4"),
    (["dataset.shards=[-1]", "dataset.num_shards=4"], "dataset.shards: given -1; allowed: 0 to 3"),
    (["dataset.shards=[0]", "dataset.num_shards=0"], "dataset.num_shards: given 0; allowed: a whole number >= 1"),
    (["dataset.shards=[400]", "dataset.num_shards=500"], "dataset.shards: given [400]; allowed: shards with a problem"),
    (["dataset.shards=[0]", "dataset.num_shards=4", "dataset.ids=[x]"], "dataset.ids: given ['x']; allowed: null"),
    (["dataset.shards=[one]", "dataset.num_shards=4"], "dataset.shards"),
])
def test_bad_values_are_errors_of_one_line(make_config, choice, message):
    with refused(message):
        make_config(*choice).dataset.problems()
