"""The tools that the miniature knows: OpenAI function schemas, in one pool from which each dialogue declares a few."""

from typing import Any


def tool(name: str, description: str, /, **properties: Any) -> dict[str, Any]:
    """A function tool whose properties, by name, are all required."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }


STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
FLAG = {"type": "boolean"}
OBJECT = {"type": "object"}
LIST = {"type": "array"}

TOOLS: dict[str, dict[str, Any]] = {
    entry["function"]["name"]: entry
    for entry in (
        tool("get_weather", "Weather in a city", city=STRING),
        tool("get_time", "Local time in a city", city=STRING),
        tool("find_price", "Price of an item", item=STRING),
        tool("add_note", "Save a note", text=STRING),
        tool("run_code", "Run code", code=STRING),
        tool("send_mail", "Send a mail", to=STRING, body=STRING),
        tool("search", "Search for text", query=STRING),
        tool("set_alarm", "Set an alarm", hour=INTEGER, minute=INTEGER),
        tool("set_light", "Switch a light", room=STRING, on=FLAG),
        tool("set_heat", "Set the heat of a room", room=STRING, degrees=NUMBER),
        tool("save_data", "Save an object", data=OBJECT),
        tool("add_items", "Add items to a list", items=LIST),
        tool("book_table", "Book a table", name=STRING, guests=INTEGER, outside=FLAG),
        tool("move_robot", "Move the robot", steps=INTEGER, left=FLAG),
    )
}
