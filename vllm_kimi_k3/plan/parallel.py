"""How a model is laid out over processes, and what one of them holds."""

from dataclasses import dataclass

from vllm_kimi_k3.model.layout import Share


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups, as vLLM's flags give them.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline stages.
        dp: data-parallel replicas.
        ep: experts are spread whole over the tensor- and data-parallel ranks, instead of sliced over the former.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def gpus(self) -> int:
        """How many accelerators it takes."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}" * (self.pp > 1), f"DP{self.dp}" * (self.dp > 1), "EP" * self.ep]
        return "·".join(part for part in parts if part)

    def stages(self, layers: int) -> list[range]:
        """The layers of each pipeline stage, as vLLM cuts them: what is left over goes to those before the last."""
        sizes = [layers // self.pp] * self.pp
        for extra in range(layers % self.pp):
            sizes[-2 - extra] += 1
        starts = [sum(sizes[:stage]) for stage in range(self.pp)]
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def share(self, stage: range) -> Share:
        """What the first rank of a stage holds; the other ranks of the stage hold as much.

        Raises:
            ValueError: the sizes do not divide what they slice; raised when the share is used.
        """
        return Share(stage, tp_size=self.tp, ep_size=self.tp * self.dp if self.ep else 1)
