"""A weather agent on LiteLLM; Homeport is one line.

python examples/with_litellm.py --base-url http://127.0.0.1:8080/v1 --model smollm2
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download of a price list at import

import litellm

import homeport
from homeport.adapters import litellm as homeport_litellm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "water_level",
            "description": "The water level at a gauge, in metres above chart datum.",
            "parameters": {"type": "object", "properties": {"gauge": {"type": "string"}}, "required": ["gauge"]},
        },
    }
]


def run(base_url: str, model: str, session_id: str) -> str:
    """Two questions in one conversation; returns the last answer and prints what the cache did."""
    homeport_litellm.install()  # this line
    messages: list[dict[str, object]] = [{"role": "system", "content": "You watch tide gauges."}]
    with homeport.session(session_id) as session:
        for question in ("How high is the water at the north gauge?", "And is that safe below 4.2 m?"):
            messages.append({"role": "user", "content": question})
            while True:
                answer = litellm.completion(
                    f"openai/{model}", messages=messages, tools=TOOLS, api_base=base_url, api_key="-"
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    gauge = json.loads(call.function.arguments)["gauge"]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{gauge}: 3.9 m"})
    print(session.report())
    return str(messages[-1]["content"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    print(run(args.base_url, args.model, "harbour-4"))
