"""Draws the picture that ``triptych demo`` asks about: src/triptych/assets/demo.png."""

from pathlib import Path

from PIL import Image, ImageDraw

SIZE = (448, 336)
OUT = Path(__file__).parent.parent / "src/triptych/assets/demo.png"


def main() -> None:
    picture = Image.new("RGB", SIZE, (178, 216, 245))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 236, 448, 336), fill=(108, 176, 88))
    draw.ellipse((340, 30, 410, 100), fill=(250, 204, 60))
    draw.rectangle((60, 140, 220, 262), fill=(196, 80, 62))
    draw.polygon([(44, 140), (140, 70), (236, 140)], fill=(96, 60, 50))
    draw.rectangle((122, 192, 158, 262), fill=(70, 46, 40))
    for x in (80, 176):
        draw.rectangle((x, 166, x + 28, 194), fill=(240, 236, 200))
    for x in (270, 330, 390):
        draw.rectangle((x - 5, 216, x + 5, 252), fill=(110, 78, 48))
        draw.ellipse((x - 26, 160, x + 26, 226), fill=(52, 122, 64))
    picture.save(OUT, optimize=True)
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
