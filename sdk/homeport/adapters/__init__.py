"""One line each for agent frameworks: ``openai_agents``, ``pydantic_ai``, ``langchain`` and ``litellm``.

Every function takes the options of :func:`homeport.attach` and gives back what it was given. An open
``with homeport.session(...)`` always says whose request it is; where a framework has an id of its own for a
conversation, that is used outside of one.
"""
