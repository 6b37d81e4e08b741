"""Makes what ``triptych demo`` asks about: src/triptych/assets/demo.png, demo.mp4 and demo.wav."""

import math
import wave
from pathlib import Path

import av
from PIL import Image, ImageDraw

SIZE = (448, 336)
FRAMES, FPS = 24, 8  # of the clip: the sun rises
RATE, NOTES = 8000, (262, 330, 392, 523)  # of the sound: a chord, note by note
OUT = Path(__file__).parent.parent / "src/triptych/assets"


def draw(sun: int = 30) -> Image.Image:
    """A house, three trees, and the sun so many pixels from above."""
    picture = Image.new("RGB", SIZE, (178, 216, 245))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((340, sun, 410, sun + 70), fill=(250, 204, 60))
    draw.rectangle((0, 236, 448, 336), fill=(108, 176, 88))
    draw.rectangle((60, 140, 220, 262), fill=(196, 80, 62))
    draw.polygon([(44, 140), (140, 70), (236, 140)], fill=(96, 60, 50))
    draw.rectangle((122, 192, 158, 262), fill=(70, 46, 40))
    for x in (80, 176):
        draw.rectangle((x, 166, x + 28, 194), fill=(240, 236, 200))
    for x in (270, 330, 390):
        draw.rectangle((x - 5, 216, x + 5, 252), fill=(110, 78, 48))
        draw.ellipse((x - 26, 160, x + 26, 226), fill=(52, 122, 64))
    return picture


def film(file: Path) -> None:
    with av.open(str(file), "w") as out:
        track = out.add_stream("libx264", rate=FPS, options={"crf": "30"})
        track.width, track.height, track.pix_fmt = *SIZE, "yuv420p"
        for number in range(FRAMES):
            picture = draw(240 - 210 * number // (FRAMES - 1))
            out.mux(track.encode(av.VideoFrame.from_image(picture)))
        out.mux(track.encode())


def play(file: Path) -> None:
    samples = bytearray()
    for note in NOTES:
        for at in range(RATE // 4):
            fade = 1 - at / (RATE // 4)
            samples.append(round(128 + 90 * fade * math.sin(2 * math.pi * note * at / RATE)))
    with wave.open(str(file), "wb") as out:
        out.setparams((1, 1, RATE, 0, "NONE", ""))
        out.writeframes(samples)


def main() -> None:
    draw().save(OUT / "demo.png", optimize=True)
    film(OUT / "demo.mp4")
    play(OUT / "demo.wav")
    for file in sorted(OUT.glob("demo.*")):
        print(file, file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
