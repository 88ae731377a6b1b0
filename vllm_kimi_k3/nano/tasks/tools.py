"""Tool use: which tool, which arguments to the letter, and what its result says."""

import json
import random
from collections.abc import Callable
from typing import Any

from vllm_kimi_k3.nano import words
from vllm_kimi_k3.nano.tasks.exchange import Call, Exchange, Results, Scene, Turn
from vllm_kimi_k3.nano.tasks.strings import code, listed, mapping, plain, scramble, spell, value, wild
from vllm_kimi_k3.nano.toolbox import FLAG, INTEGER, LIST, NUMBER, OBJECT, STRING, TOOLS, tool

SKILL = "tools"
NO_TOOL = "I have no tool for that."


class Request:
    """One wish that a tool fulfils: what the user says, the calls, what the tool gives, and the last answer."""

    def __init__(self, user: str, calls: list[Call], results: list[Any], said: str) -> None:
        self.user = user
        self.calls = tuple(calls)
        self.results = tuple(json.dumps(result) for result in results)
        self.said = said


def _weather(rng: random.Random) -> Request:
    cities = rng.sample(words.CITIES, rng.choice([1, 1, 1, 2, 2, 3]))
    skies = [(rng.choice(words.SKIES), rng.randint(-9, 35)) for _ in cities]
    calls = [Call("get_weather", {"city": city}) for city in cities]
    results = [{"sky": sky, "degrees": degrees} for sky, degrees in skies]
    said = " ".join(f"{city}: {sky}, {degrees} degrees." for city, (sky, degrees) in zip(cities, skies, strict=True))
    user = rng.choice(["What is the weather in {}?", "How is the weather in {} today?", "Tell me the weather in {}."])
    return Request(user.format(listed(cities)), calls, results, said)


def _time(rng: random.Random) -> Request:
    cities = rng.sample(words.CITIES, rng.choice([1, 1, 1, 2]))
    times = [f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}" for _ in cities]
    calls = [Call("get_time", {"city": city}) for city in cities]
    said = " ".join(f"It is {time} in {city}." for city, time in zip(cities, times, strict=True))
    user = rng.choice(["What time is it in {}?", "Tell me the time in {}."])
    return Request(user.format(listed(cities)), calls, [{"time": time} for time in times], said)


def _price(rng: random.Random) -> Request:
    items = rng.sample(words.OBJECTS, rng.choice([1, 1, 1, 2, 3]))
    prices = [rng.randint(1, 999) for _ in items]
    calls = [Call("find_price", {"item": item}) for item in items]
    said = " ".join(f"The {item} costs {price}." for item, price in zip(items, prices, strict=True))
    article = listed([f"a {item}" for item in items])
    user = rng.choice(["What is the price of {}?", "Find the price of {}."])
    return Request(user.format(article), calls, [{"price": price} for price in prices], said)


def _note(rng: random.Random) -> Request:
    if rng.random() < 0.3:
        text = plain(rng)
        user = rng.choice([f'Save the note "{text}".', f'Add a note "{text}" please.'])
    else:
        text = rng.choice([wild, wild, code, plain])(rng)
        user = rng.choice(["Save this note:\n", "Add a note:\n", "Note this down:\n"]) + text
    number = rng.randint(1, 99)
    return Request(user, [Call("add_note", {"text": text})], [{"note": number}], f"Saved as note {number}.")


def _code(rng: random.Random) -> Request:
    text, output = code(rng), str(rng.randint(0, 9999))
    user = rng.choice(["Run this code:\n", "Run this:\n"]) + text
    return Request(user, [Call("run_code", {"code": text})], [{"output": output}], f"The output is {output}.")


def _mail(rng: random.Random) -> Request:
    name = rng.choice(words.NAMES)
    address = f"{name.lower()}{rng.choice(['', str(rng.randint(1, 99))])}@{rng.choice(words.OBJECTS)}.com"
    body = rng.choice([wild, plain])(rng)
    call = Call("send_mail", {"to": address, "body": body})
    return Request(f"Send a mail to {address}:\n{body}", [call], [{"sent": True}], f"The mail to {address} is sent.")


def _search(rng: random.Random) -> Request:
    query, hits = plain(rng, 1, 4), rng.randint(0, 99)
    user = rng.choice([f'Search for "{query}".', f'Look up "{query}".'])
    return Request(user, [Call("search", {"query": query})], [{"hits": hits}], f"There are {hits} hits.")


def _alarm(rng: random.Random) -> Request:
    hour, minute = rng.randint(0, 23), rng.randint(10, 59)
    user = rng.choice(["Set an alarm for {}:{}.", "Wake me at {}:{}."]).format(hour, minute)
    call = Call("set_alarm", {"hour": hour, "minute": minute})
    return Request(user, [call], [{"ok": True}], f"The alarm is set for {hour}:{minute}.")


def _light(rng: random.Random) -> Request:
    rooms = rng.sample(words.PLACES, rng.choice([1, 1, 1, 2]))
    on = rng.random() < 0.5
    calls = [Call("set_light", {"room": room, "on": on}) for room in rooms]
    word = "on" if on else "off"
    said = " ".join(f"The light in the {room} is {word}." for room in rooms)
    user = f"Turn {word} the light in {listed([f'the {room}' for room in rooms])}."
    return Request(user, calls, [{"ok": True}] * len(rooms), said)


def _heat(rng: random.Random) -> Request:
    room, degrees = rng.choice(words.PLACES), rng.randint(100, 259) / 10
    call = Call("set_heat", {"room": room, "degrees": degrees})
    user = rng.choice([f"Set the heat in the {room} to {degrees} degrees.", f"Heat the {room} to {degrees} degrees."])
    return Request(user, [call], [{"ok": True}], f"The {room} gets {degrees} degrees.")


