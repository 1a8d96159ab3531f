"""A search agent in plain code: it calls the policy and the search of the run, over HTTP and without a library.

    PYTHONPATH=examples/agents foray demo rollout.agent.type=python rollout.agent.target=plain_agent:agent \
        rollout.agent.gateway_search=true

trains it on the demo's world instead of the built-in loop.
"""

import json

import aiohttp

PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": PARAMETERS}}


async def agent(question, access):
    """Search as long as the policy asks for it, and return its answer."""
    messages = [{"role": "user", "content": question.text}]
    headers = {"Authorization": f"Bearer {access.api_key}"}
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as session:

        async def post(path, body):
            async with session.post(access.base_url + path, json=body) as response:
                return await response.json()

        while True:
            body = {"model": "policy", "messages": messages, "tools": [SEARCH]}
            said = (await post("/chat/completions", body))["choices"][0]["message"]
            messages.append(said)
            if not said.get("tool_calls"):
                return said["content"]
            for call in said["tool_calls"]:
                found = await post("/search", json.loads(call["function"]["arguments"]))
                text = " ".join(f"( {passage['title']} ) {passage['text']}" for passage in found["passages"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
