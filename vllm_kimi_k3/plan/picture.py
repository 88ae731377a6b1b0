"""A plan as an SVG picture: one bar for each pipeline stage, divided into what its memory is for."""

from html import escape

from vllm_kimi_k3.plan.memory import Plan, gib
from vllm_kimi_k3.plan.table import segments

_WIDTH, _LEFT, _BAR, _STEP = 960, 130, 34, 78
_COLOURS = {"weights": "#3b5b92", "draft": "#7a5195", "cache": "#2f8f6b", "left alone": "#d0d0d0"}
_OTHER = ("#c97b3c", "#b04a4a")


def as_svg(plan: Plan) -> str:
    """The picture; every bar is as long as the GPU's memory, and its parts are labelled below it."""
    d = plan.deployment
    height = 50 + _STEP * len(plan.stages)
    title = f"{d.layout.gpus} x {d.gpu.name}, {d.layout}, KV {d.kv_dtype}"
    rows = [f'<text x="10" y="24" font-size="16">{escape(title)}</text>']
    for index, stage in enumerate(plan.stages):
        top = 44 + index * _STEP
        rows.append(f'<text x="10" y="{top + 22}">layers {stage.layers.start}-{stage.layers[-1]}</text>')
        x, others = float(_LEFT), iter(_OTHER * 2)
        for place, (name, size) in enumerate(segments(plan, stage)):
            wide = size / d.gpu.memory * (_WIDTH - _LEFT - 10)
            colour = _COLOURS.get(name) or next(others)
            label = f"{name}: {gib(size)} GiB"
            rows.append(
                f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{_BAR}" fill="{colour}">'
                f"<title>{escape(label)}</title></rect>"
            )
            rows.append(
                f'<text x="{_LEFT + place % 6 * 136}" y="{top + _BAR + 16}" font-size="11" fill="{colour}">'
                f"{escape(label)}</text>"
            )
            x += wide
    body = "\n".join(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="13">\n{body}\n</svg>\n'
    )
