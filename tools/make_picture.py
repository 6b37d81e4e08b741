"""Draws docs/patterns.svg: the four patterns as panels, folded together or apart."""

from pathlib import Path

OUT = Path(__file__).parent.parent / "docs/patterns.svg"
COLOURS = {"E": "#2f7f86", "P": "#c9822b", "D": "#8a3f5c"}
NAMES = {"E": "Encode", "P": "Prefill", "D": "Decode"}
PATTERNS = [
    ("EPD", "first try, small models, low load"),
    ("E/PD", "many images and videos; encoders scale on their own"),
    ("E/P/D", "large deployments; TTFT and ITL tuned on their own"),
    ("EP/D", "models that take no precomputed embeddings"),
]
PANEL, GAP, HEIGHT, ROW = 96, 62, 64, 116


def process(x: int, y: int, role: str) -> str:
    """One process: a frame around the panels of a role."""
    width = PANEL * len(role)
    parts = [
        f'<rect x="{x - 7}" y="{y - 7}" width="{width + 14}" height="{HEIGHT + 14}" rx="9" '
        'fill="#fffdf8" stroke="#5b5348" stroke-width="1.5"/>'
    ]
    for i, stage in enumerate(role):
        left = x + i * PANEL
        parts.append(
            f'<rect x="{left + 2}" y="{y}" width="{PANEL - 4}" height="{HEIGHT}" rx="4" '
            f'fill="{COLOURS[stage]}"/>'
            f'<text x="{left + PANEL // 2}" y="{y + 30}" class="big">{stage}</text>'
            f'<text x="{left + PANEL // 2}" y="{y + 50}" class="small">{NAMES[stage]}</text>'
        )
    return "".join(parts)


def arrow(x: int, y: int) -> str:
    return (
        f'<line x1="{x + 10}" y1="{y}" x2="{x + GAP - 16}" y2="{y}" stroke="#5b5348" '
        'stroke-width="2" marker-end="url(#tip)"/>'
        f'<text x="{x + GAP // 2 - 2}" y="{y - 8}" class="ticket">ticket</text>'
    )


def row(y: int, pattern: str, use: str) -> str:
    parts = [
        f'<text x="24" y="{y + 30}" class="name">{pattern}</text>',
        f'<text x="24" y="{y + HEIGHT + 27}" class="use">{use}</text>',
    ]
    x = 140
    for i, role in enumerate(pattern.split("/")):
        if i:
            parts.append(arrow(x, y + HEIGHT // 2))
            x += GAP
        parts.append(process(x, y, role))
        x += PANEL * len(role)
    return "".join(parts)


def main() -> None:
    height = ROW * len(PATTERNS) + 34
    rows = "\n".join(row(26 + i * ROW, *pattern) for i, pattern in enumerate(PATTERNS))
    OUT.write_text(f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 590 {height}" role="img">
<title>The four patterns: EPD, E/PD, E/P/D and EP/D</title>
<style>
text {{ font-family: Georgia, 'Times New Roman', serif; fill: #3b352c }}
.big {{ font-size: 24px; text-anchor: middle; fill: #fff; font-weight: bold }}
.small {{ font-size: 12px; text-anchor: middle; fill: #fff }}
.name {{ font-size: 24px; font-weight: bold }}
.use {{ font-size: 12.5px; font-style: italic }}
.ticket {{ font-size: 10px; text-anchor: middle }}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4"
  markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 L8 4 L0 8 z" fill="#5b5348"/></marker></defs>
<rect width="590" height="{height}" fill="#f6f1e7"/>
{rows}
</svg>
""")


if __name__ == "__main__":
    main()
