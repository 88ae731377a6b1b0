"""Bytes of weights: the published total, and what the ranks hold of it."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_kimi_k3.plan.parallel import Layout
from vllm_kimi_k3.plan.release import TEXT, VISION
from vllm_kimi_k3.plan.weights import KINDS, rank_bytes, stored_bytes

PUBLISHED = 1_560_860_324_864
LAYOUTS = [Layout(8), Layout(16), Layout(8, pp=2), Layout(8, dp=2, ep=True), Layout(4, pp=4)]


def test_the_sizes_add_up_to_the_published_total_to_the_byte() -> None:
    assert stored_bytes(TEXT, VISION) == PUBLISHED


def test_the_total_is_that_of_the_published_index(shared: Path) -> None:
    with gzip.open(shared / "data" / "checkpoint" / "model.safetensors.index.json.gz") as file:
        assert json.load(file)["metadata"]["total_size"] == PUBLISHED


def test_the_sizes_are_those_of_the_published_config(shared: Path) -> None:
    config = json.loads((shared / "data" / "checkpoint" / "config.json").read_text())
    text = config["text_config"]
    for name, value in vars(TEXT).items():
        published = text[name]
        if isinstance(value, dict):
            published = {key: published[key] for key in value}
        assert value == published, name
    for name, value in VISION.items():
        assert value == (
            tuple(value) and tuple(config["vision_config"][name])
            if isinstance(value, tuple)
            else config["vision_config"][name]
        )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_together_hold_every_expert_once(layout: Layout) -> None:
    whole = rank_bytes(TEXT, VISION, Layout().share(range(93)))["experts"]
    ranks = layout.tp * layout.dp if layout.ep else layout.tp
    held = [rank_bytes(TEXT, VISION, layout.share(stage))["experts"] for stage in layout.stages(93)]
    assert sum(held) * ranks == whole


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_kind_is_counted_on_every_stage_that_has_it(layout: Layout) -> None:
    first = rank_bytes(TEXT, VISION, layout.share(layout.stages(93)[0]))
    assert set(first) == set(KINDS)
    assert all(first[kind] > 0 for kind in KINDS)
    last = rank_bytes(TEXT, VISION, layout.share(layout.stages(93)[-1]))
    assert (last["dense MLP"] > 0) is (layout.pp == 1)


def test_without_the_vision_tower_its_bytes_are_gone() -> None:
    share = Layout(8).share(range(93))
    with_it, without = rank_bytes(TEXT, VISION, share), rank_bytes(TEXT, None, share)
    assert with_it["vision"] > 800 << 20
    assert with_it | {"vision": 0} == without


def test_a_size_that_does_not_divide_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="tensor-parallel size 7 does not divide"):
        rank_bytes(TEXT, None, Layout(7).share(range(93)))


@pytest.mark.parametrize(
    ("pp", "sizes"),
    [(1, [93]), (2, [47, 46]), (3, [31, 31, 31]), (4, [23, 23, 24, 23]), (8, [11, 11, 12, 12, 12, 12, 12, 11])],
)
def test_stages_are_cut_as_vllm_cuts_them(pp: int, sizes: list[int]) -> None:
    from vllm.distributed.utils import get_pp_indices

    stages = Layout(pp=pp).stages(93)
    assert [len(stage) for stage in stages] == sizes
    assert [(stage.start, stage.stop) for stage in stages] == [get_pp_indices(93, rank, pp) for rank in range(pp)]


def test_a_miniature_is_planned_from_its_own_config() -> None:
    text = SimpleNamespace(**vars(TEXT) | {"num_hidden_layers": 5, "linear_attn_config": TEXT.linear_attn_config})
    assert (
        rank_bytes(text, None, Layout().share(range(5)))["experts"] * 92
        == 4 * rank_bytes(TEXT, None, Layout().share(range(93)))["experts"]
    )
