import pickle

import pytest

from stoker.errors import ConfigError
from stoker.policy import S3FIFO, Region, Substitution


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": ""}, "name=''"),
        ({"share": 0.0}, "share=0.0"),
        ({"share": 1.1}, "share=1.1"),
        ({"share": float("nan")}, "share=nan"),
        ({"order": "age"}, "order='age'"),
        ({"admission": "maybe"}, "admission='maybe'"),
        ({"pop": "push"}, "pop='push'"),
        ({"visits": 4}, "visits=4"),
        ({"visits": -1}, "visits=-1"),
        ({"pop": "promote"}, "promote_to=None"),
        ({"promote_to": "main"}, "promote_to='main'"),
        ({"ghost": "ghost"}, "ghost='ghost'"),
        ({"pop": "sieve", "order": "recency"}, "order='recency'"),
        ({"holds_bytes": False}, "holds_bytes=False"),
        ({"admission": "beats_victims", "strict": False}, "admission='beats_victims'"),
        ({"admission": "beats_victims", "pop": "random"}, "admission='beats_victims'"),
    ],
)
def test_refuses_rules_without_a_meaning(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Region(**({"name": "main", "share": 1.0} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"small": 0.0}, {"small": 1.0}, {"visits": 0}, {"ghost": 2.0}])
def test_s3fifo_refuses_bad_parameters(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields)) + "|share"):
        S3FIFO(**fields)  # type: ignore[arg-type]


def test_a_region_is_a_value() -> None:
    region = Region("main", 0.5, order="recency")
    assert pickle.loads(pickle.dumps(region)) == region
    assert hash(region) == hash(Region("main", 0.5, order="recency"))


def test_unknown_kinds_and_no_region_are_refused():
    with pytest.raises(ConfigError, match="kind='other'"):
        Substitution("other", "L")
    with pytest.raises(ConfigError, match="region=''"):
        Substitution("any", "")
    for kind, by in (("low_by_low", "H"), ("low_by_high", None), ("low_by_high", "")):
        with pytest.raises(ConfigError, match=f"by={by!r} is not valid with kind='{kind}'"):
            Substitution(kind, "L", by)
