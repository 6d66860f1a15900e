"""A small agent on a framework as its users write one, without a word of Homeport: two turns, one tool.

usage: framework_agent.py agents|pydantic PROMPT      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

import asyncio
import os
import sys

import openai

PLACE = "You look into drawers. " + "There are many drawers in this house, and each has its story. " * 40


def look(drawer: str) -> str:
    """Look into a drawer."""
    return f"In {drawer} lies a rope."


async def agents(prompt: str, model: str) -> str:
    """The OpenAI Agents SDK, chat completions, streamed."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    speaker = OpenAIChatCompletionsModel(model, openai.AsyncOpenAI())
    agent = Agent("Keeper", instructions=PLACE, model=speaker, tools=[function_tool(look)])
    session, said = SQLiteSession("keeper"), ""
    for turn in (prompt, "And once more."):
        run = Runner.run_streamed(agent, turn, session=session)
        async for _ in run.stream_events():
            pass
        said = str(run.final_output)
    return said


async def pydantic(prompt: str, model: str) -> str:
    """pydantic-ai, not streamed."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel(model), instructions=PLACE, tools=[look])
    first = await agent.run(prompt)
    second = await agent.run("And once more.", message_history=first.all_messages())
    return second.output


async def main() -> None:
    kit = {"agents": agents, "pydantic": pydantic}[sys.argv[1]]
    async with openai.AsyncOpenAI() as client:
        model = (await client.models.list()).data[0].id
    print(await kit(sys.argv[2], model))


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")
    asyncio.run(main())
