"""Rewrites what chat clients send and vLLM's request model would refuse or misread.

A conversation must not die of a field in its history: the client will send the same history again.
"""

import json
from typing import Any

# Without one of these there is nothing to rewrite, and large bodies are not parsed twice.
_SIGNS = (b'"tool_calls"', b'"reasoning_content"', b'"json_schema"', b'"tools"')


def loosen(body: bytes) -> bytes:
    """A chat completions body in the form that vLLM takes; as it came where there is nothing to do or it is no JSON.

    Arguments of past tool calls become strings (an object is dumped, null and nothing are empty), a call without
    `function` gets one, missing ids and types are filled in, of two spellings of the thinking the one that says
    something stays, an empty list of tools goes away, and a response format that is a bare schema gets a name.
    """
    if not any(sign in body for sign in _SIGNS):
        return body
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(data, dict) or not _loosen_request(data):
        return body
    return json.dumps(data).encode()


def _loosen_request(data: dict[str, Any]) -> bool:
    """Rewrite in place; whether anything was rewritten."""
    changed = _name_schema(data.get("response_format"))
    if data.get("tools") == []:
        del data["tools"]
        if data.get("tool_choice") in ("auto", "none"):
            del data["tool_choice"]
        changed = True
    messages = data.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            changed |= _loosen_message(message)
    return changed


def _loosen_message(message: dict[str, Any]) -> bool:
    changed = False
    if "reasoning_content" in message and "reasoning" in message:
        message["reasoning"] = message.pop("reasoning_content") or message["reasoning"]
        changed = True
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return changed
    for position, call in enumerate(calls):
        loose = _loosen_call(call) if isinstance(call, dict) else call
        if loose != call:
            calls[position] = loose
            changed = True
    return changed


def _loosen_call(call: dict[str, Any]) -> dict[str, Any]:
    call = {key: value for key, value in call.items() if value is not None}
    if "function" not in call and isinstance(call.get("name"), str):
        call["function"] = {key: call.pop(key) for key in ("name", "arguments") if key in call}
    function = call.get("function")
    if isinstance(function, dict):
        arguments = function.get("arguments")
        if arguments is None:
            call["function"] = function | {"arguments": ""}
        elif isinstance(arguments, dict):
            call["function"] = function | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": "", "type": "function"} | call


def _name_schema(response_format: object) -> bool:
    if not isinstance(response_format, dict) or response_format.get("type") != "json_schema":
        return False
    given = response_format.get("json_schema")
    if not isinstance(given, dict) or {"name", "schema"} <= given.keys():
        return False
    if "schema" in given:
        given["name"] = "response"
    else:
        response_format["json_schema"] = {
            "name": given.get("name", "response"),
            "schema": given.get("json_schema", given),
        }
    return True
