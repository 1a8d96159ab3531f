"""An MCP server that offers a retriever to any agent: a tool `search`, and a tool `read` for whole documents.

    pip install mcp
    python examples/agents/mcp_retriever.py http://127.0.0.1:8090             # stdio, for an agent that starts it
    python examples/agents/mcp_retriever.py http://127.0.0.1:8090 --port 8000 # http://127.0.0.1:8000/mcp

As a tool of the built-in loop:

    tools: [{type: mcp, url: "http://127.0.0.1:8000/mcp", allow: {search: 'passages for {"query": "..."}'}}]

Without an address it searches through Foray's gateway, for an agent that starts it by stdio with its own environment:
then rewards see the passages, and only `search` is offered.
"""

import argparse
import json
import os
from urllib.parse import quote
from urllib.request import Request, urlopen

from mcp.server import MCPServer

parser = argparse.ArgumentParser()
parser.add_argument("url", nargs="?", help="base URL of the retriever; without it the gateway's search")
parser.add_argument("--topk", type=int, default=3)
parser.add_argument("--port", type=int, help="serve HTTP at this port of 127.0.0.1; without it stdio")
given = parser.parse_args()
server = MCPServer("retriever")


def ask(url: str, body: object = None, key: str = "") -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
    with urlopen(request, timeout=30) as response:
        return json.load(response)


@server.tool()
def search(query: str) -> str:
    """Return the passages that answer a query best, each with its id."""
    if given.url:
        body = {"queries": [query], "topk": given.topk, "return_scores": True}
        found = [hit["document"] for hit in ask(f"{given.url}/retrieve", body)["result"][0]]
    else:
        gateway = f"{os.environ['OPENAI_BASE_URL']}/search"
        found = ask(gateway, {"query": query}, os.environ["OPENAI_API_KEY"])["passages"]
    return "\n\n".join(f"[{document['id']}] {document['contents']}" for document in found)


def read(id: str) -> str:
    """Return a whole document by its id."""
    return str(ask(f"{given.url}/passages/{quote(id, safe='')}")["contents"])


if given.url:
    server.tool()(read)
if given.port:
    server.run("streamable-http", port=given.port)
else:
    server.run()
