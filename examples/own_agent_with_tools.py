"""An agent of your own that uses the tools of the environment: each answer of the model is stepped.

agentgym eval env=calculator-math model=tiny agent=examples/own_agent_with_tools.py:play
"""

from openai import AsyncOpenAI

from agentgym import Session
from agentgym.agents import Endpoint
from agentgym.messages import openai_messages, turn_from_openai


async def play(session: Session, endpoint: Endpoint) -> None:
    """A loop around the plain client; what the environment answers is appended to the messages."""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        messages = openai_messages(session.conversation)
        while not session.done:
            reply = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=session.tools)
            choice = reply.choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            result = await session.step(
                turn_from_openai(choice.message.model_dump(), finish_reason=choice.finish_reason)
            )
            messages += openai_messages(result.observation)
