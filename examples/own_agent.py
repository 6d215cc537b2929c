"""An agent of your own around the plain OpenAI client, evaluated and trained unchanged.

    agentgym eval env=calculator-math model=tiny agent=examples/own_agent.py:play
    agentgym train env=calculator-math rollout.agent_loop.name=external \
        rollout.agent_loop.agent=examples/own_agent.py:play
"""

from openai import AsyncOpenAI


async def play(session, endpoint):
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        messages = [{"role": "user", "content": session.task.prompt}]
        reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
        return reply.choices[0].message.content
