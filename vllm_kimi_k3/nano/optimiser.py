"""Muon for matrices, Adam for the rest, and the router's balance."""

import torch
from torch import Tensor, nn

from vllm_kimi_k3.nano.batched import BatchedK3

_ADAM_ENDINGS = (
    "embed_tokens/weight",
    "lm_head/weight",
    "gate/weight",
    "b_proj/weight",
    "markov_w1/weight",
    "markov_w2/weight",
)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, about: five Newton-Schulz steps in bf16 over [..., rows, columns]."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum whose step is orthogonalised, scaled so that its elements have the size of Adam's.

    Args:
        parameters: matrices [rows, columns] or stacks of them; those of one shape are worked on together.
        rate: learning rate, as for Adam.
        decay: weight decay, times the learning rate.
    """

    def __init__(self, parameters: list[nn.Parameter], rate: float, decay: float) -> None:
        self.rate, self.decay = rate, decay
        self._groups: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._groups.setdefault(parameter.shape, []).append(parameter)
        self.momenta = {
            shape: torch.zeros((len(group), *shape), device=group[0].device) for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Take a step with ``factor`` times the learning rate."""
        rate = self.rate * factor
        for shape, group in self._groups.items():
            gradients = torch.stack([p.grad if p.grad is not None else torch.zeros_like(p) for p in group])
            momentum = self.momenta[shape].lerp_(gradients, 0.05)
            update = orthogonalise(gradients.lerp(momentum, 0.95)) * 0.2 * max(shape[-2:]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate)


class Optimiser:
    """Muon on hidden matrices, Adam on embeddings, head, router, norms, convolutions and decays.

    Args:
        model: its parameters that need a gradient are trained.
        rate: learning rate of both.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if self._is_matrix(n, p)]
        self.others = [p for n, p in named if not self._is_matrix(n, p)]
        self.all = [p for _, p in named]
        self.rate = rate
        self.muon = Muon(matrices, rate, decay=0.05)
        # A tensor, so that a changed rate needs no new kernels.
        self.adam = torch.optim.AdamW(self.others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    @staticmethod
    def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
        big = parameter.dim() >= 2 and min(parameter.shape[-2:]) >= 16
        return big and not name.endswith(_ADAM_ENDINGS)

    def step(self, factor: float) -> Tensor:
        """Clip, take a step with ``factor`` times the learning rate, clear gradients; returns the gradient's norm."""
        norm = nn.utils.clip_grad_norm_(self.all, 1.0)
        self.muon.step(factor)
        for group in self.adam.param_groups:
            group["lr"] = self.rate * factor
        self.adam.step()
        for parameter in self.all:
            parameter.grad = None
        return norm

    def state(self) -> dict[str, object]:
        """What a later run needs to go on."""
        return {"muon": self.muon.momenta, "adam": self.adam.state_dict()}

    def restore(self, state: dict[str, object]) -> None:
        """Go on from :meth:`state`."""
        for shape, momentum in state["muon"].items():  # type: ignore[attr-defined]
            self.muon.momenta[shape].copy_(momentum)
        self.adam.load_state_dict(state["adam"])


@torch.no_grad()
def balance(model: BatchedK3, scores: Tensor, rate: float = 0.1) -> Tensor:
    """Move each expert's correction bias towards minus the score that its fair share of tokens exceeds.

    With that bias an expert is among the chosen for about top_k / experts of the tokens: balance by quantiles, without
    a loss.

    Args:
        scores: fp32 [layers, N, experts] of N tokens.

    Returns:
        the heaviest load of an expert over the fair one, per layer.
    """
    top_k, count = model.shape.num_experts_per_token, model.shape.num_experts
    wanted = -torch.quantile(scores, 1 - top_k / count, dim=1)
    wanted = wanted - wanted.mean(-1, keepdim=True)
    heaviest = []
    for bias, layer, target in zip(model.router_biases(), scores, wanted, strict=True):
        chosen = (layer + bias).topk(top_k, dim=-1).indices
        load = torch.bincount(chosen.flatten(), minlength=count)
        heaviest.append(load.max() * count / chosen.numel())
        bias.lerp_(target, rate)
    return torch.stack(heaviest)
