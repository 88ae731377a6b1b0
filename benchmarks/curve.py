"""Curves of the hit rate over the size of the pool, as an SVG picture: a panel a trace."""

from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420, 260, 60, 50, 40
_SIDES = {"ours": ("this plugin", "#2f8f6b"), "vllm": ("vLLM's own", "#b04a4a")}


def as_svg(curves: dict[str, Any]) -> str:
    """The picture of ``benchmarks.prefix_cache``'s curves."""
    panels = "\n".join(
        f'<g transform="translate({_LEFT + index * (_WIDTH + _LEFT + _GAP)} {_TOP})">\n{_panel(name, trace)}\n</g>'
        for index, (name, trace) in enumerate(curves.items())
    )
    width = len(curves) * (_WIDTH + _LEFT + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT + _TOP + 60}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f"{panels}\n</svg>\n"
    )


def _panel(name: str, trace: dict[str, Any]) -> str:
    points = trace["points"]
    largest = max(point["blocks"] for point in points)

    def x(blocks: float) -> float:
        return blocks / largest * _WIDTH

    def y(rate: float) -> float:
        return (1 - rate) * _HEIGHT

    title = f"{name}: {trace['requests']} requests, {trace['mean_prompt']:,} tokens each"
    rows = [f'<text x="0" y="-28" font-size="14">{escape(title)}</text>']
    for tenth in range(0, 11, 2):
        height = y(tenth / 10)
        rows.append(f'<path d="M0 {height:.1f}H{_WIDTH}" stroke="#dddddd"/>')
        rows.append(f'<text x="-8" y="{height + 4:.1f}" text-anchor="end">{tenth * 10} %</text>')
    for point in points[:: max(len(points) // 5, 1)]:
        at = x(point["blocks"])
        rows.append(f'<text x="{at:.1f}" y="{_HEIGHT + 18}" text-anchor="middle">{point["blocks"]}</text>')
        rows.append(
            f'<text x="{at:.1f}" y="{_HEIGHT + 34}" text-anchor="middle" fill="#777777">{point["gib"]} GiB</text>'
        )
    limit = y(trace["unlimited"])
    rows.append(f'<path d="M0 {limit:.1f}H{_WIDTH}" stroke="#777777" stroke-dasharray="5 4"/>')
    rows.append(f'<text x="{_WIDTH}" y="{limit - 5:.1f}" text-anchor="end" fill="#777777">unlimited memory</text>')
    for place, (key, (label, colour)) in enumerate(_SIDES.items()):
        path = "L".join(f"{x(point['blocks']):.1f} {y(point[key]):.1f}" for point in points)
        rows.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        rows += [
            f'<circle cx="{x(point["blocks"]):.1f}" cy="{y(point[key]):.1f}" r="3.5" fill="{colour}">'
            f"<title>{point['blocks']} blocks: {point[key]:.3f}</title></circle>"
            for point in points
        ]
        rows.append(f'<text x="{place * 110}" y="-10" fill="{colour}">{escape(label)}</text>')
    rows.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 50}" text-anchor="middle">blocks of the cache pool, a rank</text>'
    )
    return "\n".join(rows)
