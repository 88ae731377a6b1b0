"""Pictures of a few shapes of one colour.

The text model never learned to speak of pictures; the tower makes it read one as a message that asks to repeat what is
seen, such as "3 red". So the answers are those of the copying skill.
"""

import random
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, ImageDraw

from vllm_kimi_k3.nano.tasks.exchange import Exchange, Scene, answer

SKILL = "pictures"
#: Name of a colour to its RGB; each is drawn a little lighter or darker.
COLOURS = {
    "red": (215, 35, 35),
    "blue": (40, 75, 215),
    "green": (40, 155, 60),
    "yellow": (240, 210, 40),
    "black": (25, 25, 25),
    "purple": (130, 45, 165),
}
MOST = 5
_SHAPES = ("circle", "square", "triangle")
#: Pixels a side of a picture, which takes eight tokens, and of the cell that a shape lies in.
_WIDTH, _HEIGHT, _CELL = 112, 56, 28


@dataclass(frozen=True)
class Picture:
    """What there is to see: ``count`` shapes of one ``colour``; ``seed`` decides all else."""

    colour: str
    count: int
    seed: int

    @property
    def seen(self) -> str:
        """Count and colour in words."""
        return f"{self.count} {self.colour}"

    def image(self) -> Image.Image:
        """The picture, RGB, 112x56 pixels; its shapes do not touch."""
        rng = random.Random(self.seed)
        image = Image.new("RGB", (_WIDTH, _HEIGHT), (rng.randint(225, 255),) * 3)
        draw = ImageDraw.Draw(image)
        cells = [(x, y) for x in range(_WIDTH // _CELL) for y in range(_HEIGHT // _CELL)]
        for column, row in rng.sample(cells, self.count):
            size = rng.randint(14, 22)
            left = column * _CELL + rng.randint(1, _CELL - size - 1)
            top = row * _CELL + rng.randint(1, _CELL - size - 1)
            box = (left, top, left + size, top + size)
            red, green, blue = (min(255, max(0, part + rng.randint(-20, 20))) for part in COLOURS[self.colour])
            shape, fill = rng.choice(_SHAPES), (red, green, blue)
            if shape == "circle":
                draw.ellipse(box, fill)
            elif shape == "square":
                draw.rectangle(box, fill)
            else:
                draw.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill)
        return image

    def png(self) -> bytes:
        """The picture as a PNG file."""
        buffer = BytesIO()
        self.image().save(buffer, "PNG")
        return buffer.getvalue()


def draw_picture(rng: random.Random) -> Picture:
    """A random picture."""
    return Picture(rng.choice(list(COLOURS)), rng.randint(1, MOST), rng.getrandbits(32))


def look(scene: Scene) -> Exchange:
    """A picture alone, and what it shows."""
    picture = draw_picture(scene.rng)
    think = scene.style.think("Copy it.", "The user wants the same text.", "I change nothing.")
    return answer(SKILL, "", think, picture.seen, picture.seen, picture)
