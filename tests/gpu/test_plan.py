"""``plan`` against the engine on one GPU, for one rank's slice of every kind of K3's layers at its true sizes."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.driver import Engine
from tests.e2e.slices import assert_cache_as_planned, cache_of, slice_plan, slice_settings, write_slice

#: Eight layers have two of MLA and six of KDA; the first has a dense MLP, the others all 896 experts: 15 GiB at TP8.
LAYERS, EXPERTS, POOL = 8, 896, 4 << 30
#: Greatest difference of a figure, as a share.
WITHIN = 0.01


@pytest.fixture(scope="module", params=[8, 16], ids=["tp8", "tp16"])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def engine(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    directory = write_slice(tmp_path_factory.mktemp("slice"), ranks, LAYERS, EXPERTS)
    settings = slice_settings() | {"kv_cache_memory_bytes": POOL, "gpu_memory_utilization": 0.4}
    engine = Engine(directory, **settings)
    yield engine
    engine.close()


def test_block_pages_padding_and_state_are_the_engines(engine: Engine, ranks: int) -> None:
    assert_cache_as_planned(engine, slice_plan(ranks, LAYERS, EXPERTS, POOL), WITHIN)


def test_blocks_of_k3_itself(engine: Engine, ranks: int) -> None:
    """What the documentation says of K3: a slice's pages are those of the whole model's ranks."""
    cache = cache_of(engine)
    assert (cache["block"], round(100 * cache["padding"], 2)) == ({8: 768, 16: 384}[ranks], 8.68)


def test_weight_bytes_are_the_engines(engine: Engine, ranks: int) -> None:
    planned = slice_plan(ranks, LAYERS, EXPERTS, POOL).tightest.parts
    [held] = engine.llm.apply_model(held_bytes)
    expected = {
        "all": sum(size for kind, size in planned.items() if kind.startswith("weights: ")),
        "experts": planned["weights: experts"],
    }
    print(json.dumps({"held": held, "planned": expected}))
    for kind, size in expected.items():
        assert held[kind] == pytest.approx(size, rel=WITHIN), kind


def held_bytes(model: Any) -> dict[str, int]:
    """Bytes of a model's weights on its GPU; runs in the worker. Experts that were repacked are no parameters."""
    parameters = dict(model.named_parameters())
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in parameters.items()}
    packed = [module.marlin for module in model.modules() if getattr(module, "marlin", None) is not None]
    repacked = [getattr(part, name) for part in packed for name in ("w13", "w13_scale", "w2", "w2_scale")]
    beside = sum(tensor.numel() * tensor.element_size() for tensor in repacked)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return {"all": sum(sizes.values()) + beside, "experts": experts + beside}
