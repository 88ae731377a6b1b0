"""The generated pictures, and the packaged tower's reading of them."""

import random

import torch
from safetensors.torch import load_file

from vllm_kimi_k3.images.patches import image_patches
from vllm_kimi_k3.images.rules import ImageRules
from vllm_kimi_k3.nano.batches import load_tokenizer
from vllm_kimi_k3.nano.packaged import target_path
from vllm_kimi_k3.nano.shape import Shape, vision_config
from vllm_kimi_k3.nano.tasks.pictures import COLOURS, Picture, draw_picture
from vllm_kimi_k3.nano.train_vision import read_as
from vllm_kimi_k3.vision_reference import VisionReference


def test_a_picture_takes_as_many_tokens_as_its_text() -> None:
    tokenizer = load_tokenizer()
    for colour in COLOURS:
        picture = Picture(colour, 5, seed=3)
        assert ImageRules().fit(*picture.image().size).tokens == len(read_as(tokenizer, picture))


def test_the_packaged_tower_reads_count_and_colour() -> None:
    stored = {k: v.float() for file in target_path().glob("*.safetensors") for k, v in load_file(file).items()}
    tower = VisionReference(vision_config(Shape()), stored, torch.float32)
    embeddings = stored["language_model.model.embed_tokens.weight"]
    tokenizer, rng, right = load_tokenizer(), random.Random("test"), 0
    for _ in range(60):
        picture = draw_picture(rng)
        patches, fit = image_patches(picture.image(), ImageRules())
        seen = tower.embed(torch.from_numpy(patches), fit.rows, fit.columns)
        nearest = torch.cdist(seen, embeddings).argmin(-1).tolist()
        right += nearest[-2:] == read_as(tokenizer, picture)[-2:]
    assert right >= 54
