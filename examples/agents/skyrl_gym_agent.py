"""Environments of skyrl-gym as an agent: the environment asks, searches and scores; Foray's policy answers.

    pip install skyrl-gym openai        # in the environment of the rollout server
    PYTHONPATH=examples/agents foray up run.yaml

    rollout:
      agent:
        type: python
        target: skyrl_gym_agent:agent
        reward: agent                   # the environment's; it gets the gold answers
        options: {env: search, config: {search_url: "http://127.0.0.1:8090/retrieve", topk: 3, timeout: 30}}

Questions come from `learner.questions`, as for every agent.
"""

import asyncio
from types import SimpleNamespace

import skyrl_gym
from openai import AsyncOpenAI


async def agent(question, access, env="search", config=None, max_turns=4):
    """Play one episode and return its reward."""
    target = {"target": list(question.answers)} if env == "search" else question.answers[0]
    extras = {"reward_spec": {"ground_truth": target}, "max_turns": max_turns}
    game = skyrl_gym.make(env, env_config=SimpleNamespace(**(config or {}), log_requests=False), extras=extras)
    messages, _ = game.init([{"role": "user", "content": question.text}])
    async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages)
            said = reply.choices[0].message
            messages = [*messages, said]
            text = said.content or ""
            # Foray's tags make `<answer>a</answer>` the content `a`; the environment wants the tag
            action = text if "<" in text else f"<answer>{text}</answer>"
            step = await asyncio.to_thread(game.step, action)  # it waits for the search
            if step["done"]:
                return {"answer": text, "reward": float(step["reward"])}
            messages += step["observations"]
