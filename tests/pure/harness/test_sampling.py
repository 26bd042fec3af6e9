"""A sample leaves out combinations, and nothing else."""

import itertools

import pytest

from sampling import covering, mark_unsampled

SIZES = [(4,), (2, 3), (2, 2, 5), (3, 3, 2, 4)]


def product(sizes: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(enumerate(values)) for values in itertools.product(*map(range, sizes))]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("strength", [1, 2])
def test_everything_occurs(sizes, strength):
    points = product(sizes)
    taken = covering(points, strength, seed="a")
    shown = {c for at in taken for c in itertools.combinations(points[at], strength)}
    assert shown == {c for point in points for c in itertools.combinations(point, strength)}


def test_few_are_taken():
    assert len(covering(product((4, 4, 4)), seed="a")) <= 24
    assert len(covering(product((4, 4, 4)), 1, seed="a")) == 4


def test_a_seed_is_a_sample():
    points = product((3, 3, 3))
    samples = [covering(points, seed=seed) for seed in "aab"]
    assert samples[0] == samples[1] != samples[2]


MARKED = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_marked(a, b, c):
    pass

@pytest.mark.parametrize("a", range(3))
def test_unmarked(a):
    pass

@pytest.mark.sampled
def test_without_parameters():
    pass

@pytest.mark.parametrize("a", range(6))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_on_ranks(a, world_size):
    pass

@pytest.mark.unsampled
@pytest.mark.parametrize("a", range(6))
@pytest.mark.parametrize("world_size", [2, 4])
def test_all(a, world_size):
    pass

@pytest.mark.parametrize(("a", "world_size"), [("x", 2), ("x", 4), ("y", 4), ("z", 4)])
def test_listed(a, world_size):
    pass
"""


class Seen:
    """Takes samples of what is collected, and remembers what is left."""

    names: list[str]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_unsampled(items)
        self.names = [item.name for item in items if item.get_closest_marker("soak") is None]


def test_what_is_left_out_is_the_soaks(tmp_path):
    file = tmp_path / "test_marked.py"
    file.write_text(MARKED)
    seen = Seen()
    settings = tmp_path / "empty.ini"
    settings.write_text("[pytest]\n")
    pytest.main(["-c", str(settings), "--collect-only", "-qq", str(file)], plugins=[seen])
    names = [name for name in seen.names if name.startswith("test_marked")]
    assert 9 <= len(names) <= 13
    names = [name for name in seen.names if name.startswith("test_on_ranks")]
    assert [len([n for n in names if f"[{size}-" in n]) for size in (1, 2, 4)] == [2, 6, 2]
    for test, num in (("test_all", 12), ("test_listed", 4)):
        assert sum(name.startswith(test) for name in seen.names) == num
    names = [f"test_unmarked[{a}]" for a in range(3)]
    assert {*names, "test_without_parameters"} <= set(seen.names)


def test_who_names_one_gets_it():
    assert covering([(("a", 2), ("b", 1), ("c", 2))], seed="a") == {0}
