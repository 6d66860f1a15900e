"""A weather agent on pydantic-ai; Homeport is one line.

python examples/with_pydantic_ai.py --base-url http://127.0.0.1:8080/v1 --model smollm2
"""

from __future__ import annotations

import argparse
import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import homeport
from homeport.adapters import pydantic_ai as homeport_pydantic_ai


async def run(base_url: str, model: str, session_id: str) -> str:
    """Two questions in one conversation; returns the last answer and prints what the cache did."""
    provider = OpenAIProvider(base_url=base_url, api_key="-")
    agent = Agent(OpenAIChatModel(model, provider=provider), instructions="You watch tide gauges.")

    @agent.tool_plain
    def water_level(gauge: str) -> str:
        """The water level at a gauge, in metres above chart datum."""
        return f"{gauge}: 3.9 m"

    homeport_pydantic_ai.attach(agent)  # this line
    async with agent:
        with homeport.session(session_id) as session:
            first = await agent.run("How high is the water at the north gauge?")
            second = await agent.run("And is that safe below 4.2 m?", message_history=first.all_messages())
    print(session.report())
    return second.output


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    print(asyncio.run(run(args.base_url, args.model, "harbour-2")))
