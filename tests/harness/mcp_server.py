"""A small MCP server over standard input: some tools, some instructions, and a start as slow as it is told.

usage: mcp_server.py NAME TOOLS DELAY_S
"""

import json
import sys
import time

name, tools, delay_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
time.sleep(delay_s)

TOOLS = [
    {
        "name": f"look_{n}",
        "description": f"Look into drawer {n} of {name} and say what lies there.",
        "inputSchema": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    }
    for n in range(tools)
]
INFO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": name, "version": "1"},
    "instructions": f"Ask {name} before you guess.",
}
ANSWERS = {"initialize": INFO, "tools/list": {"tools": TOOLS}, "ping": {}, "tools/call": {"content": []}}

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    result = ANSWERS.get(message["method"])
    answer = {"result": result} if result is not None else {"error": {"code": -32601, "message": "not here"}}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
