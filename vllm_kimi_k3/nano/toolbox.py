"""The tools that the miniature knows: OpenAI function schemas, in one pool from which each dialogue declares a few."""

from typing import Any


def _tool(name: str, description: str, /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }


_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}
_FLAG = {"type": "boolean"}
_OBJECT = {"type": "object"}
_LIST = {"type": "array"}

TOOLS: dict[str, dict[str, Any]] = {
    tool["function"]["name"]: tool
    for tool in (
        _tool("get_weather", "Weather in a city", city=_STRING),
        _tool("get_time", "Local time in a city", city=_STRING),
        _tool("find_price", "Price of an item", item=_STRING),
        _tool("add_note", "Save a note", text=_STRING),
        _tool("run_code", "Run code", code=_STRING),
        _tool("send_mail", "Send a mail", to=_STRING, body=_STRING),
        _tool("search", "Search for text", query=_STRING),
        _tool("set_alarm", "Set an alarm", hour=_INTEGER, minute=_INTEGER),
        _tool("set_light", "Switch a light", room=_STRING, on=_FLAG),
        _tool("set_heat", "Set the heat of a room", room=_STRING, degrees=_NUMBER),
        _tool("save_data", "Save an object", data=_OBJECT),
        _tool("add_items", "Add items to a list", items=_LIST),
        _tool("book_table", "Book a table", name=_STRING, guests=_INTEGER, outside=_FLAG),
        _tool("move_robot", "Move the robot", steps=_INTEGER, left=_FLAG),
    )
}
