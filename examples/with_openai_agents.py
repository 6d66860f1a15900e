"""A weather agent on the OpenAI Agents SDK; Homeport is one line.

python examples/with_openai_agents.py --base-url http://127.0.0.1:8080/v1 --model smollm2
"""

from __future__ import annotations

import argparse
import asyncio

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

import homeport
from homeport.adapters import openai_agents


@function_tool
def water_level(gauge: str) -> str:
    """The water level at a gauge, in metres above chart datum."""
    return f"{gauge}: 3.9 m"


async def run(base_url: str, model: str, session_id: str) -> str:
    """Two questions in one conversation; returns the last answer and prints what the cache did."""
    set_tracing_disabled(True)
    client = openai_agents.install(AsyncOpenAI(base_url=base_url, api_key="-"))  # this line
    agent = Agent(
        "harbour",
        instructions="You watch tide gauges.",
        tools=[water_level],
        model=OpenAIChatCompletionsModel(model, client),
    )
    with homeport.session(session_id) as session:
        first = await Runner.run(agent, "How high is the water at the north gauge?")
        history = [*first.to_input_list(), {"role": "user", "content": "And is that safe below 4.2 m?"}]
        second = await Runner.run(agent, history)
    print(session.report())
    await client.close()
    return str(second.final_output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    print(asyncio.run(run(args.base_url, args.model, "harbour-1")))
