import pytest

from stoker.errors import ConfigError
from stoker.policy import Homophily, Substitution


def test_unknown_kinds_and_no_region_are_refused():
    with pytest.raises(ConfigError, match="kind='other'"):
        Substitution("other", "L")
    with pytest.raises(ConfigError, match="region=''"):
        Substitution("any", "")


@pytest.mark.parametrize("wrong", [{"importance": 1.0}, {"transit": 0.0}])
def test_homophily_refuses_shares_out_of_range(wrong):
    with pytest.raises(ConfigError, match="out of range"):
        Homophily(**wrong)


def test_homophily_has_room_for_all_three():
    shares = {region.name: region.share for region in Homophily(0.8, transit=0.1).regions()}
    assert shares == pytest.approx({"importance": 0.72, "homophily": 0.18, "transit": 0.1})
