"""The MLA draft of DSpark in plain torch, and a whole drafting loop with it.

The published layout is that of ``Inferact/Kimi-K3-DSpark``; words and shapes are those of :mod:`.blocks`.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from vllm_kimi_k3.dspark.blocks import BlockDraft
from vllm_kimi_k3.reference import KimiK3


@dataclass(frozen=True)
class Yarn:
    """``rope_parameters`` of type ``yarn``; names as published."""

    rope_theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    def frequencies(self, width: int) -> Tensor:
        """Radians a position for each of the ``width / 2`` pairs, fp32.

        Pairs that turn more than ``beta_fast`` times over the original length keep their frequency, those that turn
        less than ``beta_slow`` times have it divided by ``factor``, and between the two lies a straight ramp over the
        pair's number (Peng et al., arXiv 2309.00071, §3.2).
        """

        def pair_that_turns(times: float) -> float:
            wave = self.original_max_position_embeddings / (times * 2 * math.pi)
            return width * math.log(wave) / (2 * math.log(self.rope_theta))

        low = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(self.beta_slow)), width - 1)
        pairs = torch.arange(width // 2, dtype=torch.float32)
        stretched = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
        plain = self.rope_theta ** (-2 * pairs / width)
        return plain * (1 - stretched) + plain / self.factor * stretched

    def magnitude(self, mscale: float) -> float:
        """By how much longer contexts sharpen attention."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class DraftConfig:
    """The fields of the draft's ``config.json`` that the forward pass reads; names as published."""

    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    rope_parameters: Yarn

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DraftConfig":
        """Read a published ``config.json``.

        Raises:
            ValueError: a field is missing; the message names it.
        """
        try:
            rope = {f.name: config["rope_parameters"][f.name] for f in fields(Yarn)}
            plain = {f.name: config[f.name] for f in fields(cls)}
        except KeyError as error:
            raise ValueError(f"config.json: the draft's config lacks {error.args[0]!r}") from error
        plain |= {"rope_parameters": Yarn(**rope), "target_layer_ids": tuple(config["target_layer_ids"])}
        return cls(**plain)

    @property
    def frequencies(self) -> Tensor:
        """Radians a position of the pairs that turn, fp32."""
        return self.rope_parameters.frequencies(self.qk_rope_head_dim)


def rotate(x: Tensor, angles: Tensor, magnitude: float) -> Tensor:
    """Turn neighbouring pairs of ``x`` [..., W] by ``angles`` fp32 [..., W / 2] (interleaved rotary)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


class MlaDraft(BlockDraft[DraftConfig]):
    """The draft of MLA layers; embedding and head are the target's, its own embedding, if it has one, is ignored."""

    names = ("context_proj", "context_norm", "final_norm")

    def _seen(self, rows: Tensor, positions: Tensor, width: int) -> Tensor:
        """A slot sees the context before its anchor and the whole of its block."""
        block = torch.arange(positions.shape[1] * width, device=rows.device) // width
        return torch.cat(
            [
                rows[:, None, :] < positions.repeat_interleave(width, 1)[:, :, None],
                (block[:, None] == block).expand(len(rows), -1, -1),
            ],
            dim=-1,
        )

    def _attention(self, name: str, x: Tensor, context: Tensor, seen: Tensor, angles: list[Tensor]) -> Tensor:
        """MLA of the slots [B, A*N, H] over context rows and slots; ``angles`` are those of queries and of keys."""
        c = self.config
        nope, rope = c.qk_nope_head_dim, c.qk_rope_head_dim
        yarn = c.rope_parameters
        stretch = yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)
        low = self._norm(f"{name}.q_a_layernorm", self._linear(f"{name}.q_a_proj", x))
        q = self._linear(f"{name}.q_b_proj", low).unflatten(-1, (c.num_attention_heads, nope + rope))
        q = torch.cat([q[..., :nope], rotate(q[..., nope:], angles[0].unsqueeze(2), stretch)], dim=-1)
        # Context rows go into the keys as they are, without the layer's input norm.
        joined = self._linear(f"{name}.kv_a_proj_with_mqa", torch.cat([context, x], dim=1))
        latent, shared = joined.split([c.kv_lora_rank, rope], dim=-1)
        kv = self._linear(f"{name}.kv_b_proj", self._norm(f"{name}.kv_a_layernorm", latent))
        kv = kv.unflatten(-1, (c.num_attention_heads, nope + c.v_head_dim))
        turned = rotate(shared, angles[1], stretch).unsqueeze(2).expand(-1, -1, c.num_attention_heads, -1)
        k = torch.cat([kv[..., :nope], turned], dim=-1)
        scale = (nope + rope) ** -0.5 * yarn.magnitude(yarn.mscale_all_dim) ** 2
        q, k, v = (y.transpose(1, 2) for y in (q, k, kv[..., nope:]))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(1), scale=scale)
        return self._linear(f"{name}.o_proj", out.transpose(1, 2).flatten(2))


def load_draft(path: Path, target: KimiK3) -> MlaDraft:
    """The draft of a directory in the published layout (``config.json``, ``model.safetensors``) for ``target``."""
    config = DraftConfig.from_dict(json.loads((path / "config.json").read_text()))
    head, embeddings = target.weight("lm_head.weight"), target.weight("model.embed_tokens.weight")
    return MlaDraft(config, load_file(path / "model.safetensors"), embeddings, head, target.dtype)


@torch.no_grad()
def speculate(
    target: KimiK3, draft: MlaDraft, prompt: Sequence[int], stop: int, most: int, width: int
) -> tuple[list[int], list[int]]:
    """Greedy generation, ``width`` guesses a step, each step verified by one run of the target.

    Args:
        stop: token that ends the answer, and is its last.
        most: tokens of the answer, at most.

    Returns:
        the answer, which is what the target alone generates, and of each step how many of its guesses stand in it.
    """
    taps = draft.config.target_layer_ids
    state = target.new_state()
    stream = target.run(target.embed(torch.tensor(prompt)), state, aux_layers=taps)
    rows = draft.context([tap.unsqueeze(0) for tap in stream.aux])
    answer = [int(target.logits(stream.hidden[-1:]).argmax(-1))]
    steps: list[int] = []
    while answer[-1] != stop and len(answer) < most:
        anchor, position = torch.tensor([[answer[-1]]]), torch.tensor([[rows.shape[1]]])
        guesses, _ = draft.guess(draft.blocks(rows, anchor, position, width), anchor)
        tokens = torch.cat([anchor.flatten(), guesses.flatten()])
        trial = copy.deepcopy(state)
        stream = target.run(target.embed(tokens), trial, aux_layers=taps)
        chosen = target.logits(stream.hidden).argmax(-1)
        agreed = (chosen[:-1] == tokens[1:]).long().cumprod(0)
        accepted = int(agreed.sum())
        # The state of KDA cannot be cut back: from the old one it runs again over what was accepted.
        if accepted == width:
            state = trial
        else:
            target.run(target.embed(tokens[: accepted + 1]), state)
        rows = torch.cat([rows, draft.context([tap[: accepted + 1].unsqueeze(0) for tap in stream.aux])], dim=1)
        found = [*tokens[1 : accepted + 1].tolist(), int(chosen[accepted])][: most - len(answer)]
        found = found[: found.index(stop) + 1] if stop in found else found
        steps.append(min(accepted, len(found)))
        answer += found
    return answer, steps
