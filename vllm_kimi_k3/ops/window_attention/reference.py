"""Attention over paged keys and values in plain torch."""

import torch
import torch.nn.functional as F


def window_attention_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Each query attends to the rows of its sequence from ``begins`` up to its own position, in fp32.

    Args:
        query: [T, Q, D], Q a multiple of K.
        cache: [blocks, block_size, 2, K, D]: rows of keys and values.
        block_table: [N, max_blocks] int, block ids of each sequence.
        starts: [N + 1] int, offsets of the sequences in T.
        begins: [N] int, the first row that a sequence's queries see.
        lengths: [N] int, lengths of the sequences, the T tokens included; a sequence's tokens are its last ones.
        scale: of the scores.

    Returns:
        [T, Q, D] in the query's dtype.
    """
    size, shared = cache.shape[1], query.shape[1] // cache.shape[3]
    out, bounds = torch.empty_like(query), starts.tolist()
    for index, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
        tokens = slice(bounds[index], bounds[index + 1])
        pages = block_table[index, begin // size : -(-length // size)].long()
        offset = begin // size * size
        rows = cache[pages].flatten(0, 1)[begin - offset : length - offset].float()
        keys, values = rows.repeat_interleave(shared, dim=2).unbind(1)
        own = torch.arange(length - tokens.stop + tokens.start, length, device=query.device)
        seen = torch.arange(begin, length, device=query.device) <= own.unsqueeze(-1)
        mixed = F.scaled_dot_product_attention(
            query[tokens].float().transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=seen,
            scale=scale,
        )
        out[tokens] = mixed.transpose(0, 1).to(out.dtype)
    return out
