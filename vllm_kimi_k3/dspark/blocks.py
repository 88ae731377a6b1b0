"""What the two published drafts have in common, in plain torch: context rows, blocks of slots, the two heads.

A *context row* is what the draft knows of a token that the target has run: the target's tapped streams, projected and
normed. A *block* is what it guesses with: the anchor (the last token that the target chose, which the target has not
run yet) and mask tokens behind it. Slot k of a block stands on the anchor's position + k and guesses the token after
it. Shapes: B sequences, T context rows, A blocks a sequence, N slots a block, H hidden size, R Markov rank. Autograd
runs through all of it.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kimi_k3.reference import rms_norm


class BlockConfig(Protocol):
    """What a config of either layout tells."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def mask_token_id(self) -> int: ...
    @property
    def frequencies(self) -> Tensor: ...


Config = TypeVar("Config", bound=BlockConfig)


class BlockDraft(Generic[Config]):
    """A draft over a dict of published tensor names; subclasses have the attention and what it sees.

    Args:
        config: of the draft.
        weights: published name to tensor, cast where it is used, so fp32 parameters train a bf16 draft.
        embeddings: [vocabulary, H].
        head: [vocabulary, H].
        dtype: of the activations.
    """

    #: names of the context's projection and norm, and of the norm after the last layer
    names: ClassVar[tuple[str, str, str]]

    def __init__(
        self, config: Config, weights: Mapping[str, Tensor], embeddings: Tensor, head: Tensor, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.weights = weights
        self.embeddings = embeddings.to(dtype)
        self.head = head.to(dtype)
        self.dtype = dtype
        self._frequencies = config.frequencies.to(head.device)

    def context(self, taps: Sequence[Tensor]) -> Tensor:
        """Context rows [B, T, H] from the tapped streams of the target, [B, T, H] each."""
        joined = torch.cat([tap.to(self.dtype) for tap in taps], dim=-1)
        return self._norm(self.names[1], self._linear(self.names[0], joined))

    def blocks(self, context: Tensor, anchors: Tensor, positions: Tensor, width: int) -> Tensor:
        """Hidden states [B, A, N, H] of blocks, after the final norm.

        Args:
            context: rows of the tokens at positions 0 … T-1, [B, T, H].
            anchors: token ids, int64 [B, A].
            positions: of the anchors, int64 [B, A]; a block sees context before its anchor, and itself.
            width: N.
        """
        count = anchors.shape[1]
        ids = anchors.new_full((*anchors.shape, width), self.config.mask_token_id)
        ids[..., 0] = anchors
        slots = (positions.unsqueeze(-1) + torch.arange(width, device=ids.device)).flatten(1)
        rows = torch.arange(context.shape[1], device=ids.device).expand(len(ids), -1)
        seen = self._seen(rows, positions, width)
        angles = [place.unsqueeze(-1) * self._frequencies for place in (slots, torch.cat([rows, slots], dim=1))]
        x = self.embeddings[ids].flatten(1, 2)
        for i in range(self.config.num_hidden_layers):
            name = f"layers.{i}"
            normed = self._norm(f"{name}.input_layernorm", x)
            x = x + self._attention(f"{name}.self_attn", normed, context, seen, angles)
            x = x + self._mlp(f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", x))
        return self._norm(self.names[2], x).unflatten(1, (count, width))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] before the Markov head, from ``hidden`` [..., H]."""
        return F.linear(hidden, self.head)

    def markov(self, previous: Tensor) -> Tensor:
        """Markov embeddings [..., R] of the token ids before each slot."""
        return F.embedding(previous, self._weight("markov_head.markov_w1.weight"))

    def bias(self, markov: Tensor) -> Tensor:
        """What Markov embeddings [..., R] add to the logits: [..., vocabulary]."""
        return self._linear("markov_head.markov_w2", markov)

    def confidence(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """Log-odds, fp32 [...], that a slot's guess is accepted if those before it are."""
        joined = torch.cat([hidden, markov], dim=-1).float()
        weight, bias = (self.weights[f"confidence_head.proj.{part}"].float() for part in ("weight", "bias"))
        return F.linear(joined, weight, bias).squeeze(-1)

    def guess(self, hidden: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens int64 [B, A, N], slot by slot, and the log-odds of their acceptance, fp32 [B, A, N].

        Args:
            hidden: of the blocks, [B, A, N, H].
            anchors: int64 [B, A].
        """
        base = self.logits(hidden)
        previous, guesses, odds = anchors, [], []
        for k in range(hidden.shape[2]):
            markov = self.markov(previous)
            previous = (base[:, :, k] + self.bias(markov)).argmax(-1)
            guesses.append(previous)
            odds.append(self.confidence(hidden[:, :, k], markov))
        return torch.stack(guesses, dim=-1), torch.stack(odds, dim=-1)

    def _seen(self, rows: Tensor, positions: Tensor, width: int) -> Tensor:
        """What each slot sees, bool [B, A*N, T + A*N]: context ``rows`` [B, T] of positions, then slots."""
        raise NotImplementedError

    def _attention(self, name: str, x: Tensor, context: Tensor, seen: Tensor, angles: list[Tensor]) -> Tensor:
        """Attention of the slots [B, A*N, H] over context rows [B, T, H] and slots; ``angles`` of queries, of keys."""
        raise NotImplementedError

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        inner = F.silu(self._linear(f"{name}.gate_proj", x)) * self._linear(f"{name}.up_proj", x)
        return self._linear(f"{name}.down_proj", inner)

    def _weight(self, name: str) -> Tensor:
        return self.weights[name].to(self.dtype)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weight(f"{name}.weight"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight(f"{name}.weight"), self.config.rms_norm_eps)
