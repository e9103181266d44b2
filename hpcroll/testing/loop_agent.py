"""A whole agent in one program of the standard library, to be run as a black box."""

from __future__ import annotations

from hpcroll.config.models import Options

PROGRAM = r"""
import json, os, subprocess, sys, urllib.error, urllib.request

url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
tools = []
for name, key in (("bash", "command"), ("submit", "answer")):
    parameters = {"type": "object", "properties": {key: {"type": "string"}}}
    tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": tools}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    try:
        reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        sys.exit("the model refused: " + error.read().decode())
    messages.append(reply)
    if not reply.get("tool_calls"):
        messages.append({"role": "user", "content": "Go on."})
    for call in reply.get("tool_calls") or []:
        name = call["function"]["name"]
        try:
            arguments = json.loads(call["function"]["arguments"])
            if name == "submit":
                sys.exit(print(arguments["answer"]))
            done = subprocess.run(["sh", "-c", arguments["command"]], capture_output=True, text=True)
            content = done.stdout + done.stderr
        except (ValueError, TypeError, KeyError) as error:
            content = repr(error)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
"""
"""Has the tools `bash` and `submit` of the harness `react`; prints what is submitted."""

OPTIONS: Options = {"argv": ["python3", "-c", PROGRAM], "task_on_stdin": True}
"""`harness.options` that have the harness `command` run it."""
