"""Which layers share a block table."""

import dataclasses

import pytest

from benchmarks.geometry import specs
from vllm_kimi_k3.cache.grouping import group_size, groups_of


def padding(groups: list[list[str]]) -> float:
    """Empty pages, as a part of all."""
    pages = len(groups) * max(len(group) for group in groups)
    return 1 - sum(len(group) for group in groups) / pages


@pytest.mark.parametrize(
    ("drafts", "count"),
    [(0, 4), (5, 10), (1, 7), (8, 3)],
    ids=["K3", "5-layer draft", "1-layer draft", "8-layer draft"],
)
def test_few_pages_stay_empty(drafts: int, count: int) -> None:
    layers = specs(drafts=drafts)
    groups = groups_of(layers)
    names = [name for group in groups for name in group.layer_names]
    assert sorted(names) == sorted(layers)
    assert all(layers[name] == group.kv_cache_spec for group in groups for name in group.layer_names)
    assert padding([group.layer_names for group in groups]) <= 0.05
    assert len(groups) == count


def test_groups_of_one_kind_differ_by_one_layer_at_most() -> None:
    sizes = [len(group.layer_names) for group in groups_of(specs(drafts=5))]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("counts", [[1, 1], [3, 6], [24, 69], [29, 69], [7, 11, 13], [1, 500]])
def test_group_size_keeps_within_the_tolerance(counts: list[int]) -> None:
    size = group_size(counts)
    groups = sum(-(-count // size) for count in counts)
    assert 1 - sum(counts) / (groups * size) <= 0.05


def test_pages_that_differ_are_refused() -> None:
    layers = specs()
    name = next(iter(layers))
    layers[name] = dataclasses.replace(layers[name], page_size_padded=1 << 20)
    with pytest.raises(ValueError, match="884736, 1048576"):
        groups_of(layers)
