"""The line of a recipe's header that states what ``plan`` expects."""

from pathlib import Path

from vllm_kimi_k3.plan.gpus import find
from vllm_kimi_k3.plan.memory import Plan
from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.inspection import gather
from vllm_kimi_k3.preflight.machine import described


def hardware(recipe: Path) -> tuple[str, int]:
    """GPU and GPUs a node, from the line ``# Hardware: 2 nodes of 8 x h200``."""
    line = next(line for line in recipe.read_text().splitlines() if line.startswith("# Hardware:"))
    count, _, name = line.split(" of ")[1].split()[:3]
    return name, int(count)


def recipe_facts(recipe: Path) -> Facts:
    """What the rules see of a recipe on the hardware it names."""
    name, count = hardware(recipe)
    return gather([], recipe, described(find(name), count), {}, with_files=False)


def expectation(plan: Plan) -> str:
    """The line, from a plan."""
    context = plan.deployment.context
    short = min(context, 32768)
    return (
        f"# Expected: a request of up to {plan.longest} tokens; {plan.requests(context)} at once of {context}, "
        f"{plan.requests(short)} of {short}, if they share nothing."
    )
