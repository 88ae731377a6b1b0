"""Attention over paged latent rows in plain torch."""

import torch
import torch.nn.functional as F


def latent_attention_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    rank: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Each query attends to the rows of its sequence up to its own position, in fp32.

    Args:
        query: [T, H, rank + rope]: the query in latent space, then its shared-key part.
        cache: [blocks, block_size, rank + rope]: rows of normalised latent and shared key.
        block_table: [N, max_blocks] int, block ids of each sequence.
        starts: [N + 1] int, offsets of the sequences in T; tokens from the last one on are padding.
        lengths: [N] int, lengths of the sequences, the T tokens included; a sequence's tokens are its last ones.
        longest: at least as many tokens as any sequence has in T.
        rank: width of the latent; the values are that part of a row.
        scale: of the scores.
        out: [T, H, rank], contiguous, written; zeros for padding.
    """
    block_size = cache.shape[1]
    out.zero_()
    bounds = starts.tolist()
    for index, length in enumerate(lengths.tolist()):
        tokens = slice(bounds[index], bounds[index + 1])
        count = tokens.stop - tokens.start
        if count == 0:
            continue
        blocks = block_table[index, : -(-length // block_size)].long()
        rows = cache[blocks].flatten(0, 1)[:length].float()
        mask = None
        if count > 1:
            position = torch.arange(length - count, length, device=rows.device)
            mask = torch.arange(length, device=rows.device) <= position.unsqueeze(-1)
        mixed = F.scaled_dot_product_attention(
            query[tokens].float().transpose(0, 1),
            rows.unsqueeze(0).expand(query.shape[1], -1, -1),
            rows[:, :rank].unsqueeze(0).expand(query.shape[1], -1, -1),
            attn_mask=mask,
            scale=scale,
        )
        out[tokens] = mixed.transpose(0, 1).to(out.dtype)


def store_rows_reference(
    latent: torch.Tensor, shared_key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write rows to the paged cache.

    Args:
        latent: [T, rank].
        shared_key: [T, rope].
        cache: [blocks, block_size, rank + rope], written in place.
        slots: [T] int, block * block_size + row of every token; negative for padding, which is not written.
    """
    real = slots >= 0
    place = slots[real].long()
    rows = torch.cat([latent, shared_key], dim=-1)[real]
    cache[place // cache.shape[1], place % cache.shape[1]] = rows.to(cache.dtype)
