"""Small talk and copying: what shows whether the grammar of the channels holds."""

from vllm_kimi_k3.nano import words
from vllm_kimi_k3.nano.tasks.exchange import Exchange, Scene, answer
from vllm_kimi_k3.nano.tasks.strings import code, plain, wild

SKILL = "grammar"


def greet(scene: Scene) -> Exchange:
    name = scene.rng.choice(words.NAMES)
    hello = scene.rng.choice(["Hello", "Hi", "Good morning"])
    if ("name", "me", "") in scene.facts:
        return thanks(scene)
    scene.facts["name", "me", ""] = name
    think = scene.style.think("A greeting.", f"The user is {name}.", f"I greet {name} and offer help.")
    user = scene.rng.choice([f"{hello}, I am {name}.", f"{hello}! My name is {name}."])
    return answer(SKILL, user, think, f"Hello {name}, how can I help you?", name)


def thanks(scene: Scene) -> Exchange:
    user = scene.rng.choice(["Thank you.", "Thanks!", "Thank you, that helps."])
    think = scene.style.think("Thanks.", "The user says thanks.", "I answer in a friendly way.")
    return answer(SKILL, user, think, "You are welcome.", "welcome")


def who(scene: Scene) -> Exchange:
    user = scene.rng.choice(["Who are you?", "What are you?", "Tell me who you are."])
    think = scene.style.think("I am Nano.", "The user asks who I am.", "I say it in one sentence.")
    return answer(SKILL, user, think, "I am Nano, a very small Kimi K3.", "Nano")


def say(scene: Scene) -> Exchange:
    text = plain(scene.rng, 1, 3)
    count = scene.rng.randint(2, 4)
    think = scene.style.think(f"Say it {count} times.", "The user wants words from me.", "I count the times.")
    return answer(SKILL, f'Say "{text}" {count} times.', think, " ".join([text] * count), " ".join([text] * count))


def repeat(scene: Scene) -> Exchange:
    text = scene.rng.choice([wild, wild, code, plain])(scene.rng)
    user = scene.rng.choice(["Repeat this:", "Say this again:", "Copy this text:"])
    think = scene.style.think("Copy it.", "The user wants the same text.", "I change nothing.")
    return answer(SKILL, f"{user}\n{text}", think, text, text)


MAKERS = (greet, thanks, who, say, repeat, repeat, repeat)
