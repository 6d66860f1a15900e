"""A weather agent on LangGraph; Homeport is one line. The graph's thread id names the conversation.

python examples/with_langgraph.py --base-url http://127.0.0.1:8080/v1 --model smollm2
"""

from __future__ import annotations

import argparse

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import homeport
from homeport.adapters import langchain as homeport_langchain


@tool
def water_level(gauge: str) -> str:
    """The water level at a gauge, in metres above chart datum."""
    return f"{gauge}: 3.9 m"


def run(base_url: str, model: str, thread_id: str) -> str:
    """Two questions in one thread; returns the last answer and prints what the cache did."""
    chat = homeport_langchain.attach(ChatOpenAI(base_url=base_url, api_key="-", model=model))  # this line
    bound = chat.bind_tools([water_level])

    def think(state: MessagesState) -> dict[str, list[object]]:
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([water_level]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    app = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": thread_id}}
    app.invoke({"messages": [HumanMessage("How high is the water at the north gauge?")]}, config)
    end = app.invoke({"messages": [HumanMessage("And is that safe below 4.2 m?")]}, config)
    print(homeport.report(thread_id))
    return str(end["messages"][-1].content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    print(run(args.base_url, args.model, "harbour-3"))