def _data(rng: random.Random) -> Request:
    data, number = mapping(rng, 2), rng.randint(1, 99)
    user = rng.choice(["Save this object:\n", "Store this data:\n"]) + spell(data)
    return Request(user, [Call("save_data", {"data": data})], [{"id": number}], f"Saved with id {number}.")


def _items(rng: random.Random) -> Request:
    items: list[Any]
    if rng.random() < 0.5:
        items = rng.sample(words.OBJECTS, rng.randint(1, 4))
        user = f"Add to the list: {', '.join(items)}"
    else:
        items = [value(rng, 1) for _ in range(rng.randint(0, 4))]
        user = f"Add these items:\n{spell(items)}"
    total = rng.randint(1, 99)
    return Request(user, [Call("add_items", {"items": items})], [{"total": total}], f"The list has {total} items.")


def _table(rng: random.Random) -> Request:
    name, guests, outside = rng.choice(words.NAMES), rng.randint(1, 12), rng.random() < 0.5
    where, number = "outside" if outside else "inside", rng.randint(1, 99)
    user = f"Book a table {where} for {guests} guests, the name is {name}."
    call = Call("book_table", {"name": name, "guests": guests, "outside": outside})
    return Request(user, [call], [{"table": number}], f"Table {number} is booked for {name}.")


def _robot(rng: random.Random) -> Request:
    moves = [(rng.randint(1, 99), rng.random() < 0.5) for _ in range(rng.choice([1, 1, 2]))]
    calls = [Call("move_robot", {"steps": steps, "left": left}) for steps, left in moves]
    path = [f"{steps} steps to the {'left' if left else 'right'}" for steps, left in moves]
    return Request(f"Move the robot {listed(path)}.", calls, [{"ok": True}] * len(moves), "The robot has moved.")


REQUESTS: dict[str, Callable[[random.Random], Request]] = {
    "get_weather": _weather,
    "get_time": _time,
    "find_price": _price,
    "add_note": _note,
    "run_code": _code,
    "send_mail": _mail,
    "search": _search,
    "set_alarm": _alarm,
    "set_light": _light,
    "set_heat": _heat,
    "save_data": _data,
    "add_items": _items,
    "book_table": _table,
    "move_robot": _robot,
}

_KINDS: dict[str, tuple[dict[str, str], Callable[[random.Random], Any]]] = {
    "string": (STRING, lambda rng: rng.choice([plain(rng, 1, 3), scramble(rng), rng.choice(words.NAMES)])),
    "integer": (INTEGER, lambda rng: rng.randint(-99, 9999)),
    "number": (NUMBER, lambda rng: rng.randint(-99, 9999) / 10),
    "boolean": (FLAG, lambda rng: rng.random() < 0.5),
    "object": (OBJECT, lambda rng: mapping(rng, 1)),
    "array": (LIST, lambda rng: [value(rng, 0) for _ in range(rng.randint(0, 4))]),
}


def made_up(rng: random.Random) -> dict[str, Any]:
    """A tool with a name and parameters of its own, so that no name is known by heart."""
    name = f"{rng.choice(words.VERBS)}_{rng.choice(words.OBJECTS)}"
    keys = rng.sample(words.IDENTIFIERS, rng.randint(0, 3))
    properties = {key: _KINDS[rng.choice(list(_KINDS))][0] for key in keys}
    return tool(name, f"To {name.replace('_', ' the ')}", **properties)


def _made_up_request(rng: random.Random, entry: dict[str, Any]) -> Request:
    """The user spells the call, one value a line."""
    function = entry["function"]
    arguments = {key: _KINDS[p["type"]][1](rng) for key, p in function["parameters"]["properties"].items()}
    lines = [f"{key}: {item if isinstance(item, str) else spell(item)}" for key, item in arguments.items()]
    head = f"Call {function['name']} with:" if lines else f"Call {function['name']}."
    result = rng.randint(0, 999)
    user = "\n".join([head, *lines])
    return Request(user, [Call(function["name"], arguments)], [{"result": result}], f"The result is {result}.")


def declare(rng: random.Random, most: int) -> list[dict[str, Any]]:
    """One to ``most`` tools, known and made up, each name once."""
    known = rng.sample(list(TOOLS), rng.randint(1, most))
    chosen = {name: TOOLS[name] if rng.random() < 0.8 else made_up(rng) for name in known}
    return list({entry["function"]["name"]: entry for entry in chosen.values()}.values())


def use(scene: Scene) -> Exchange:
    """A wish that one of the declared tools fulfils, calls, results and answer."""
    rng = scene.rng
    entry = rng.choice(scene.tools)
    name = entry["function"]["name"]
    wish = REQUESTS[name](rng) if name in REQUESTS else _made_up_request(rng, entry)
    times = "once" if len(wish.calls) == 1 else f"{len(wish.calls)} times"
    calling = scene.style.think(f"Call {name} {times}.", "The user wants something done.", f"The tool {name} is there.")
    telling = scene.style.think("Tell the result.", "The tool has answered.", "I say what it gave.")
    steps = (Turn(calling, "", wish.calls), Results(wish.results), Turn(telling, wish.said, key=wish.said))
    return Exchange(SKILL, wish.user, steps)


def refuse(scene: Scene) -> Exchange:
    """A wish for which no tool is declared."""
    declared = {entry["function"]["name"] for entry in scene.tools}
    wish = REQUESTS[scene.rng.choice([name for name in REQUESTS if name not in declared])](scene.rng)
    think = scene.style.think("No tool fits.", "The user wants something done.", "I say that I cannot.")
    return Exchange(SKILL, wish.user, (Turn(think, NO_TOOL, key=NO_TOOL),))


MAKERS = (use, use, use, use, use, use, use, use, refuse)
