"""A draft that keeps its context rows in pages, as a server's; the fast form of :mod:`.blocks`.

The keys of a context row depend on the row alone, so they are made once, for all layers by one product, and kept. A
block's own rows go into the pages behind the context's, where the rows of the tokens that come true overwrite them.
Shapes: B sequences, T tokens of a batch, N slots a block, H hidden size, L layers.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kimi_k3.reference import rms_norm


def page_slots(block_table: Tensor, positions: Tensor, size: int) -> Tensor:
    """Where tokens lie in the pages, int64 as ``positions`` [B, N]: page id * ``size`` + row."""
    pages: Tensor = block_table.long().gather(1, positions // size)
    return pages * size + positions % size


class PagedDraft:
    """What both layouts share; subclasses have the keys and the attention.

    Args:
        layers: L.
        eps: of the norms.
        mask: the mask token.
        weights: published name to tensor; taken out of the dict as they are fused.
        embeddings: [vocabulary, H].
        head: [vocabulary, H].
        dtype: of weights and activations.
    """

    #: names of the context's projection and norm, and of the norm after the last layer
    names: ClassVar[tuple[str, str, str]]

    def __init__(
        self,
        layers: int,
        eps: float,
        mask: int,
        weights: Mapping[str, Tensor],
        embeddings: Tensor,
        head: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.layers, self.eps, self.mask = layers, eps, mask
        self.weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.embeddings, self.head = embeddings.to(dtype), head.to(dtype)
        self.gate_up = [
            torch.cat([self.weights.pop(f"layers.{i}.mlp.{part}_proj.weight") for part in ("gate", "up")])
            for i in range(layers)
        ]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a token's row in a layer's pages."""
        raise NotImplementedError

    def context(self, taps: Sequence[Tensor]) -> Tensor:
        """Context rows [T, H] from the tapped streams of the target, [T, H] each."""
        joined = torch.cat([tap.to(self.head.dtype) for tap in taps], dim=-1)
        return self._norm(self.names[1], self._linear(self.names[0], joined))

    def store(self, context: Tensor, positions: Tensor, slots: Tensor, caches: Sequence[Tensor]) -> None:
        """Write the rows of context into every layer's pages.

        Args:
            context: [T, H].
            positions: [T] int64.
            slots: [T] int64, page id * page size + row; negative for tokens that are not written.
            caches: of each layer, [pages, page size, *row_shape].
        """
        raise NotImplementedError

    def blocks(
        self, anchors: Tensor, positions: Tensor, width: int, caches: Sequence[Tensor], block_table: Tensor
    ) -> Tensor:
        """Hidden states [B, N, H] of one block a sequence, after the final norm.

        Args:
            anchors: token ids, int64 [B].
            positions: of the anchors, int64 [B]; the context before them is stored.
            width: N.
            caches: as for :meth:`store`, with room for the blocks.
            block_table: [B, max_blocks] int.
        """
        ids = anchors.new_full((len(anchors), width), self.mask)
        ids[:, 0] = anchors
        places = positions.unsqueeze(1) + torch.arange(width, device=ids.device)
        slots = page_slots(block_table, places, caches[0].shape[1]).flatten()
        x = self.embeddings[ids].flatten(0, 1)
        for i in range(self.layers):
            normed = self._norm(f"layers.{i}.input_layernorm", x)
            x = x + self._attend(i, normed, places, slots, caches[i], block_table)
            gate, up = F.linear(self._norm(f"layers.{i}.post_attention_layernorm", x), self.gate_up[i]).chunk(2, dim=-1)
            x = x + self._linear(f"layers.{i}.mlp.down_proj", F.silu(gate) * up)
        return self._norm(self.names[2], x).unflatten(0, (len(anchors), width))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] before the Markov head, from ``hidden`` [..., H]."""
        return F.linear(hidden, self.head)

    def markov(self, previous: Tensor) -> Tensor:
        """Markov embeddings [..., R] of the token ids before each slot."""
        return F.embedding(previous, self.weights["markov_head.markov_w1.weight"])

    def bias(self, markov: Tensor) -> Tensor:
        """What Markov embeddings [..., R] add to the logits: [..., vocabulary]."""
        return self._linear("markov_head.markov_w2", markov)

    def confidence(self, hidden: Tensor, markov: Tensor) -> Tensor | None:
        """Log-odds, fp32 [...], that a slot's guess is accepted if those before it are; None without that head."""
        weight = self.weights.get("confidence_head.proj.weight")
        if weight is None:
            return None
        joined = torch.cat([hidden, markov], dim=-1).float()
        return F.linear(joined, weight.float(), self.weights["confidence_head.proj.bias"].float()).squeeze(-1)

    def _attend(
        self, layer: int, x: Tensor, places: Tensor, slots: Tensor, cache: Tensor, block_table: Tensor
    ) -> Tensor:
        """Attention of the slots [B*N, H], whose rows it stores first; ``places`` [B, N] are positions."""
        raise NotImplementedError

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.eps)
