"""Tools of OpenAI Responses as functions, and calls of the functions as what they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcroll.gateway.arguments import TEXT_ARGUMENT, text_argument
from hpcroll.gateway.refusal import bad_request

_OFFERED = ("function", "custom", "namespace")
_HOSTED = frozenset(
    {
        *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp"),
        *("computer", "computer_use_preview", "tool_search", "programmatic_tool_calling"),
    }
)
"""Tools that OpenAI's servers run: the model is not offered them."""


class Tools:
    """The tools of a request; raises `Refusal` that names the one which is wrong or not supported."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[dict[str, Any]] = []
        """As Chat Completions declares them."""
        self._custom: set[str] = set()
        self._functions: dict[tuple[str, str], str] = {}
        """The function's name, by namespace (or "") and name of the tool."""
        self._places: dict[str, tuple[str, str]] = {}
        """The inverse."""
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]")

    def function_name(self, item: Mapping[str, Any]) -> str:
        """The function that a call item calls."""
        name = str(item["name"])
        return self._functions.get((item.get("namespace") or "", name), name)

    def item(self, call: Mapping[str, Any], status: str) -> dict[str, Any]:
        """The output item of a function's call."""
        called, arguments = call["function"]["name"], call["function"]["arguments"]
        namespace, name = self._places.get(called, ("", called))
        item = {"call_id": call["id"], "name": name, "status": status}
        if namespace:
            item["namespace"] = namespace
        if called in self._custom:
            text = text_argument(arguments)
            return {"type": "custom_tool_call", "id": f"ctc_{call['id']}", **item, "input": text}
        return {"type": "function_call", "id": f"fc_{call['id']}", **item, "arguments": arguments}

    def _add(self, tool: Mapping[str, Any], where: str, namespace: str = "") -> None:
        kind = tool["type"]
        if kind in _HOSTED:
            return
        if kind not in _OFFERED:
            raise bad_request(f"{where} of type {kind!r} is not supported", code="unsupported", param=where)
        if not tool.get("name"):
            raise bad_request(f"{where}.name: missing", param=f"{where}.name")
        if kind == "namespace":
            for index, inner in enumerate(tool.get("tools") or ()):
                self._add(inner, f"{where}.tools[{index}]", tool["name"])
            return
        name = self._name(tool["name"], namespace, where)
        if kind == "custom":
            self._custom.add(name)
        description = tool.get("description") or ""
        function = {"name": name, "description": description, "parameters": _parameters(tool)}
        self.functions.append({"type": "function", "function": function})

    def _name(self, name: str, namespace: str, where: str) -> str:
        # Tools of two namespaces may share a name, functions must not.
        function = f"{namespace}__{name}" if name in self._places and namespace else name
        if function in self._places:
            raise bad_request(f"{where}.name: {function!r} is declared twice", param=f"{where}.name")
        self._places[function] = (namespace, name)
        self._functions[namespace, name] = function
        return function


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool["type"] == "function":
        return tool.get("parameters") or {"type": "object", "properties": {}}
    text = {"type": "string", "description": _grammar(tool)}
    return {"type": "object", "properties": {TEXT_ARGUMENT: text}, "required": [TEXT_ARGUMENT]}


def _grammar(tool: Mapping[str, Any]) -> str:
    form = tool.get("format") or {}
    if form.get("type") != "grammar":
        return "The input, as text."
    return f"The input, as text of this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}"
