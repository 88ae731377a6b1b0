"""The kernels of MLA over paged rows against their references."""

import pytest
import torch

from tests.ops.kernels import CLOSE, DEVICE
from vllm_kimi_k3.ops.latent_attention.reference import latent_attention_reference, store_rows_reference
from vllm_kimi_k3.ops.latent_attention.triton import latent_attention, store_rows


@pytest.mark.parametrize(("heads", "rank", "rope", "page"), [(1, 64, 16, 16), (3, 40, 12, 7), (12, 128, 64, 33)])
@pytest.mark.parametrize(
    ("new", "old"), [([1], [0]), ([1, 1, 0], [70, 3, 0]), ([37, 1, 9], [0, 64, 130]), ([1, 1], [900, 255])], ids=str
)
def test_attention(heads: int, rank: int, rope: int, page: int, new: list[int], old: list[int]) -> None:
    torch.manual_seed(0)
    lengths = [a + b for a, b in zip(new, old, strict=True)]
    most = max(-(-length // page) for length in lengths)
    blocks = torch.randperm(len(new) * most, device=DEVICE).view(len(new), most).int()
    # A page holds more than the rows; a query is a slice of a wider tensor; the last token is padding.
    cache = torch.randn(len(new) * most, page, rank + rope + 8, device=DEVICE)[..., : rank + rope]
    query = torch.randn(sum(new) + 1, heads, rank + rope + 4, device=DEVICE)[..., : rank + rope]
    starts = torch.tensor([sum(new[:i]) for i in range(len(new) + 1)], dtype=torch.int32, device=DEVICE)
    where = (blocks, starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), max(new), rank, 0.3)
    expected, out = torch.full((2, *query.shape[:2], rank), float("nan"), device=DEVICE)
    latent_attention_reference(query, cache, *where, expected)
    latent_attention(query, cache, *where, out)
    torch.testing.assert_close(out, expected, **CLOSE)


def test_rows_are_stored_where_the_slots_say() -> None:
    torch.manual_seed(0)
    rank, rope = 40, 12
    latent, key = torch.randn(5, rank, device=DEVICE), torch.randn(5, rank + rope, device=DEVICE)[:, rank:]
    cache = torch.randn(4, 6, rank + rope, device=DEVICE)
    expected = cache.clone()
    slots = torch.tensor([3, 23, -1, 6, 0], device=DEVICE)
    store_rows_reference(latent, key, expected, slots)
    store_rows(latent, key, cache, slots)
    torch.testing.assert_close(cache, expected)
    assert not torch.equal(cache[3, 5], torch.zeros_like(cache[3, 5]))
