import pickle

from stoker.importance.baselines import InBatchRank, LossHistory
from stoker.recipes.base import Same, part
from stoker.sampler import SelectiveSampler


def test_a_part_is_made_of_its_parameters_and_what_the_loader_knows():
    made = part(SelectiveSampler, beta=0.5)(100, seed=3, pad_to=2)
    assert made == SelectiveSampler(100, seed=3, pad_to=2, beta=0.5)


def test_equal_parts_are_equal_values():
    one, other = part(SelectiveSampler, beta=0.5), part(SelectiveSampler, beta=0.5)
    assert one == other == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(other)
    assert one != part(SelectiveSampler, beta=0.4)
    assert Same(InBatchRank(5)) == pickle.loads(pickle.dumps(Same(InBatchRank(5))))


def test_the_same_for_every_job():
    value = LossHistory()
    assert Same(value)(10) is Same(value)(20, seed=4) is value
